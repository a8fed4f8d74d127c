"""Millions of random operations on one manager: nothing may grow, drift or get lost.

Conversations are admitted, go on, branch, are published in pieces, finished or aborted; handles
are shared, cut, pinned and dropped. At each checkpoint all books are recomputed; then everything is
given back and evicted, after which the manager must hold what it held at the first checkpoint.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.core import BlockManagerImpl, Blocks
from raykv.core.retention import Retention
from raykv.errors import IntegrityError

_MAX_LIVE, _MAX_BLOCKS, _NUM_HISTORIES = 24, 48, 64
_WISHES = (Retention(), Retention(), Retention(20), Retention(80, 50.0), Retention(100, 5.0))
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SoakReport:
    """What a soak saw.

    Attributes:
        num_operations: calls of the manager and of its handles.
        seconds: how long it took, tracing of memory included.
        emptied_bytes: traced memory at each checkpoint, after all was given back and evicted.
        full_bytes: the same before.
        num_evicted: blocks that were evicted on the way.
    """

    num_operations: int
    seconds: float
    emptied_bytes: list[int]
    full_bytes: list[int]
    num_evicted: int

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def soak(
    num_operations: int,
    *,
    eviction: str = "lru",
    num_checkpoints: int = 20,
    num_blocks: int = 1024,
    seed: int = 0,
) -> SoakReport:
    """Run at least so many operations.

    Raises:
        IntegrityError: the books are wrong, or a block was lost.
    """
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    start = time.perf_counter()
    driver = _Driver(BlockManagerImpl(num_blocks, 4, eviction=eviction), seed)
    emptied, full = [], []
    for checkpoint in range(1, num_checkpoints + 1):
        while driver.done < num_operations * checkpoint // num_checkpoints:
            driver.run(1000)
        driver.manager.check_integrity()
        full.append(tracemalloc.get_traced_memory()[0])
        driver.empty()
        emptied.append(tracemalloc.get_traced_memory()[0])
    if not was_tracing:
        tracemalloc.stop()
    seconds = round(time.perf_counter() - start, 1)
    return SoakReport(driver.done, seconds, emptied, full, driver.num_evicted)


class _Driver:
    """Draws operations by the thousand, as arrays, and does them one by one."""

    def __init__(self, manager: BlockManagerImpl, seed: int) -> None:
        self.manager = manager
        self.done = self.num_evicted = 0
        self._rng = np.random.default_rng(seed)
        self._live: list[tuple[Tokens, Blocks]] = []
        self._histories: list[Tokens] = [np.empty(0, np.int32)]
        self._steps: tuple[tuple[int, Callable[[int, int], int]], ...] = (
            (5, self._admit), (4, self._grow), (3, self._publish), (3, self._finish),
            (1, self._abort), (2, self._handles), (2, self._look_up),
        )  # fmt: skip

    def run(self, num_steps: int) -> None:
        """Do so many steps, each of one or several operations."""
        weights = np.array([weight for weight, _ in self._steps])
        kinds = self._rng.choice(len(weights), num_steps, p=weights / weights.sum()).tolist()
        draws = self._rng.integers(0, 2**30, (num_steps, 2)).tolist()
        self.manager.set_time(self.done / 1000)
        for kind, (pick, size) in zip(kinds, draws, strict=True):
            if not self._live:
                kind = 0  # noqa: PLW2901 - nothing to do it with
            self.done += self._steps[kind][1](pick, size)

    def empty(self) -> None:
        """Give everything back, and evict what is cached."""
        self._live.clear()
        manager = self.manager
        everything = manager.allocate(manager.num_total_blocks)
        if everything is None or manager.num_blocks_in_prefix_cache:
            raise IntegrityError(f"after {self.done} operations a block is held by nobody")
        del everything
        if (manager.num_used_blocks, manager.num_free_blocks) != (0, manager.num_total_blocks):
            raise IntegrityError(f"after {self.done} operations a block was lost")
        manager.check_integrity()
        gc.collect()

    def _admit(self, pick: int, size: int) -> int:
        history = self._histories[pick % len(self._histories)]
        kept = history[: size % (len(history) + 1)]
        new = self._rng.integers(0, 3, 1 + size % 37, dtype=np.int32)
        tokens = np.concatenate((kept, new))[: _MAX_BLOCKS * 4]
        self._histories.append(tokens)
        if len(self._histories) > _NUM_HISTORIES:
            del self._histories[pick % _NUM_HISTORIES]
        hit = self.manager.allocate_shared(tokens)
        fresh = self._allocate(-(-len(tokens) // 4) - len(hit))
        if fresh is None:
            hit.release()
            return 3
        self._live.append((tokens, Blocks.concat((hit, fresh))))
        if len(self._live) > _MAX_LIVE:
            return 3 + self._finish(0, size)
        return 3

    def _allocate(self, num_blocks: int) -> Blocks | None:
        before = self.manager.num_blocks_in_prefix_cache
        blocks = self.manager.allocate(num_blocks)
        self.num_evicted += before - self.manager.num_blocks_in_prefix_cache
        return blocks

    def _grow(self, pick: int, size: int) -> int:
        tokens, blocks = self._live[pick % len(self._live)]
        more = self._rng.integers(0, 3, 1 + size % 11, dtype=np.int32)
        tokens = np.concatenate((tokens, more))[: _MAX_BLOCKS * 4]
        fresh = self._allocate(-(-len(tokens) // 4) - len(blocks))
        if fresh is None:
            return 1
        self._live[pick % len(self._live)] = tokens, Blocks.concat((blocks, fresh))
        return 2

    def _publish(self, pick: int, size: int) -> int:
        tokens, blocks = self._live[pick % len(self._live)]
        wish = _WISHES[size % len(_WISHES)]
        self.manager.cache(tokens[: size % (len(tokens) + 1)], blocks, retention=wish)
        return 1

    def _finish(self, pick: int, size: int) -> int:
        tokens, blocks = self._live.pop(pick % len(self._live))
        self.manager.cache(tokens, blocks, retention=_WISHES[size % len(_WISHES)])
        if size % 3:
            self.manager.deallocate(blocks)
        blocks.release()
        return 3

    def _abort(self, pick: int, size: int) -> int:
        blocks = self._live.pop(pick % len(self._live))[1]
        if size % 2:
            blocks.release()
        return 1

    def _handles(self, pick: int, size: int) -> int:
        tokens, blocks = self._live[pick % len(self._live)]
        part = blocks[size % (len(blocks) + 1) :]
        copy, pin = blocks.share(), part.pin()
        part.release()
        if size % 4 == 0:
            self._live[pick % len(self._live)] = tokens, copy
        del copy, blocks
        pin.release()
        return 6

    def _look_up(self, pick: int, size: int) -> int:
        history = self._histories[pick % len(self._histories)]
        with self.manager.allocate_shared(history[: size % (len(history) + 1)]):
            return 2
