"""Calls and answers as bytes for Ray, which pickles many small objects slowly.

Ray's own pickler takes 0.2 ms for 64 sequences where the standard one takes 0.13, and again on the
other side; and arguments over 100 KB each go through the object store, which costs 1 ms more than
several smaller ones (2 cores, Ray 2.60).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

_PART_BYTES = 96 * 1024
_MAX_PARTS = 10  # beyond about a megabyte, the object store is as fast


def pack(value: object) -> bytes:
    """The value as bytes."""
    return pickle.dumps(value, protocol=5)


def split(data: bytes) -> list[bytes]:
    """The bytes in parts that Ray sends along with a call."""
    if len(data) > _MAX_PARTS * _PART_BYTES:
        return [data]
    return [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]


def unpack(parts: Iterable[bytes]) -> Any:
    """The value again."""
    return pickle.loads(b"".join(parts))  # noqa: S301 - from a process of this pool
