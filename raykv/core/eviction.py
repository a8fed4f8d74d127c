"""In which order cached blocks go: a queue for LRU, a heap for policies that score.

Whatever the policy, closure holds: within a run the deepest block goes first, and no run is cut
past one of its children. A policy only says which stretch is worth least.
"""

from __future__ import annotations

import heapq
import importlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raykv.errors import ConfigError

from .retention import DEFAULT_RETENTION
from .runs import Run

_MAX_UNSCORED = 1024
_Entry = tuple[float, int, Run]


@dataclass(frozen=True, slots=True)
class Released:
    """Stretches that lost their last holder, as a policy sees them; arrays of equal length n.

    Attributes:
        stamps: int64 [n], counts releases: larger is later.
        turnovers: float64 [n], blocks published until the release, per block of the pool: a clock
            that runs as fast as the cache is overwritten, whatever its size.
        last_scores: float64 [n], the run's score from its release before; -inf the first time.
        depths: int64 [n], blocks between the root and the run.
        priorities: int64 [n], the run's retention priority, 0 to 100.
    """

    stamps: NDArray[np.int64]
    turnovers: NDArray[np.float64]
    last_scores: NDArray[np.float64]
    depths: NDArray[np.int64]
    priorities: NDArray[np.int64]


class EvictionPolicy(ABC):
    """Says what released stretches are worth. Chosen by name, or as ``module:Class``."""

    @abstractmethod
    def scores(self, released: Released) -> NDArray[np.float64]:
        """The worth of each stretch, float64 [n]; the least goes first, the older one of equals."""


class LrfuPolicy(EvictionPolicy):
    """Recency and frequency together: every use counts 1 and fades by half per half-life.

    The weight of a stretch after uses at times t_i is the sum of 2 ** ((t_i - t) / half_life). The
    order of two weights never changes between uses, so log2(weight) + t / half_life is a score
    that need not be updated. LRFU: Lee et al., IEEE Transactions on Computers, 2001.

    Args:
        half_life: in turnovers of the pool. Short is LRU, long is LFU.
    """

    def __init__(self, half_life: float = 1.0) -> None:
        self.half_life = half_life

    def scores(self, released: Released) -> NDArray[np.float64]:
        """See EvictionPolicy."""
        now = released.turnovers / self.half_life
        return np.asarray(np.logaddexp2(now, released.last_scores))


class PriorityPolicy(EvictionPolicy):
    """Low retention priorities go first, LRU among equals; see ``Retention``.

    The idea is TensorRT-LLM's KvCacheRetentionConfig.
    """

    def scores(self, released: Released) -> NDArray[np.float64]:
        """See EvictionPolicy."""
        return np.ldexp(released.priorities.astype(np.float64), 44) + released.stamps


class EvictionOrder(ABC):
    """Keeps the evictable stretches in order; the prefix cache tells it what happens to them."""

    @abstractmethod
    def add(self, run: Run, stamp: int) -> None:
        """A stretch of the run was released: the one with this stamp in ``run.tails``."""

    @abstractmethod
    def victims(self, now_s: float) -> Iterator[tuple[Run, int]]:
        """Runs to cut next, each with the length it may be cut to; resumes after each cut."""

    @abstractmethod
    def compact(self, live: Iterable[Run]) -> None:
        """Drop entries of stretches that are gone, if they outnumber the others."""

    @abstractmethod
    def stamps(self) -> set[int]:
        """Stamps that are kept, live and gone; for audits."""

    def published(self, num_blocks: int) -> None:  # noqa: B027 - only scores need the clock
        """Blocks were added to the cache."""

    def child_removed(self, run: Run) -> None:  # noqa: B027 - only a heap has to know
        """A child of the run is gone."""


