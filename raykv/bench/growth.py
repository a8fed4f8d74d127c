"""How costs grow: with the prompt, the pool, the entries in the way, the turns and the branches.

None should. Rows that handle many tokens or runs are divided by them, so that rows of one workload
can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from raykv.core import BlockManagerImpl, Blocks

from .managers import BLOCK_SIZE, LEVEL, NUM_BLOCKS, SHORT, Tokens, Workbench
from .timing import Row, measure

PROMPT_LENGTHS = tuple(8_192 * 2**power for power in (0, 2, 4, 6, 7))  # up to 1M tokens
POOL_SIZES = tuple(2**power for power in (16, 18, 20, 22))
NUM_IN_THE_WAY = (0, 1_000, 10_000)
NUM_TURNS = 200
NUM_BRANCHES = (10, 10_000)
_UNIT = 1_024  # tokens


def rows(num_runs: int = 40) -> Iterator[Row]:
    """All workloads, one after the other."""
    for num_tokens in PROMPT_LENGTHS:
        yield from by_prompt(num_tokens, num_runs)
    for num_blocks in POOL_SIZES:
        yield from by_pool(num_blocks, num_runs)
    for kind in ("referenced", "stale"):
        for count in NUM_IN_THE_WAY:
            yield from by_entries_in_the_way(kind, count, num_runs)
    yield from by_turns(NUM_TURNS, num_runs)
    for eviction in ("lru", "lrfu"):
        for count in NUM_BRANCHES:
            yield from by_branches(count, num_runs, eviction)


def by_prompt(num_tokens: int, num_runs: int) -> Iterator[Row]:
    """One prompt's admission and end, per 1,024 tokens."""
    bench = Workbench(max(65_536, 4 * num_tokens // BLOCK_SIZE + 1))
    what, parts = f"of {num_tokens:,} tokens, per 1,024", num_tokens // _UNIT
    yield measure(
        f"admit a new prompt {what}", LEVEL, bench.admit,
        prepare=lambda: bench.prompt(num_tokens), after=bench.drop,
        num_runs=num_runs, num_calls=parts,
    )  # fmt: skip
    # Four megabytes or more of prompts in turn, so that short ones are not warm by luck.
    num_prompts = max(2, min(48, 2**20 // num_tokens))
    prompts = itertools.cycle(bench.publish(num_prompts, num_tokens))
    yield measure(
        f"admit a cached prompt {what}", LEVEL, bench.admit,
        prepare=lambda: next(prompts), after=bench.drop, num_runs=num_runs, num_calls=parts,
    )  # fmt: skip

    def prepare() -> tuple[Tokens, Blocks]:
        return bench.prompt(num_tokens), bench.allocate(num_tokens)

    yield measure(
        f"finish a prompt {what}", LEVEL, lambda pair: bench.finish(*pair),
        prepare=prepare, num_runs=num_runs, num_calls=parts,
    )  # fmt: skip


def by_pool(num_blocks: int, num_runs: int) -> Iterator[Row]:
    """An 8k prompt in small and large pools, half of which are cached."""
    bench, what = Workbench(num_blocks), f"in a pool of {num_blocks:,} blocks"
    prompts = bench.publish(num_blocks // (2 * SHORT // BLOCK_SIZE), SHORT)
    yield measure(
        f"admit a new 8k prompt {what}", LEVEL, bench.admit,
        prepare=lambda: bench.prompt(SHORT), after=bench.drop, num_runs=num_runs,
    )  # fmt: skip
    cycle = itertools.cycle(prompts[:48])
    yield measure(
        f"admit a cached 8k prompt {what}", LEVEL, bench.admit,
        prepare=lambda: next(cycle), after=bench.drop, num_runs=num_runs,
    )  # fmt: skip
    rest = bench.allocate(bench.manager.num_free_blocks * BLOCK_SIZE)

    def live(tokens: Tokens) -> tuple[Tokens, Blocks]:
        return tokens, bench.admit(tokens)[1]

    yield measure(
        f"admit an 8k prompt, evicting 512 blocks, {what}", LEVEL, live,
        prepare=lambda: bench.prompt(SHORT), after=lambda pair: bench.finish(*pair),
        num_runs=num_runs,
    )  # fmt: skip
    rest.release()


def by_entries_in_the_way(kind: str, count: int, num_runs: int) -> Iterator[Row]:
    """Eviction of 512 blocks behind runs that are in use again, or were used since.

    The first eviction steps over them, once and for all: part of what their releases cost. The
    later ones meet none.
    """
    num_later = num_runs + 6  # enough 8k prompts to evict all the while

    def prepare() -> tuple[Workbench, list[Blocks]]:
        bench = Workbench(count + (num_later + 2) * SHORT // BLOCK_SIZE)
        in_the_way = bench.publish(count, BLOCK_SIZE)
        bench.publish(num_later + 1, SHORT)
        hits = [bench.manager.allocate_shared(tokens) for tokens in in_the_way]
        if kind == "stale":
            hits.clear()  # released: they stand behind the others now
        return bench, [*hits, bench.allocate(bench.manager.num_free_blocks * BLOCK_SIZE)]

    def evict(prepared: tuple[Workbench, list[Blocks]]) -> None:
        prepared[1].append(prepared[0].allocate(SHORT))

    what = f"evict 512 blocks behind {count:,} {kind} entries"
    yield measure(
        f"{what}, the first time", LEVEL, evict, prepare=prepare, num_runs=min(num_runs, 10)
    )
    prepared = prepare()
    evict(prepared)

    def give_back(_: object) -> None:
        bench, held = prepared
        bench.finish(bench.prompt(SHORT), held.pop())

    yield measure(
        f"{what}, later", LEVEL, evict,
        prepare=lambda: prepared, after=give_back, num_runs=num_runs,
    )  # fmt: skip


def by_turns(num_turns: int, num_runs: int) -> Iterator[Row]:
    """A conversation of many turns: one more turn, and its cached prompt in as many runs."""
    bench, per_turn = Workbench(), 8 * BLOCK_SIZE
    branched = bench.converse(num_turns, num_turns * per_turn)
    yield measure(
        f"admit a cached conversation in {num_turns} runs, per run", LEVEL, bench.admit,
        prepare=lambda: branched, after=bench.drop, num_runs=num_runs, num_calls=num_turns,
    )  # fmt: skip
    history = bench.prompt(num_turns * per_turn)
    for turn in range(1, num_turns + 1):
        part = history[: turn * per_turn]
        bench.finish(part, Blocks.concat(bench.admit(part)))

    def turn_over(tokens: Tokens) -> None:
        bench.finish(tokens, Blocks.concat(bench.admit(tokens)))

    def next_turn() -> Tokens:
        nonlocal history
        history = np.concatenate((history, bench.prompt(per_turn)))
        return history

    yield measure(
        f"a turn of a conversation of {num_turns} turns: admit and finish", LEVEL, turn_over,
        prepare=next_turn, num_runs=num_runs,
    )  # fmt: skip


def by_branches(count: int, num_runs: int, eviction: str = "lru") -> Iterator[Row]:
    """Prompts that share 512 blocks and go on differently."""
    bench, what = Workbench(), f"beside {count:,} branches of one parent ({eviction})"
    bench.manager = BlockManagerImpl(NUM_BLOCKS, BLOCK_SIZE, eviction=eviction)
    trunk = bench.prompt(SHORT)

    def branch() -> Tokens:
        return np.concatenate((trunk, bench.prompt(2 * BLOCK_SIZE)))

    def admit_branch() -> tuple[Tokens, tuple[Blocks, Blocks]]:
        tokens = branch()
        return tokens, bench.admit(tokens)

    def finish(pair: tuple[Tokens, tuple[Blocks, Blocks]]) -> None:
        bench.finish(pair[0], Blocks.concat(pair[1]))

    for _ in range(count):
        finish(admit_branch())
    yield measure(
        f"admit a branch {what}", LEVEL, bench.admit,
        prepare=branch, after=bench.drop, num_runs=num_runs,
    )  # fmt: skip
    yield measure(f"finish a branch {what}", LEVEL, finish, prepare=admit_branch, num_runs=num_runs)
    rest = [bench.allocate(bench.manager.num_free_blocks * BLOCK_SIZE)]
    yield measure(
        f"evict a block {what}", LEVEL, lambda _: rest.append(bench.allocate(BLOCK_SIZE)),
        prepare=lambda: None, num_runs=num_runs,
    )  # fmt: skip
