"""Copies that stop and go wrong as a test says."""

from __future__ import annotations

import threading

from .tier_world import WAIT_S


class Gate:
    """Copies of one direction wait while it is closed; then a fault may strike.

    Attributes:
        faults: of the batches of the direction, in order; then none.
        num_seen: batches of the direction that have started.
    """

    def __init__(self, direction, *faults, is_open=True):
        self.faults = list(faults)
        self.num_seen = 0
        self._direction = direction
        self._open = threading.Event()
        if is_open:
            self._open.set()

    def close(self):
        self._open.clear()

    def open(self):
        self._open.set()

    def on_copy(self, batch):
        if batch.direction != self._direction:
            return None
        self.num_seen += 1
        assert self._open.wait(WAIT_S)
        return self.faults.pop(0) if self.faults else None
