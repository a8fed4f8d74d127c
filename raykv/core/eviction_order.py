"""In which order cached blocks go: a queue for LRU, a heap for policies that score.

Whatever the policy, closure holds: within a run the deepest block goes first, and no run is cut
past one of its children.
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from raykv.errors import ConfigError

from .eviction import POLICIES, EvictionPolicy, Released
from .retention import DEFAULT_RETENTION
from .runs import Run

_MAX_UNSCORED = 1024
_Entry = tuple[float, int, Run]


class EvictionOrder(ABC):
    """Keeps the evictable stretches in order; the prefix cache tells it what happens to them."""

    @abstractmethod
    def add(self, run: Run, stamp: int) -> None:
        """A stretch of the run was released: the one with this stamp in ``run.tails()``."""

    @abstractmethod
    def victims(self, now_s: float) -> Iterator[tuple[Run, int]]:
        """Runs to cut next, each with the length it may be cut to; resumes after each cut."""

    @abstractmethod
    def compact(self, live: Iterable[Run]) -> int:
        """Drop entries of stretches that are gone, if they outnumber the others.

        Returns:
            How many stretches there are.
        """

    @abstractmethod
    def entries(self) -> set[tuple[Run, int]]:
        """Runs and stamps of the stretches that are kept, live and gone; for audits."""

    def published(self, num_blocks: int) -> None:  # noqa: B027 - only scores need the clock
        """Blocks were added to the cache."""

    def child_removed(self, run: Run) -> None:  # noqa: B027 - only a heap has to know
        """A child of the run is gone."""


class LruOrder(EvictionOrder):
    """Least recently released first. Stamps ascend by themselves, so a queue does.

    Stamps never grow with depth either, so no child can be in the way.
    """

    def __init__(self) -> None:
        # In step with each other: a deque of pairs takes four times the memory.
        self._queue: deque[Run] = deque()
        self._stamps: deque[int] = deque()

    def add(self, run: Run, stamp: int) -> None:
        """See EvictionOrder."""
        self._queue.append(run)
        self._stamps.append(stamp)

    def victims(self, now_s: float) -> Iterator[tuple[Run, int]]:  # noqa: ARG002
        """See EvictionOrder."""
        while self._queue:
            run = self._queue[0]
            start, oldest = run.deepest_tail()
            if oldest == self._stamps[0] and start < run.length:
                yield run, start
            else:  # held again since, or just cut away
                self._queue.popleft()
                self._stamps.popleft()

    def compact(self, live: Iterable[Run]) -> int:
        """See EvictionOrder."""
        stamps = {stamp for run in live for _, stamp in run.tails()}
        if len(self._queue) > 2 * len(stamps) + 64:
            live_only = [stamp in stamps for stamp in self._stamps]
            self._queue = deque(itertools.compress(self._queue, live_only))
            self._stamps = deque(itertools.compress(self._stamps, live_only))
        return len(stamps)

    def entries(self) -> set[tuple[Run, int]]:
        """See EvictionOrder."""
        return set(zip(self._queue, self._stamps, strict=True))


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
        self._blocked: dict[Run, list[_Entry]] = {}  # heaps; a child stands at the run's end
        self._expiries: list[_Entry] = []  # as the heap, by the time at which a priority ends
        self._rescored: dict[int, float] = {}  # by stamp; other scores of it do not count

    def add(self, run: Run, stamp: int) -> None:
        """See EvictionOrder."""
        self._unscored.append((run, stamp, self._num_published))
        if run.retention.duration_s is not None and self._policy.heeds_priorities:
            heapq.heappush(self._expiries, (run.expires_s, stamp, run))
        if len(self._unscored) >= _MAX_UNSCORED:
            self._score()

    def victims(self, now_s: float) -> Iterator[tuple[Run, int]]:
        """See EvictionOrder."""
        self._expire(now_s)
        self._score()
        while self._heap:
            score, stamp, run = self._heap[0]
            gone = not run.has_tail(stamp)
            if gone or self._rescored.get(stamp, score) != score:
                heapq.heappop(self._heap)
                if gone:
                    self._rescored.pop(stamp, None)
                self._unblock(run)  # another stretch of it may wait behind this one
                continue
            floor = max(run.deepest_tail()[0], run.deepest_child())
            if floor < run.length:
                yield run, floor
            else:
                heapq.heappush(self._blocked.setdefault(run, []), heapq.heappop(self._heap))

    def published(self, num_blocks: int) -> None:
        """See EvictionOrder."""
        self._num_published += num_blocks

    def child_removed(self, run: Run) -> None:
        """See EvictionOrder."""
        if run in self._blocked and run.deepest_child() < run.length:
            self._unblock(run)

    def compact(self, live: Iterable[Run]) -> int:
        """See EvictionOrder."""
        stamps = {stamp for run in live for _, stamp in run.tails()}
        num_blocked = sum(map(len, self._blocked.values()))
        if len(self._heap) + num_blocked + len(self._expiries) > 4 * len(stamps) + 64:
            self._heap += itertools.chain(*self._blocked.values())
            self._blocked.clear()
            for heap in (self._heap, self._expiries):
                heap[:] = [entry for entry in heap if entry[1] in stamps]
                heapq.heapify(heap)
            self._rescored = {s: score for s, score in self._rescored.items() if s in stamps}
        return len(stamps)

    def entries(self) -> set[tuple[Run, int]]:
        """See EvictionOrder."""
        blocked = (entry for entries in self._blocked.values() for entry in entries)
        scored = {(run, stamp) for _, stamp, run in (*self._heap, *blocked)}
        return scored | {(run, stamp) for run, stamp, _ in self._unscored}

    def _unblock(self, run: Run) -> None:
        """Let the least of a run's blocked stretches stand for it; the others wait behind it."""
        blocked = self._blocked.get(run)
        if blocked:
            heapq.heappush(self._heap, heapq.heappop(blocked))
            if not blocked:
                del self._blocked[run]

    def _expire(self, now_s: float) -> None:
        """Have the stretches scored again whose priority has ended."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, stamp, run = heapq.heappop(self._expiries)
            if run.has_tail(stamp) and run.expires_s <= now_s:
                run.retention = DEFAULT_RETENTION
                self._rescored[stamp] = math.nan
                self._unscored.append((run, stamp, self._num_published))

    def _score(self) -> None:
        """Score what was released since; a run that was released twice, in two rounds."""
        if not self._unscored:
            return
        rounds: list[list[tuple[Run, int, int]]] = []
        times: dict[Run, int] = {}
        for entry in self._unscored:
            index = times[entry[0]] = times.get(entry[0], -1) + 1
            if index == len(rounds):
                rounds.append([])
            rounds[index].append(entry)
        self._unscored = []
        runs, stamps, published = zip(*itertools.chain(*rounds), strict=True)
        turnovers = np.array(published) / self._num_blocks
        depths = np.array([run.depth for run in runs], np.int64)
        priorities = np.array([run.retention.priority for run in runs], np.int64)
        stop = 0
        for entries in rounds:
            start, stop = stop, stop + len(entries)
            scores = self._policy.scores(
                Released(
                    np.array(stamps[start:stop], np.int64),
                    turnovers[start:stop],
                    np.array([run.score for run in runs[start:stop]]),
                    depths[start:stop],
                    priorities[start:stop],
                )
            )
            for (run, stamp, _), score in zip(entries, scores.tolist(), strict=True):
                self._put(run, stamp, score)

    def _put(self, run: Run, stamp: int, score: float) -> None:
        run.score = score
        if run.has_tail(stamp):
            if stamp in self._rescored:
                self._rescored[stamp] = score
            heapq.heappush(self._heap, (score, stamp, run))


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
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"eviction {eviction!r} cannot be loaded: {error}") from None
    if not isinstance(policy, EvictionPolicy):
        raise ConfigError(f"eviction {eviction!r} is no raykv.core.eviction.EvictionPolicy")
    return ScoredOrder(policy, num_blocks)
