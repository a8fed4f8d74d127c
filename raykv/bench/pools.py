"""What a pool costs per sequence: in this process, and over Ray.

``BlockManagerPool.local`` adds the choice of a rank, the single block, the block table, the hit
statistics and a copy of nothing. Over Ray each row is one call to one rank, round trip included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from raykv.config import PoolConfig, RayConfig
from raykv.core import Sequence
from raykv.pool import BlockManagerPool

from .managers import BLOCK_SIZE, NUM_BLOCKS, SHORT, Workbench
from .timing import Row, measure

LOCAL, RAY = "BlockManagerPool.local", "Ray pool"
_MEDIUM = 1024  # tokens


def local_rows(num_runs: int = 100) -> Iterator[Row]:
    """Pool level, without Ray: one sequence a call, and lists of 64."""
    for num_seqs in (1, 64):
        yield from _rows(
            LOCAL, BlockManagerPool.local, num_seqs, SHORT, max(30, num_runs // num_seqs)
        )
    yield _decode_row(LOCAL, BlockManagerPool.local, 256, num_runs)


def ray_rows(num_runs: int = 100) -> Iterator[Row]:
    """The same over Ray: batches of 1, 16 and 256 sequences of 1,024 tokens."""
    from raykv.actors import launch  # noqa: PLC0415 - seconds to import, and an extra process

    for num_seqs in (1, 16, 256):
        yield from _rows(RAY, launch, num_seqs, _MEDIUM, max(30, num_runs // num_seqs))
    yield _decode_row(RAY, launch, 256, num_runs)


def _pool(make: Callable[[PoolConfig], BlockManagerPool]) -> BlockManagerPool:
    return make(
        PoolConfig(
            dp_size=1,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=512,
            max_model_len=4 * SHORT,
            ray=RayConfig(num_cpus=0),
        )
    )


def _rows(
    level: str,
    make: Callable[[PoolConfig], BlockManagerPool],
    num_seqs: int,
    num_tokens: int,
    num_runs: int,
) -> Iterator[Row]:
    """Admission of new and of cached prompts, and their end, per sequence."""
    bench = Workbench()
    what = f"{num_tokens // 1024}k prompt" + (f", {num_seqs} a call" if num_seqs > 1 else "")
    with _pool(make) as pool:

        def fresh() -> list[Sequence]:
            return [Sequence(bench.prompt(num_tokens)) for _ in range(num_seqs)]

        def computed() -> list[Sequence]:
            sequences = allocate(fresh())
            for sequence in sequences:
                sequence.kv_state.num_computed_tokens = num_tokens
            return sequences

        def allocate(sequences: list[Sequence]) -> list[Sequence]:
            assert pool.allocate(sequences), "the pool is large enough"
            return sequences

        cached = [computed() for _ in range(max(1, 48 // num_seqs))]
        prompts = itertools.cycle([[s.token_ids for s in sequences] for sequences in cached])
        for sequences in cached:
            pool.deallocate(sequences)
        yield measure(
            f"admit a cached {what}", level, allocate,
            prepare=lambda: [Sequence(tokens) for tokens in next(prompts)],
            after=pool.deallocate, num_runs=num_runs, num_calls=num_seqs,
        )  # fmt: skip
        yield measure(
            f"admit a new {what}", level, allocate, prepare=fresh,
            after=pool.deallocate_without_cache, num_runs=num_runs, num_calls=num_seqs,
        )  # fmt: skip
        yield measure(
            f"finish a {what}", level, pool.deallocate, prepare=computed,
            num_runs=num_runs, num_calls=num_seqs,
        )  # fmt: skip


def _decode_row(
    level: str, make: Callable[[PoolConfig], BlockManagerPool], num_seqs: int, num_runs: int
) -> Row:
    """One more token for each of many sequences, in one call."""
    bench = Workbench()
    with _pool(make) as pool:
        sequences = [Sequence(bench.prompt(16 + index * 3 % 512)) for index in range(num_seqs)]
        assert pool.allocate(sequences), "the pool is large enough"

        def grow() -> list[Sequence]:
            for sequence in sequences:
                sequence.kv_state.num_computed_tokens = sequence.num_tokens
                sequence.append(1)
            return sequences

        row = measure(
            f"decode step, {num_seqs} staggered sequences", level, pool.allocate,
            prepare=grow, num_runs=num_runs,
        )  # fmt: skip
        pool.deallocate_without_cache(sequences)
        return row
