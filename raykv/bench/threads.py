"""What the thread-safe manager's lock costs while nobody else wants it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from raykv.core import BlockManagerImpl, ConcurrentBlockManagerImpl

from .managers import BLOCK_SIZE, NUM_BLOCKS, SHORT, Workbench
from .timing import Row, measure

SLOWER = 1.25  # at most this many times the plain manager's time


def rows(num_runs: int = 400) -> Iterator[Row]:
    """Each workload on the plain manager and on the thread-safe one."""
    for workload in (_one_block, _admit_new, _admit_cached, _finish):
        plain = workload(_bench(BlockManagerImpl), num_runs)
        locked = workload(_bench(ConcurrentBlockManagerImpl), num_runs)
        yield replace(plain, level=BlockManagerImpl.__name__)
        yield replace(
            locked,
            level=ConcurrentBlockManagerImpl.__name__,
            target_us=round(SLOWER * plain.median_us, 2),
        )


def _bench(kind: type[BlockManagerImpl]) -> Workbench:
    bench = Workbench()
    bench.manager = kind(NUM_BLOCKS, BLOCK_SIZE)
    return bench


def _one_block(bench: Workbench, num_runs: int) -> Row:
    return measure(
        "allocate one block and release it", "",
        lambda num_tokens: bench.allocate(num_tokens).release(),
        prepare=lambda: BLOCK_SIZE, num_runs=num_runs,
    )  # fmt: skip


def _admit_new(bench: Workbench, num_runs: int) -> Row:
    return measure(
        "admit a new 8k prompt", "", bench.admit,
        prepare=lambda: bench.prompt(SHORT), after=bench.drop, num_runs=num_runs,
    )  # fmt: skip


def _admit_cached(bench: Workbench, num_runs: int) -> Row:
    prompts = itertools.cycle(bench.publish(48, SHORT))
    return measure(
        "admit a cached 8k prompt", "", bench.admit,
        prepare=lambda: next(prompts), after=bench.drop, num_runs=num_runs,
    )  # fmt: skip


def _finish(bench: Workbench, num_runs: int) -> Row:
    return measure(
        "finish 8k: publish and release", "", lambda pair: bench.finish(*pair),
        prepare=lambda: (bench.prompt(SHORT), bench.allocate(SHORT)), num_runs=min(num_runs, 110),
    )  # fmt: skip
