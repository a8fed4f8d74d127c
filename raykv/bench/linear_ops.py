"""What the books of recurrent states cost per operation, at LinearStatePrefixCache's public API.

All workloads run beside many checkpoints, with free slots or, "reclaiming", without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from raykv.core import Blocks, CheckedPrefix, LinearStatePrefixCache, Sequence

from . import timing
from .timing import Row

T = TypeVar("T")

LEVEL = "LinearStatePrefixCache"
NUM_TOKENS = 8_192  # of the prefix that is compared
_TARGET_US = 5
_NUM_SPARE_SLOTS = 16


class Workbench:
    """A cache full of checkpoints.

    Args:
        num_checkpoints: committed, unpinned ones.
        num_spare_slots: slots that stay free.
        prefix: what the checkpoints stand for, if that is compared.
    """

    def __init__(
        self, num_checkpoints: int, num_spare_slots: int, prefix: CheckedPrefix | None = None
    ) -> None:
        self.cache = LinearStatePrefixCache(1 + num_checkpoints + num_spare_slots)
        self.sequence = Sequence([1])
        self.prefix = prefix
        self._numbers = itertools.count()
        self._known = [self.name() for _ in range(num_checkpoints)]
        for name in self._known:
            self.save(name)
        # In an order that tells the processor's caches nothing.
        order: list[int] = np.random.default_rng(0).permutation(num_checkpoints).tolist()
        self._next_known = itertools.cycle([self._known[at] for at in order])

    def name(self) -> bytes:
        """A hash that nobody has used."""
        return next(self._numbers).to_bytes(16, "big")

    def known(self) -> bytes:
        """A checkpoint's hash."""
        return next(self._next_known)

    def save(self, name: bytes) -> None:
        """Reserve and commit."""
        reservation = self.cache.reserve_checkpoint(name, prefix=self.prefix)
        assert reservation is not None, "there are slots, or checkpoints to reclaim"
        self.cache.commit(reservation)

    def acquire(self, _: object = None) -> None:
        """Give the sequence a live slot."""
        blocks = self.cache.acquire_live_slot()
        assert blocks is not None, "there are slots, or checkpoints to reclaim"
        self.sequence.linear_state_slot = int(blocks.detach()[0])

    def release(self, _: object = None) -> None:
        """The live slot comes back."""
        self.cache.release_live_slot(self.sequence)

    def match_and_release(self, name: bytes) -> None:
        """A hit, and the end of its copy."""
        pin = self.cache.match(name, prefix=self.prefix)
        assert pin is not None, "it is there"
        pin.release()

    def promote(self, name: bytes, *, final: bool) -> Blocks:
        """The live slot becomes a checkpoint; returns its pin."""
        pin = self.cache.promote(self.sequence, name, final=final, prefix=self.prefix)
        assert pin is not None, "there are slots, or checkpoints to reclaim"
        return pin

    def fresh_name(self) -> bytes:
        """A new hash, and a live slot to promote."""
        if self.sequence.linear_state_slot is None:
            self.acquire()
        return self.name()

    def fill(self) -> None:
        """Leave no slot free, so that each one that is taken was a checkpoint's."""
        while self.cache.num_free_slots:
            self.save(self.name())


def measure(num_checkpoints: int = 10_000, num_runs: int = 2_000) -> list[Row]:
    """Medians of acquire, match, commit and promote beside so many checkpoints.

    Args:
        num_checkpoints: committed ones, throughout.
        num_runs: runs of each workload.
    """
    rows = [workload(num_checkpoints, num_runs) for workload in WORKLOADS]
    return [*rows, _match_compared(num_checkpoints, num_runs)]


def _acquire(num_checkpoints: int, num_runs: int) -> Row:
    bench = Workbench(num_checkpoints, _NUM_SPARE_SLOTS)
    return _row("acquire a live slot", bench.acquire, bench.name, num_runs, after=bench.release)


def _acquire_reclaiming(num_checkpoints: int, num_runs: int) -> Row:
    bench = Workbench(num_checkpoints, 1)

    def prepare() -> None:
        bench.fill()

    return _row("acquire a live slot, reclaiming", bench.acquire, prepare, num_runs,
                after=bench.release)  # fmt: skip


def _release(num_checkpoints: int, num_runs: int) -> Row:
    bench = Workbench(num_checkpoints, _NUM_SPARE_SLOTS)
    return _row("release a live slot", bench.release, bench.acquire, num_runs)


def _match(num_checkpoints: int, num_runs: int) -> Row:
    bench = Workbench(num_checkpoints, _NUM_SPARE_SLOTS)
    return _row("match and release", bench.match_and_release, bench.known, num_runs)


def _match_compared(num_checkpoints: int, num_runs: int) -> Row:
    tokens = np.arange(NUM_TOKENS, dtype=np.int32).tobytes()
    bench = Workbench(num_checkpoints, _NUM_SPARE_SLOTS, CheckedPrefix(tokens, NUM_TOKENS))
    bench.prefix = CheckedPrefix(bytes(bytearray(tokens)), NUM_TOKENS)  # equal, but elsewhere
    return _row("match and release, 8k tokens compared", bench.match_and_release, bench.known,
                num_runs, target_us=None)  # fmt: skip


def _commit(num_checkpoints: int, num_runs: int) -> Row:
    bench = Workbench(num_checkpoints, num_runs + _NUM_SPARE_SLOTS)
    return _row("reserve and commit", bench.save, bench.name, num_runs)


def _commit_reclaiming(num_checkpoints: int, num_runs: int) -> Row:
    bench = Workbench(num_checkpoints, 0)
    return _row("reserve and commit, reclaiming", bench.save, bench.name, num_runs)


def _promote_final(num_checkpoints: int, num_runs: int) -> Row:
    bench = Workbench(num_checkpoints, 1)
    return _row("promote, final", lambda name: bench.promote(name, final=True), bench.fresh_name,
                num_runs, after=Blocks.release)  # fmt: skip


def _promote(num_checkpoints: int, num_runs: int) -> Row:
    bench = Workbench(num_checkpoints, 1)
    return _row("promote, reclaiming", lambda name: bench.promote(name, final=False),
                bench.fresh_name, num_runs, after=Blocks.release)  # fmt: skip


def _row(
    workload: str,
    operation: Callable[..., T],
    prepare: Callable[[], object],
    num_runs: int,
    *,
    after: Callable[[T], object] = lambda _: None,
    target_us: float | None = _TARGET_US,
) -> Row:
    return timing.measure(
        workload, LEVEL, operation,
        prepare=prepare, after=after, num_runs=num_runs, target_us=target_us,
    )  # fmt: skip


WORKLOADS: tuple[Callable[[int, int], Row], ...] = (
    _acquire, _acquire_reclaiming, _release, _match, _commit, _commit_reclaiming, _promote_final,
    _promote,
)  # fmt: skip
