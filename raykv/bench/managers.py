"""What the block manager costs per operation, at BlockManagerImpl's public API.

Block size 16, 65,536 blocks, prefix cache on. Prompts rotate, so that none is in the processor's
cache by luck. An admission is a lookup (``allocate_shared``) and an allocation of the rest
(``allocate``); finishing is ``cache``, ``deallocate`` and ``release``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from raykv.core import BlockManagerImpl, Blocks
from raykv.core.block_tables import BlockTables
from raykv.core.tokens import TokenIds

from .timing import Row, measure

Tokens = NDArray[np.int32]
LEVEL = "BlockManagerImpl"
BLOCK_SIZE = 16
NUM_BLOCKS = 65_536
SHORT, LONG = 8_192, 131_072  # tokens
_VOCAB_SIZE = 50_000


class Workbench:
    """A manager and a supply of random prompts.

    Args:
        num_blocks: of the manager.
        seed: of the prompts.
    """

    def __init__(self, num_blocks: int = NUM_BLOCKS, seed: int = 0) -> None:
        self.manager = BlockManagerImpl(num_blocks, BLOCK_SIZE)
        self._rng = np.random.default_rng(seed)

    def prompt(self, num_tokens: int) -> Tokens:
        """A new prompt, int32."""
        return self._rng.integers(0, _VOCAB_SIZE, num_tokens, dtype=np.int32)

    def admit(self, tokens: TokenIds) -> tuple[Blocks, Blocks]:
        """Take the cached prefix and the missing blocks."""
        shared = self.manager.allocate_shared(tokens)
        fresh = self.manager.allocate(len(tokens) // BLOCK_SIZE - len(shared))
        assert fresh is not None, "the pool is large enough"
        return shared, fresh

    def finish(self, tokens: Tokens, blocks: Blocks) -> None:
        """Publish and give back."""
        self.manager.cache(tokens, blocks)
        self.manager.deallocate(blocks)
        blocks.release()

    def drop(self, admitted: tuple[Blocks, Blocks]) -> None:
        """Give back without publishing."""
        for blocks in admitted:
            self.manager.deallocate(blocks)
            blocks.release()

    def allocate(self, num_tokens: int) -> Blocks:
        """Blocks for a prompt that is not looked up."""
        blocks = self.manager.allocate(num_tokens // BLOCK_SIZE)
        assert blocks is not None, "the pool is large enough"
        return blocks

    def publish(self, num_prompts: int, num_tokens: int) -> list[Tokens]:
        """Leave prompts in the prefix cache."""
        prompts = [self.prompt(num_tokens) for _ in range(num_prompts)]
        for tokens in prompts:
            self.finish(tokens, self.allocate(num_tokens))
        return prompts

    def converse(self, num_turns: int, num_tokens: int) -> Tokens:
        """Leave a conversation in the cache, each turn its own run: all turns were forked once."""
        tokens = self.prompt(num_tokens)
        for turn in range(1, num_turns + 1):
            stop = num_tokens * turn // num_turns
            for row in (tokens[:stop], np.concatenate((tokens[:stop], self.prompt(BLOCK_SIZE)))):
                blocks = Blocks.concat(self.admit(row))
                self.finish(row, blocks)
        return tokens


def rows(num_runs: int = 100) -> Iterator[Row]:
    """All workloads, one after the other."""
    for workload in WORKLOADS:
        yield workload(num_runs)


def admit_new(num_runs: int) -> Row:
    """A prompt that nobody has sent before."""
    bench = Workbench()
    bench.publish(48, SHORT)
    return measure(
        "admit a new 8k prompt", LEVEL, bench.admit,
        prepare=lambda: bench.prompt(SHORT), after=bench.drop, num_runs=num_runs, target_us=8,
    )  # fmt: skip


def admit_new_list(num_runs: int) -> Row:
    """The same from a Python list of ints instead of an int32 array."""
    bench = Workbench()
    return measure(
        "admit a new 8k prompt, from a list", LEVEL, bench.admit,
        prepare=lambda: bench.prompt(SHORT).tolist(), after=bench.drop, num_runs=num_runs,
    )  # fmt: skip


def admit_cached(num_runs: int) -> Row:
    """One of 48 prompts that are in the cache, in turn."""
    bench = Workbench()
    prompts = itertools.cycle(bench.publish(48, SHORT))
    return measure(
        "admit a cached 8k prompt", LEVEL, bench.admit,
        prepare=lambda: next(prompts), after=bench.drop, num_runs=num_runs, target_us=14,
    )  # fmt: skip


def decode_step(num_runs: int) -> Row:
    """One more token for each of 256 sequences, a sixteenth of which need a block."""
    bench, num_seqs = Workbench(), 256
    tables = BlockTables(num_seqs + 1, 1024, BLOCK_SIZE)
    rows_in_use = np.arange(1, num_seqs + 1)
    lengths = np.arange(1, num_seqs + 1) * 3 % 512 + 1
    tables.grow(bench.manager, rows_in_use, lengths)

    def step(_: None) -> bool:
        lengths.__iadd__(1)
        return tables.grow(bench.manager, rows_in_use, lengths)

    return measure(
        "decode step, 256 staggered sequences", LEVEL, step,
        prepare=lambda: None, num_runs=num_runs, target_us=7,
    )  # fmt: skip


def finish(num_runs: int) -> Row:
    """Publish 512 computed blocks and give them back."""
    bench = Workbench()

    def prepare() -> tuple[Tokens, Blocks]:
        return bench.prompt(SHORT), bench.allocate(SHORT)

    return measure(
        "finish 8k: publish and release", LEVEL, lambda pair: bench.finish(*pair),
        prepare=prepare, num_runs=min(num_runs, 110), target_us=40,
    )  # fmt: skip


def admit_and_finish(num_runs: int) -> Row:
    """A new prompt's whole life: others publish at admission, we at the end."""
    bench = Workbench()

    def live(tokens: Tokens) -> None:
        shared, fresh = bench.admit(tokens)
        bench.finish(tokens, Blocks.concat((shared, fresh)) if len(shared) else fresh)

    return measure(
        "admit a new 8k prompt and finish it", LEVEL, live,
        prepare=lambda: bench.prompt(SHORT), num_runs=min(num_runs, 110),
    )  # fmt: skip


