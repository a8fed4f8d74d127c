"""How a value lies in a segment file of the disk store.

::

    magic 4s | key length u16 | 0 u16 | value length u64 | salt u64 | offset u64 | value xxh3 u64
    | xxh3 u64 of all that and the key | key | value | zeros up to a multiple of 64

All numbers are little-endian. The salt is the segment's, the offset the record's own: so a value
that looks like a record, or a record that was moved, is never taken for one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from raykv.store.interface import MAX_KEY_BYTES

ALIGNMENT: Final = 64
MAGIC: Final = b"rkv1"

_FIELDS = struct.Struct("<4sHHQQQQ")
_CHECKSUM = struct.Struct("<Q")
_HEAD_BYTES = _FIELDS.size + _CHECKSUM.size

MAX_HEAD_BYTES: Final = _HEAD_BYTES + MAX_KEY_BYTES


@dataclass(frozen=True, slots=True)
class Record:
    """One record's head: where it is and what it claims.

    Attributes:
        key: the key.
        offset: first byte within the segment.
        value_bytes: length of the value.
        value_checksum: xxh3 (64 bits) of the value.
    """

    key: bytes
    offset: int
    value_bytes: int
    value_checksum: int

    @property
    def value_start(self) -> int:
        """First byte of the value within the record."""
        return _HEAD_BYTES + len(self.key)

    @property
    def value_stop(self) -> int:
        """First byte behind the value within the record."""
        return self.value_start + self.value_bytes

    @property
    def end(self) -> int:
        """First byte behind the record within the segment."""
        return self.offset + record_bytes(len(self.key), self.value_bytes)

    def value_in(self, data: memoryview) -> memoryview | None:
        """The value within this record's bytes, or None if it is cut off or damaged."""
        value = data[self.value_start : self.value_stop]
        is_right = len(value) == self.value_bytes and (
            xxh3_64_intdigest(value) == self.value_checksum
        )
        return value if is_right else None


def record_bytes(key_bytes: int, value_bytes: int) -> int:
    """Length of a record with its padding."""
    return -(-(_HEAD_BYTES + key_bytes + value_bytes) // ALIGNMENT) * ALIGNMENT


def value_place(key_bytes: int, value_bytes: int) -> slice:
    """Where the value goes within its record."""
    start = _HEAD_BYTES + key_bytes
    return slice(start, start + value_bytes)


def complete(data: memoryview, key: bytes, value_bytes: int, salt: int, offset: int) -> None:
    """Write all of a record but its value, which lies in its place already.

    Args:
        data: the record's bytes, of length ``record_bytes``; written.
        key: the key.
        value_bytes: length of the value.
        salt: the segment's.
        offset: where the record will lie in the segment.
    """
    place = value_place(len(key), value_bytes)
    checksum = xxh3_64_intdigest(data[place])
    fields = _FIELDS.pack(MAGIC, len(key), 0, value_bytes, salt, offset, checksum)
    data[: place.start] = fields + _CHECKSUM.pack(xxh3_64_intdigest(fields + key)) + key
    data[place.stop :] = bytes(len(data) - place.stop)


def parse(head: memoryview | bytes, salt: int, offset: int) -> Record | None:
    """Read a record's head; None if it is none, or not this segment's at this offset.

    Args:
        head: at least the head and the key, if there is a record; longer is fine.
        salt: the segment's.
        offset: where ``head`` was read.
    """
    if len(head) < _HEAD_BYTES:
        return None
    magic, key_bytes, zero, value_bytes, its_salt, its_offset, checksum = _FIELDS.unpack_from(head)
    if (magic, zero, its_salt, its_offset) != (MAGIC, 0, salt, offset):
        return None
    if not 0 < key_bytes <= MAX_KEY_BYTES or len(head) < _HEAD_BYTES + key_bytes:
        return None
    key = bytes(head[_HEAD_BYTES : _HEAD_BYTES + key_bytes])
    fields = bytes(head[: _FIELDS.size])
    if _CHECKSUM.unpack_from(head, _FIELDS.size)[0] != xxh3_64_intdigest(fields + key):
        return None
    return Record(key, offset, value_bytes, checksum)
