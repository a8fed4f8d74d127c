"""A KV store in files on a local disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from raykv.errors import ConfigError, StoreError
from raykv.store.folder_lock import FolderLock
from raykv.store.interface import (
    Buffer,
    KVStore,
    Loan,
    StoreCounts,
    StoreStats,
    check_items,
    check_keys,
    check_targets,
)
from raykv.store.segment_log import SegmentLog

_Result = TypeVar("_Result")
_NUM_READ_THREADS = 4
_SEGMENT_BYTES = 256 << 20


class DiskStore(KVStore):
    """Keeps values in append-only files; what was confirmed is there after a crash.

    ``put_many`` confirms a value when the kernel has all of it: it survives this process's death at
    any moment. It survives the loss of power or a kernel crash only with ``fsync``, which makes
    every ``put_many`` wait for the disk; without it such a loss costs values, but damaged ones are
    found by their checksums and are misses. As KV can always be computed again, the default is to
    go without.

    When ``max_bytes`` are full, the oldest segment goes with all its values, however often they
    were read. A value that is there already is not written again. A full disk refuses values and
    damages nothing.

    All reading and writing happens on threads of the store's own. Opening reads the head of every
    record, and all of the segment that was written last: take ``asyncio.to_thread(DiskStore, ...)``
    in an event loop.

    Args:
        path: the folder; made if it is not there. One process at a time uses it.
        max_bytes: all segment files together, at most.
        segment_bytes: one file, at most, which is the largest value with its head, and the step in
            which old values go. By default 256 MiB, or an eighth of ``max_bytes`` if that is less.
        fsync: whether what is confirmed survives a loss of power.

    Raises:
        ConfigError: ``max_bytes`` does not hold two segments, or a size is not positive.
        StoreError: the folder cannot be used, or another store uses it.
    """

    def __init__(
        self,
        path: str | Path,
        max_bytes: int,
        *,
        segment_bytes: int | None = None,
        fsync: bool = False,
    ) -> None:
        if segment_bytes is None:
            segment_bytes = min(_SEGMENT_BYTES, max_bytes // 8)
        if segment_bytes < 1 or max_bytes < 2 * segment_bytes:
            raise ConfigError(
                f"max_bytes is {max_bytes} and segment_bytes {segment_bytes}, but at least two"
                " segments must fit, since one is dropped while another is written: raise"
                f" max_bytes to {2 * max(segment_bytes, 1)} or lower segment_bytes"
            )
        self.path = Path(path)
        self._counts = StoreCounts()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path)
        except OSError as error:
            raise _unusable(self.path, error) from error
        try:
            self._log = SegmentLog(self.path, max_bytes, segment_bytes, self._counts, fsync=fsync)
        except OSError as error:
            self._lock.release()
            raise _unusable(self.path, error) from error
        # One thread writes, so that records follow one another; reads do not wait for it.
        self._writer = ThreadPoolExecutor(1, "raykv-store-write")
        self._readers = ThreadPoolExecutor(_NUM_READ_THREADS, "raykv-store-read")
        self._scratch = threading.local()
        self._is_closed = False

    async def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """See KVStore."""
        flat = check_items(items)
        return await self._on_thread(self._writer, lambda loan: self._log.put(flat, loan))

    async def get_many(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[bool]:
        """See KVStore."""
        wanted = check_targets(keys, into)
        found = await self._on_thread(self._readers, lambda loan: self._get(wanted, loan))
        self._counts.add(hits=sum(found), misses=len(found) - sum(found))
        return found

    async def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See KVStore."""
        check_keys(keys)
        self._require_open()
        return [key in self._log for key in keys]

    def stats(self) -> StoreStats:
        """See KVStore; ``bytes`` are those of all segment files."""
        return self._counts.stats() + StoreStats(bytes=self._log.num_bytes)

    async def close(self) -> None:
        """See KVStore; waits for what is being written."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._shut)

    def check_integrity(self) -> None:
        """Compare all books with the files; for tests, while no call is under way.

        Raises:
            IntegrityError: they do not agree.
        """
        self._log.check_integrity()

    def _get(self, wanted: Iterable[tuple[bytes, memoryview]], loan: Loan) -> list[bool]:
        # Once nobody waits any more, the rest is not worth the disk's time.
        return [not loan.is_over and self._get_one(key, target, loan) for key, target in wanted]

    def _get_one(self, key: bytes, target: memoryview, loan: Loan) -> bool:
        # The value is read beside the target first: it is not the value before its checksum is
        # right, and the caller may be gone before the disk answers.
        value = self._log.read(key, len(target), self._buffer)
        if value is None:
            return False
        with loan.hold() as is_on:
            if is_on and len(target):
                target[:] = value
        return is_on

    def _buffer(self, num_bytes: int) -> memoryview:
        """Memory of this thread, for one value at a time."""
        buffer: bytearray | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._scratch.buffer = bytearray(num_bytes)
        return memoryview(buffer)[:num_bytes]

    async def _on_thread(self, threads: Executor, work: Callable[[Loan], _Result]) -> _Result:
        self._require_open()
        loan = Loan()
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work, loan)
        finally:
            loan.end()

    def _require_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the store in {self.path} is closed: open another one")

    def _shut(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()
        self._log.close()
        self._lock.release()


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the folder {path} cannot hold a KV store ({error}): give one on a local disk that this"
        " user may write to"
    )
