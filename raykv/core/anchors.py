"""Where the children of a run hang."""

import heapq
from collections.abc import Iterable


class Anchors:
    """Per block offset, how many children of a run hang there; kept for who asks for the deepest.

    Attributes:
        counts: by offset. Offsets without children stay until they surface in the heap, so that
            none stands in it twice.
    """

    __slots__ = ("_heap", "counts")

    def __init__(self, offsets: Iterable[int]) -> None:
        self.counts: dict[int, int] = {}
        self._heap: list[int] = []  # of negated offsets
        for offset in offsets:
            self.add(offset)

    def add(self, offset: int) -> None:
        """Count one more child."""
        if offset not in self.counts:
            self.counts[offset] = 0
            heapq.heappush(self._heap, -offset)
        self.counts[offset] += 1

    def remove(self, offset: int) -> None:
        """Count one less."""
        self.counts[offset] -= 1

    def deepest(self) -> int:
        """The largest offset of a child, 0 if there is none; amortised over their removals."""
        while self._heap and not self.counts[-self._heap[0]]:
            del self.counts[-heapq.heappop(self._heap)]
        return -self._heap[0] if self._heap else 0