class LruOrder(EvictionOrder):
    """Least recently released first. Stamps ascend by themselves, so a queue does.

    Stamps never grow with depth either, so no child can be in the way.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Run, int]] = deque()

    def add(self, run: Run, stamp: int) -> None:
        """See EvictionOrder."""
        self._queue.append((run, stamp))

    def victims(self, now_s: float) -> Iterator[tuple[Run, int]]:  # noqa: ARG002
        """See EvictionOrder."""
        queue = self._queue
        while queue:
            run, stamp = queue[0]
            if run.tails and run.tails[0][1] == stamp:
                yield run, run.tails[0][0]
            else:
                queue.popleft()  # held again since, or just cut away

    def compact(self, live: Iterable[Run]) -> None:
        """See EvictionOrder."""
        stamps = {stamp for run in live for _, stamp in run.tails}
        if len(self._queue) > 2 * len(stamps) + 64:
            self._queue = deque(entry for entry in self._queue if entry[1] in stamps)

    def stamps(self) -> set[int]:
        """See EvictionOrder."""
        return {stamp for _, stamp in self._queue}


class ScoredOrder(EvictionOrder):
    """Lowest score first, by a heap. Scores are computed for many stretches at a time.

    Args:
        policy: gives the scores.
        num_blocks: of the pool, the unit of turnovers.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self._num_published = 0
        self._policy = policy
        self._num_blocks = num_blocks
        self._unscored: list[tuple[Run, int, int]] = []  # run, stamp, blocks published until then
        self._heap: list[_Entry] = []
        self._blocked: dict[Run, list[_Entry]] = {}  # a child is in the way
        self._expiries: list[_Entry] = []  # as the heap, by the time at which a priority ends

    def add(self, run: Run, stamp: int) -> None:
        """See EvictionOrder."""
        self._unscored.append((run, stamp, self._num_published))
        if run.retention.duration_s is not None:
            heapq.heappush(self._expiries, (run.expires_s, stamp, run))
        if len(self._unscored) >= _MAX_UNSCORED:
            self._score()

    def victims(self, now_s: float) -> Iterator[tuple[Run, int]]:
        """See EvictionOrder."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, stamp, run = heapq.heappop(self._expiries)
            if run.has_tail(stamp) and run.expires_s <= now_s:
                run.retention = DEFAULT_RETENTION
                self._unscored.append((run, stamp, self._num_published))
        self._score()
        while self._heap:
            entry = self._heap[0]
            _, stamp, run = entry
            floor = max(run.tails[0][0], run.deepest_child()) if run.has_tail(stamp) else None
            if floor is not None and floor < run.length:
                yield run, floor
                continue
            heapq.heappop(self._heap)
            if floor is not None:
                self._blocked.setdefault(run, []).append(entry)

    def published(self, num_blocks: int) -> None:
        """See EvictionOrder."""
        self._num_published += num_blocks

    def child_removed(self, run: Run) -> None:
        """See EvictionOrder."""
        for entry in self._blocked.pop(run, ()):
            heapq.heappush(self._heap, entry)

    def compact(self, live: Iterable[Run]) -> None:
        """See EvictionOrder."""
        stamps = {stamp for run in live for _, stamp in run.tails}
        if len(self._heap) + len(self._expiries) > 4 * len(stamps) + 64:
            for heap in (self._heap, self._expiries):
                heap[:] = [entry for entry in heap if entry[1] in stamps]
                heapq.heapify(heap)

    def stamps(self) -> set[int]:
        """See EvictionOrder."""
        blocked = (entry for entries in self._blocked.values() for entry in entries)
        scored = {stamp for _, stamp, _ in (*self._heap, *blocked)}
        return scored | {stamp for _, stamp, _ in self._unscored}

    def _score(self) -> None:
        """Score what was released since; a run that was released twice, in two rounds."""
        waiting, self._unscored = self._unscored, []
        while waiting:
            first: dict[Run, tuple[Run, int, int]] = {}
            again = [entry for entry in waiting if first.setdefault(entry[0], entry) is not entry]
            runs, stamps, published = zip(*first.values(), strict=True)
            scores = self._policy.scores(
                Released(
                    stamps=np.array(stamps, np.int64),
                    turnovers=np.array(published) / self._num_blocks,
                    last_scores=np.array([run.score for run in runs]),
                    depths=np.array([run.depth for run in runs], np.int64),
                    priorities=np.array([run.retention.priority for run in runs], np.int64),
                )
            )
            for run, stamp, score in zip(runs, stamps, scores.tolist(), strict=True):
                run.score = score
                if run.has_tail(stamp):
                    heapq.heappush(self._heap, (score, stamp, run))
            waiting = again


def make_order(eviction: str, num_blocks: int) -> EvictionOrder:
    """The order that a policy's name, or ``module:Class``, stands for.

    Raises:
        ConfigError: there is no such policy.
    """
    if eviction == "lru":
        return LruOrder()
    if eviction in POLICIES:
        return ScoredOrder(POLICIES[eviction](), num_blocks)
    module, colon, name = eviction.partition(":")
    known = ", ".join(["lru", *POLICIES])
    if not colon:
        raise ConfigError(f"eviction is {eviction!r}, but known are {known}, or module:Class")
    try:
        policy = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"eviction {eviction!r} cannot be loaded: {error}") from None
    if not isinstance(policy, EvictionPolicy):
        raise ConfigError(f"eviction {eviction!r} is no raykv.core.eviction.EvictionPolicy")
    return ScoredOrder(policy, num_blocks)


POLICIES: dict[str, type[EvictionPolicy]] = {"lrfu": LrfuPolicy, "priority": PriorityPolicy}
