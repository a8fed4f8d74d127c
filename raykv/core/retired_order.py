"""What retired weights computed goes first, whatever the policy says of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .eviction_order import EvictionOrder, LruOrder
from .runs import Run


class RetiredFirst(EvictionOrder):
    """Evicts the runs of retired versions, least recently released first, then the others.

    Stamps never grow with depth, whatever the policy, so a queue keeps closure here, too. It wraps
    the policy's order when a version is retired for the first time: until then nobody pays for it.

    Args:
        others: orders the rest. It may keep entries of what was retired later; by the time that it
            is asked, those stretches are gone.
        versions: versions that are retired already, where nothing is cached.

    Attributes:
        versions: the retired versions of the weights.
        retired: the queue of their stretches.
    """

    def __init__(self, others: EvictionOrder, versions: Iterable[int] = ()) -> None:
        self.versions = set(versions)
        self.retired = LruOrder()
        self._others = others

    def retire(self, version: int, runs: Iterable[Run]) -> None:
        """Let ``runs``, all that are of this version, and later ones of it go first."""
        if version in self.versions:
            return
        self.versions.add(version)
        stretches = [(stamp, run) for run in runs for _, stamp in run.tails()]
        for stamp, run in sorted(stretches, key=lambda entry: entry[0]):
            self.retired.add(run, stamp)

    def add(self, run: Run, stamp: int) -> None:
        """See EvictionOrder."""
        is_retired = run.root.weights_version in self.versions
        (self.retired if is_retired else self._others).add(run, stamp)

    def victims(self, now_s: float) -> Iterator[tuple[Run, int]]:
        """See EvictionOrder."""
        yield from self.retired.victims(now_s)
        yield from self._others.victims(now_s)

    def compact(self, live: Iterable[Run]) -> int:
        """See EvictionOrder."""
        runs = list(live)
        self.retired.compact(runs)
        return self._others.compact(runs)

    def entries(self) -> set[tuple[Run, int]]:
        """See EvictionOrder."""
        return self.retired.entries() | self._others.entries()

    def published(self, num_blocks: int) -> None:
        """See EvictionOrder."""
        self._others.published(num_blocks)

    def child_removed(self, run: Run) -> None:
        """See EvictionOrder."""
        self._others.child_removed(run)
