"""One user at a time for a folder."""

import contextlib
import fcntl
import os
from pathlib import Path

from raykv.errors import StoreError


class FolderLock:
    """Held until it is released or its process dies; the file stays.

    Args:
        folder: what to lock; it exists.

    Raises:
        StoreError: somebody else holds it, maybe in this process.
        OSError: the lock file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        # flock, not lockf: that one would neither keep out this process nor outlast the closing of
        # another handle of the file.
        self._file = (folder / "lock").open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read(32).decode(errors="replace") or "unknown"
            self._file.close()
            raise StoreError(
                f"the store in {folder} is in use by process {holder}: one process at a time can"
                " have it; close that one, or give each rank's host a folder of its own"
            ) from None
        except OSError:
            self._file.close()
            raise
        with contextlib.suppress(OSError):  # on a full disk nobody learns who holds it
            self._file.truncate(0)
            self._file.write(b"%d" % os.getpid())

    def release(self) -> None:
        """Let others have the folder; idempotent."""
        self._file.close()
