"""Heartbeats to all ranks of a pool."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from raykv.rank_handle import RankHandle

_log = logging.getLogger(__name__)


class Monitor:
    """Sends heartbeats, which find lost ranks, take returned ones back, and renew leases.

    Args:
        ranks: the pool's ranks.
        interval_s: seconds from one heartbeat to the next.
    """

    def __init__(self, ranks: Sequence[RankHandle], interval_s: float) -> None:
        self._ranks = ranks
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """One heartbeat to every rank; waits for none of them."""
        for rank in self._ranks:
            before = rank.lost
            try:
                rank.beat()
            except Exception:  # noqa: BLE001 - a fault with one rank must not end the heartbeats to the others
                _log.exception("the heartbeat to rank %d failed", rank.dp_rank)
            if rank.lost is not None and before is None:
                _log.warning("lost: %s", rank.lost)
            elif rank.lost is None and before is not None:
                _log.warning("rank %d is back", rank.dp_rank)

    def start(self) -> None:
        """Beat from a thread until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="raykv-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.beat()
