"""What a KV store behind the host tier must do: keep blocks under keys that outlive the pool."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

MAX_KEY_BYTES: Final = 256

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""Contiguous memory of any shape; where it is written to, it must be writable."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store did since it was opened.

    Attributes:
        hits: keys whose value was delivered.
        misses: keys whose value was not, for whatever reason. Hits and misses together are the keys
            of all ``get_many`` that gave an answer.
        stored: values written; one that was there already does not count.
        refused: values not stored for want of room, because they are too large, or because a
            guard had no answer from the store.
        corrupt: values found damaged, of another length than asked for, or under another key.
        errors: calls, or reads and writes within one, that failed.
        bytes: what the store holds, with its own bookkeeping; of a remote store, what was written.
        timeouts: of the errors, calls that a guard gave up.
        skipped: calls that a guard answered itself, since the store kept failing.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    corrupt: int = 0
    errors: int = 0
    bytes: int = 0
    timeouts: int = 0
    skipped: int = 0

    def __add__(self, other: StoreStats) -> StoreStats:
        """All counts added up, as for a store and its guard."""
        names = [field.name for field in fields(self)]
        return StoreStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


class StoreCounts:
    """The counts behind ``StoreStats``, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = asdict(StoreStats())

    def add(self, **counts: int) -> None:
        """Add to counts, by the names of ``StoreStats``."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def stats(self) -> StoreStats:
        """All counts of one moment."""
        with self._lock:
            return StoreStats(**self._counts)


class KVStore(ABC):
    """Keeps values under keys, across restarts or not, as the seed's ``kvcache_store`` does.

    A key names its content: who puts a key that is there already may find the old value kept.
    Values may vanish at any time (expired, pushed out, damaged); that is a miss and no error.

    Buffers are the caller's again as soon as a call has ended, by an exception or a cancellation
    too: from then on the store neither reads nor writes them, not even from a thread that is still
    busy. Else a late read would overwrite a block that somebody else was given, and a late write
    would store somebody else's KV under a valid checksum.

    A call that is cancelled ends at once. All methods but ``stats`` belong to one event loop.
    """

    @abstractmethod
    async def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """Store values.

        Args:
            items: pairs of key and value.

        Returns:
            For each item whether its key can be found now. A full store is no error.

        Raises:
            StoreError: the store failed; any part of the items may have been stored.
            ValueError: a key is empty or longer than 256 bytes, or a value is not contiguous.
                Nothing was stored.
        """

    @abstractmethod
    async def get_many(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[bool]:
        """Read values into the caller's memory.

        Args:
            keys: what to read; may repeat.
            into: for each key the memory to fill, of just the value's length.

        Returns:
            For each key whether ``into[i]`` now holds exactly the value, checksum verified. Where
            not, ``into[i]`` is as it was.

        Raises:
            StoreError: the store failed; any part of ``into`` may have been filled.
            ValueError: the lengths differ, a key is empty or too long, or a buffer is not
                contiguous or read-only. Nothing was read.
        """

    @abstractmethod
    async def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether a value is there; it may still turn out to be damaged.

        Raises:
            StoreError: the store failed.
            ValueError: a key is empty or too long.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """What was done so far; never waits for the store."""

    @abstractmethod
    async def close(self) -> None:
        """End all work and let go of files and connections; idempotent."""


class Loan:
    """Whether a caller's buffers may still be touched: a worker thread asks, the caller ends it.

    Attributes:
        is_over: whether it has ended. Who is about to touch a buffer takes ``hold``'s word instead.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._lock = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Within, the loan does not end. Yields whether it was still running."""
        with self._lock:
            yield not self.is_over

    def end(self) -> None:
        """From now on nobody touches the buffers; waits for who copies one just now."""
        with self._lock:
            self.is_over = True


def check_keys(keys: Sequence[bytes]) -> None:
    """Refuse keys that no store takes.

    Raises:
        ValueError: a key is no bytes object, empty, or longer than 256 bytes.
    """
    for key in keys:
        if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"key {key!r} must be a bytes object of 1..{MAX_KEY_BYTES} bytes")


def check_items(items: Sequence[tuple[bytes, Buffer]]) -> list[tuple[bytes, memoryview]]:
    """The arguments of ``put_many``, with values as flat bytes; see there for the errors."""
    check_keys([key for key, _ in items])
    return [(key, _flat(value)) for key, value in items]


def check_targets(keys: Sequence[bytes], into: Sequence[Buffer]) -> list[tuple[bytes, memoryview]]:
    """The arguments of ``get_many``, with targets as flat bytes; see there for the errors."""
    check_keys(keys)
    if len(keys) != len(into):
        raise ValueError(f"{len(keys)} keys do not pair with {len(into)} buffers")
    targets = [_flat(buffer) for buffer in into]
    for target in targets:
        if target.readonly and target.nbytes:
            raise ValueError(f"a buffer of {target.nbytes} bytes to read into is read-only")
    return list(zip(keys, targets, strict=True))


def _flat(value: Buffer) -> memoryview:
    data: Any = value  # on Python 3.11 types do not say that an array is a buffer
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"a buffer of shape {view.shape} and strides {view.strides} has gaps")
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty array cannot be cast
