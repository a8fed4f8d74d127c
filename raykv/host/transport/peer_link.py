"""What is known of another node: how fast it answers and copies, and whether it fails."""

from __future__ import annotations

import time
from collections.abc import Callable

# Until something was measured: a 10 Gbit/s network between busy nodes.
START_BYTES_PER_S = 1e9
START_LATENCY_S = 1e-3

# After as many bytes a measurement weighs half, and after as many seconds without a further one it
# is half forgotten, or a peer that was slow once would never be tried again.
_HALF_BYTES = 64 << 20
_HALF_S = 30.0

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class PeerLink:
    """Estimates copies from a peer, and says when to leave it alone.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bytes = float(_HALF_BYTES)
        self._s = _HALF_BYTES / START_BYTES_PER_S
        self._latency_s = START_LATENCY_S
        self._settled_s = clock()
        self._pause_s = 0.0
        self._rests_until_s = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth as far as is known."""
        self._settle()
        return self._bytes / self._s

    @property
    def latency_s(self) -> float:
        """Seconds until the peer answers, as far as is known."""
        self._settle()
        return self._latency_s

    @property
    def is_resting(self) -> bool:
        """Whether it failed lately, so that it is not asked now."""
        return self._clock() < self._rests_until_s

    def copy_s(self, num_bytes: int) -> float:
        """Seconds that a copy of so many bytes will take."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def answered(self, seconds: float) -> None:
        """It answered a question after so many seconds."""
        self._settle()
        self._latency_s += (seconds - self._latency_s) / 4

    def copied(self, num_bytes: int, seconds: float) -> None:
        """It delivered all that was wanted in so many seconds."""
        self._settle()
        kept = 0.5 ** (num_bytes / _HALF_BYTES)
        self._bytes = self._bytes * kept + num_bytes
        self._s = self._s * kept + seconds
        self._pause_s = 0.0

    def failed(self) -> None:
        """It did not answer or deliver; each time in a row it rests for twice as long."""
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S)
        self._rests_until_s = self._clock() + self._pause_s

    def _settle(self) -> None:
        """Forget in part what was measured long ago."""
        now_s = self._clock()
        kept = 0.5 ** ((now_s - self._settled_s) / _HALF_S)
        self._settled_s = now_s
        start_s = _HALF_BYTES / START_BYTES_PER_S
        self._bytes = _HALF_BYTES + (self._bytes - _HALF_BYTES) * kept
        self._s = start_s + (self._s - start_s) * kept
        self._latency_s = START_LATENCY_S + (self._latency_s - START_LATENCY_S) * kept
