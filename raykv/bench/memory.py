"""What the books take: bytes per block, per cached block and per run, by tracemalloc.

NumPy reports its arrays to tracemalloc, so nothing is left out. Tokens of cached prompts, 4 bytes
each, are content and not counted, except where it says so.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .managers import BLOCK_SIZE, NUM_BLOCKS, Workbench

BYTES_PER_BLOCK, BYTES_PER_RUN = 120, 600
_TOKEN_BYTES = 4 * BLOCK_SIZE  # per block


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        what: what takes the memory.
        num_bytes: how much, per piece.
        target_bytes: what it should stay under; None where there is no target.
    """

    what: str
    num_bytes: float
    target_bytes: float | None = None

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def figures(num_blocks: int = NUM_BLOCKS) -> Iterator[Figure]:
    """All figures, of pools of this size, block size 16."""
    _taken(lambda: _cached(128, 2, 2))  # what is made once per process
    idle = _taken(lambda: Workbench(num_blocks)) / num_blocks
    yield Figure("an idle manager, per block", round(idle, 1))
    num_runs = num_blocks // 64
    short = _taken(lambda: _cached(num_blocks, num_runs, 1)) - idle * num_blocks
    long = _taken(lambda: _cached(num_blocks, num_runs, 32)) - idle * num_blocks
    per_block = (long - short) / (31 * num_runs) - _TOKEN_BYTES
    yield Figure("a block, cached", round(idle + per_block, 1), BYTES_PER_BLOCK)
    per_run = short / num_runs - per_block - _TOKEN_BYTES
    yield Figure("a run", round(per_run, 1), BYTES_PER_RUN)
    for length in (1, 2, 8, 512):
        num_runs = (num_blocks - 1) // length
        whole = _taken(lambda n=num_runs, k=length: _cached(num_blocks, n, k))  # type: ignore[misc]
        bound = BYTES_PER_BLOCK + _TOKEN_BYTES + BYTES_PER_RUN / length
        yield Figure(
            f"a pool full of runs of {length} blocks, per block, tokens included",
            round(whole / num_blocks, 1), round(bound, 1),
        )  # fmt: skip


def _cached(num_blocks: int, num_runs: int, length: int) -> Workbench:
    bench = Workbench(num_blocks)
    for _ in range(num_runs):
        tokens = bench.prompt(length * BLOCK_SIZE)
        bench.finish(tokens, bench.allocate(len(tokens)))
    return bench


def _taken(make: Callable[[], Workbench]) -> int:
    """Bytes that stay allocated as long as what is made lives."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    made = make()
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    del made
    if not was_tracing:
        tracemalloc.stop()
    return taken
