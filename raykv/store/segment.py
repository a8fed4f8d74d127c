"""One append-only file of the disk store."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from raykv.store.records import ALIGNMENT, MAGIC, MAX_HEAD_BYTES, Record, parse

_NAME = re.compile(r"(\d{10})-([0-9a-f]{16})[.]kv")
_CHUNK_BYTES = 1 << 20


class Segment:
    """A file of records, one behind another; opened for reading and writing.

    The number and the salt stand in its name, so no damage within loses more than a record.

    Attributes:
        path: the file.
        number: its place in the order of writing.
        salt: makes its records its own.
        size: bytes up to the end of the last whole record.
        keys: of all records that were published from here, also those that were replaced since.
        num_readers: threads that read it now. The store counts them, under its lock.
        is_dropped: whether the file is gone; it stays open for who reads it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        name = _NAME.fullmatch(path.name)
        assert name is not None, f"{path} is not named like a segment"
        self.path = path
        self.number = int(name[1])
        self.salt = int(name[2], 16)
        self.keys: list[bytes] = []
        self.num_readers = 0
        self.is_dropped = False
        self._file = path.open("r+b", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size

    @classmethod
    def create(cls, folder: Path, number: int) -> Segment:
        """Make an empty one.

        Raises:
            OSError: there is no room for a file, or one of this name is there.
        """
        path = folder / f"{number:010}-{secrets.token_hex(8)}.kv"
        path.open("xb").close()
        return cls(path)

    @staticmethod
    def find(folder: Path) -> list[Path]:
        """All segments of a folder, in the order of writing."""
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))

    def append(self, record: memoryview) -> None:
        """Write one record behind the others, wholly or not at all.

        Raises:
            OSError: it could not be written.
        """
        end = self.size + len(record)
        position = self.size
        try:
            while position < end:
                position += os.pwrite(self._file.fileno(), record[position - self.size :], position)
        except OSError:
            # What cannot be cut off is written over, or cut off when the store is next opened.
            with contextlib.suppress(OSError):
                self.cut(self.size)
            raise
        self.size = end

    def read(self, offset: int, into: memoryview) -> int:
        """Fill memory from the file; returns how many bytes there were, fewer only at its end.

        Raises:
            OSError: it could not be read.
        """
        done = 0
        while done < len(into):
            got = os.preadv(self._file.fileno(), [into[done:]], offset + done)
            if not got:
                break
            done += got
        return done

    def records(self) -> Iterator[Record]:
        """All records in order, as far as their heads say; what is damaged is passed over.

        Raises:
            OSError: it could not be read.
        """
        offset: int | None = 0
        while offset is not None:
            record = self.record_at(offset)
            if record is None:
                offset = self._next_record(offset + ALIGNMENT)
            else:
                yield record
                offset = record.end

    def record_at(self, offset: int) -> Record | None:
        """The head of the record there, if there is one and the file is long enough for it.

        Raises:
            OSError: it could not be read.
        """
        head = memoryview(bytearray(MAX_HEAD_BYTES))
        record = parse(head[: self.read(offset, head)], self.salt, offset)
        return record if record is not None and record.end <= self.size else None

    def _next_record(self, start: int) -> int | None:
        """The first record at or behind an aligned offset."""
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        while start < self.size:
            data = bytes(chunk[: self.read(start, chunk)])
            found = data.find(MAGIC)
            while found >= 0:
                if found % ALIGNMENT == 0 and self.record_at(start + found) is not None:
                    return start + found
                found = data.find(MAGIC, found + 1)
            start += _CHUNK_BYTES  # aligned, and a magic is aligned: none lies across
        return None

    def cut(self, size: int) -> None:
        """Drop all bytes from ``size`` on.

        Raises:
            OSError: they could not be dropped.
        """
        os.ftruncate(self._file.fileno(), size)
        self.size = size

    def sync(self) -> None:
        """Wait until what was written would survive a loss of power.

        Raises:
            OSError: it might not.
        """
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
