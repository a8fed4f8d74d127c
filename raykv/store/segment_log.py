"""The disk store's files and the index over them: where each key's value is."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from raykv.errors import IntegrityError, StoreError
from raykv.store.interface import Loan, StoreCounts
from raykv.store.records import Record, complete, parse, record_bytes, value_place
from raykv.store.segment import Segment

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Place(NamedTuple):
    segment: Segment
    offset: int
    value_bytes: int


class SegmentLog:
    """Append-only segments, the oldest dropped whole when room is short.

    One thread at a time calls ``put``; any thread reads. The index is in memory only, and rebuilt
    from the records' heads. What a dying process left half written is cut off: only the last
    segment can have it, so that one's values are checked too; others are when they are read.

    Args:
        folder: where the segments lie.
        max_bytes: all segments together, at most.
        segment_bytes: one segment, at most.
        counts: where to count what happens.
        fsync: whether what is put is made to survive a loss of power.

    Raises:
        OSError: a segment cannot be read, dropped or cut.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        segment_bytes: int,
        counts: StoreCounts,
        *,
        fsync: bool,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._counts = counts
        self._fsync = fsync
        self._lock = threading.Lock()  # guards the index and what segments say of their readers
        self._index: dict[bytes, _Place] = {}
        self._segments: list[Segment] = []  # in order of writing; only the last one grows
        self._is_sealed = True  # the last segment takes nothing more
        self._staging = bytearray()
        try:
            self._load()
        except OSError:
            self.close()
            raise

    def __contains__(self, key: bytes) -> bool:
        return key in self._index  # one look-up is atomic

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in tuple(self._segments))

    # -- writing -------------------------------------------------------------------------------

    def put(self, items: Iterable[tuple[bytes, memoryview]], loan: Loan) -> list[bool]:
        """Write values; see ``KVStore.put_many``.

        Args:
            items: keys and values.
            loan: whether the values may still be read. Once it is over, no more is written.

        Raises:
            StoreError: the disk failed, otherwise than by being full.
        """
        places: dict[bytes, _Place] = {}
        failure: OSError | None = None
        confirmed: list[bool] = []
        for key, value in items:
            is_known = key in self._index or key in places
            if not is_known and failure is None:
                try:
                    place = self._write(key, value, loan)
                except OSError as error:
                    place = None
                    self._counts.add(refused=1)
                    failure = None if error.errno in _FULL else error
                if place is not None:
                    places[key] = place
            confirmed.append(is_known or key in places)
        try:
            if self._fsync:
                self._sync({place.segment for place in places.values()})
        except OSError as error:
            self._is_sealed = True  # nobody knows what of it is on the disk
            failure = error
        else:
            for key, place in places.items():
                self._publish(key, place)
        if failure is not None:
            self._counts.add(errors=1)
            raise StoreError(
                f"the KV store in {self._folder} cannot be written ({failure}): check the disk"
            ) from failure
        return confirmed

    def _write(self, key: bytes, value: memoryview, loan: Loan) -> _Place | None:
        size = record_bytes(len(key), len(value))
        if size > self._segment_bytes:
            self._counts.add(refused=1)
            return None
        if len(self._staging) < size:
            self._staging = bytearray(size)
        record = memoryview(self._staging)[:size]
        with loan.hold() as is_on:
            if not is_on:
                return None
            record[value_place(len(key), len(value))] = value
        segment = self._segment_for(size)
        offset = segment.size
        complete(record, key, len(value), segment.salt, offset)
        segment.append(record)
        return _Place(segment, offset, len(value))

    def _segment_for(self, num_bytes: int) -> Segment:
        """The segment to append to, after whatever had to go for it."""
        is_new = self._is_sealed or self._segments[-1].size + num_bytes > self._segment_bytes
        self._make_room(num_bytes, keep=0 if is_new else 1)
        if is_new:
            number = self._segments[-1].number + 1 if self._segments else 1
            segment = Segment.create(self._folder, number)
            self._segments.append(segment)
            self._is_sealed = False
            if self._fsync:
                self._sync_folder()
        return self._segments[-1]

    def _make_room(self, num_bytes: int, keep: int) -> None:
        while len(self._segments) > keep and self.num_bytes + num_bytes > self._max_bytes:
            self._drop(self._segments[0])

    def _drop(self, segment: Segment) -> None:
        segment.path.unlink(missing_ok=True)
        self._segments.remove(segment)
        with self._lock:
            for key in segment.keys:
                place = self._index.get(key)
                if place is not None and place.segment is segment:
                    del self._index[key]
            segment.is_dropped = True
            if not segment.num_readers:
                segment.close()

    def _publish(self, key: bytes, place: _Place) -> None:
        with self._lock:
            if not place.segment.is_dropped:  # by a later value of the same batch
                self._index[key] = place
                place.segment.keys.append(key)
                self._counts.add(stored=1)

    def _sync(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if not segment.is_dropped:
                segment.sync()

    def _sync_folder(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    # -- reading -------------------------------------------------------------------------------

    def read(
        self, key: bytes, value_bytes: int, buffer: Callable[[int], memoryview]
    ) -> memoryview | None:
        """Read one value and check it.

        A value that is damaged, unreadable or of another length is counted and forgotten, so that
        the next one put under its key takes its place.

        Args:
            key: the key.
            value_bytes: how long the value must be.
            buffer: gives memory of a length, where the value will lie.

        Returns:
            The value, within the memory that ``buffer`` gave; None if there is none.
        """
        with self._lock:
            place = self._index.get(key)
            if place is None:
                return None
            place.segment.num_readers += 1
        value = None
        try:
            if place.value_bytes == value_bytes:
                value = self._read_at(key, place, buffer)
        except OSError:
            self._counts.add(errors=1)
        finally:
            self._leave(place.segment)
        if value is None:
            self._counts.add(corrupt=1)
            with self._lock:
                if self._index.get(key) == place:
                    del self._index[key]
        return value

    def _read_at(
        self, key: bytes, place: _Place, buffer: Callable[[int], memoryview]
    ) -> memoryview | None:
        data = buffer(record_bytes(len(key), place.value_bytes))
        data = data[: place.segment.read(place.offset, data)]
        record = parse(data, place.segment.salt, place.offset)
        if record is None or record.key != key or record.value_bytes != place.value_bytes:
            return None
        return record.value_in(data)

    def _leave(self, segment: Segment) -> None:
        with self._lock:
            segment.num_readers -= 1
            if segment.is_dropped and not segment.num_readers:
                segment.close()

    # -- opening and closing -------------------------------------------------------------------

    def _load(self) -> None:
        paths = Segment.find(self._folder)
        for path in paths:
            self._segments.append(Segment(path))
        for segment in self._segments:
            self._load_segment(segment, is_last=segment is self._segments[-1])
        self._make_room(0, keep=0)
        self._is_sealed = not self._segments

    def _load_segment(self, segment: Segment, *, is_last: bool) -> None:
        end = 0
        for record in segment.records():
            place = _Place(segment, record.offset, record.value_bytes)
            if is_last and not self._is_whole(record, place):
                continue
            if record.offset > end:
                self._counts.add(corrupt=1)  # something lay there that is no record any more
            end = record.end
            self._index[record.key] = place
            segment.keys.append(record.key)
        if is_last:
            segment.cut(end)
        elif segment.size > end:
            self._counts.add(corrupt=1)

    def _is_whole(self, record: Record, place: _Place) -> bool:
        found = self._read_at(record.key, place, lambda size: memoryview(bytearray(size)))
        return found is not None

    def close(self) -> None:
        """Close all files; nobody may be reading or writing."""
        for segment in self._segments:
            segment.close()

    def check_integrity(self) -> None:
        """See DiskStore."""
        sizes = {segment.path: segment.size for segment in self._segments}
        on_disk = {path: path.stat().st_size for path in Segment.find(self._folder)}
        if sizes != on_disk:
            raise IntegrityError(f"segments should be {sizes}, but are {on_disk}")
        if self.num_bytes > self._max_bytes:
            raise IntegrityError(f"{self.num_bytes} bytes are more than {self._max_bytes}")
        for key, place in self._index.items():
            record = place.segment.record_at(place.offset)
            is_there = place.segment in self._segments and key in place.segment.keys
            if not is_there or record is None or record.key != key:
                raise IntegrityError(f"key {key!r} is not at {place}: {record}")
        if any(segment.num_readers for segment in self._segments):
            raise IntegrityError("a segment has readers, though no call is under way")