def admit_evicting(num_runs: int) -> Row:
    """A new prompt whose 512 blocks must all be evicted first."""
    bench = Workbench()
    bench.publish(NUM_BLOCKS // (SHORT // BLOCK_SIZE) - 1, SHORT)
    rest = bench.allocate(bench.manager.num_free_blocks * BLOCK_SIZE)

    def live(tokens: Tokens) -> tuple[Tokens, Blocks]:
        return tokens, bench.admit(tokens)[1]

    row = measure(
        "admit an 8k prompt, evicting 512 blocks", LEVEL, live,
        prepare=lambda: bench.prompt(SHORT), after=lambda pair: bench.finish(*pair),
        num_runs=num_runs, target_us=36,
    )  # fmt: skip
    rest.release()
    return row


def admit_new_long(num_runs: int) -> Row:
    """A new prompt of 8,192 blocks."""
    bench = Workbench()
    return measure(
        "admit a new 128k prompt", LEVEL, bench.admit,
        prepare=lambda: bench.prompt(LONG), after=bench.drop, num_runs=num_runs, target_us=22,
    )  # fmt: skip


def admit_cached_long(num_runs: int) -> Row:
    """A cached prompt of 8,192 blocks, one of six in turn."""
    bench = Workbench()
    prompts = itertools.cycle(bench.publish(6, LONG))
    return measure(
        "admit a cached 128k prompt", LEVEL, bench.admit,
        prepare=lambda: next(prompts), after=bench.drop, num_runs=num_runs, target_us=55,
    )  # fmt: skip


def admit_conversation(num_runs: int) -> Row:
    """A cached prompt whose 16 turns lie in 16 runs."""
    bench = Workbench()
    prompts = itertools.cycle([bench.converse(16, SHORT) for _ in range(48)])
    return measure(
        "admit a cached 8k conversation of 16 turns", LEVEL, bench.admit,
        prepare=lambda: next(prompts), after=bench.drop, num_runs=num_runs, target_us=50,
    )  # fmt: skip


WORKLOADS: tuple[Callable[[int], Row], ...] = (
    admit_new, admit_new_list, admit_cached, decode_step, finish, admit_and_finish,
    admit_evicting, admit_new_long, admit_cached_long, admit_conversation,
)  # fmt: skip
