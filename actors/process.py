"""A rank's or a host tier's process, watched from the same machine."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Self


class RankProcess:
    """A process by file descriptor, so that its number may be reused meanwhile.

    Args:
        fd: from ``os.pidfd_open``.
        pid: its number.
    """

    def __init__(self, fd: int, pid: int) -> None:
        self._fd = fd
        self._pid = pid
        self._has_ended = False

    @classmethod
    def find(cls, pid: int) -> Self | None:
        """The process of that number; None if there is none, or it is no worker of Ray's."""
        try:
            fd = os.pidfd_open(pid)
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return None
        if not title.startswith(b"ray::"):
            os.close(fd)
            return None
        return cls(fd, pid)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it has ended."""
        if not self._has_ended:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if poll.poll(timeout_s * 1000):
                self._has_ended = True
                os.close(self._fd)
        return self._has_ended

    def runs(self) -> bool:
        """Whether it is there and not stopped."""
        if self.wait(0):
            return False
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(") ")[2][:1]
        except OSError:
            return False
        return state not in {"T", "t", "Z", "X"}

    def kill(self) -> None:
        """End it, even if it is stopped."""
        if not self._has_ended:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
