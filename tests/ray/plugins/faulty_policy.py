"""An eviction policy that fails on demand, on the thread that owns a rank."""

from __future__ import annotations

import os
import time
from pathlib import Path

from raykv.core.eviction import LrfuPolicy

FOLDER = "RAYKV_TEST_FAULTS"
"""Names the environment variable with the folder in which orders are left, as files."""


class FaultyPolicy(LrfuPolicy):
    """Obeys files: ``raise`` and ``hang`` once, ``refuse`` (to be made) while it is there."""

    def __init__(self):
        super().__init__()
        self._orders = Path(os.environ[FOLDER])
        if (self._orders / "refuse").exists():
            with (self._orders / "refusals").open("a") as file:
                file.write("x")
            raise MemoryError("no memory, as asked for")

    def scores(self, released):
        if self._takes("raise"):
            raise RuntimeError("it fails, as asked for")
        if self._takes("hang"):
            time.sleep(10_000)
        return super().scores(released)

    def _takes(self, order):
        try:
            (self._orders / order).unlink()
        except FileNotFoundError:
            return False
        return True
