"""Reads rows of other nodes' slabs through an object store, for where no TCP port can be had."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raykv.errors import TransferError
from raykv.host.tickets import LoadOutcome
from raykv.host.transport.interface import RowRequest
from raykv.host.transport.reading import Reading
from raykv.memory.host_slab import HostSlab
from raykv.memory.ids import checked_ids

Fetch: TypeAlias = Callable[[str, RowRequest], Awaitable[Sequence[NDArray[np.uint8]]]]
"""Carries a request to the process at an address, and back what ``take_rows`` returns there."""

# An object has its price: many batches of TCP's go into one.
_OBJECT_BYTES = 32 << 20


def take_rows(slab: HostSlab, request: RowRequest) -> list[NDArray[np.uint8]]:
    """Copy rows out of a slab: the serving end.

    Returns:
        Arrays uint8 [m, block_bytes], which together are the leading rows that were the wanted ones
        after the copy.

    Raises:
        ValueError: a row is not in the slab.
    """
    ids = checked_ids(request.ids, slab.num_blocks, "ids")
    copied = slab.blocks[ids]
    changed = slab.generations[ids] != request.generations
    num = int(changed.argmax()) if changed.any() else len(ids)
    return [copied[:num]] if num else []


class ObjectStoreTransport:
    """A ``Transport`` over a function that carries arrays, such as a remote call's answer.

    Two copies more than TCP, and twice the memory.

    Args:
        fetch: see Fetch. It is cancelled once nobody waits any more.
        timeout_s: seconds that it may take, for some megabytes at a time.

    Attributes:
        last_error: why the last read that failed did; None if none has.
    """

    def __init__(self, fetch: Fetch, *, timeout_s: float = 5.0) -> None:
        self.last_error: Exception | None = None
        self._fetch = fetch
        self._timeout_s = timeout_s
        self._counts: Counter[str] = Counter()

    async def read_rows(
        self,
        address: str,
        request: RowRequest,
        rows: NDArray[np.uint8],
        row_ids: NDArray[np.integer],
        on_blocks: Callable[[int], None],
    ) -> NDArray[np.uint8]:
        """See Transport."""
        reading = Reading(request, rows, row_ids, on_blocks)
        step = max(1, _OBJECT_BYTES // reading.block_bytes)
        try:
            while reading.num_left:
                part = request[reading.num_ok : reading.num_ok + step]
                arrays = await self._ask(address, part)
                if not self._take(reading, part, arrays):
                    reading.end(LoadOutcome.STALE)
        except Exception as error:  # noqa: BLE001 - whatever carries the arrays may raise anything
            self.last_error = error
            self._counts["broken"] += 1
        self._counts.update(reading.counts())
        return reading.outcomes

    def stats(self) -> dict[str, Any]:
        """Rows by outcome, reads that broke, and the last error."""
        error = self.last_error
        return {
            **self._counts,
            "last_error": None if error is None else f"{type(error).__name__}: {error}",
        }

    async def close(self) -> None:
        """See Transport; there is nothing to let go of."""

    async def _ask(self, address: str, request: RowRequest) -> list[NDArray[np.uint8]]:
        """What the other end has, checked to be rows of the right size and no more than wanted."""
        task = asyncio.ensure_future(self._fetch(address, request))
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            # Not waited for: it knows none of our memory.
            if not task.done():
                task.add_done_callback(_look_at)
                task.cancel()
        if not task.done() or task.cancelled():
            raise TransferError(
                f"{address} did not deliver {len(request)} blocks within {self._timeout_s} s, or"
                " the call was called off"
            )
        return list(task.result())

    def _take(self, reading: Reading, part: RowRequest, arrays: list[NDArray[np.uint8]]) -> bool:
        """Put rows into their places; whether all of the part are there, or one is not OK."""
        num_left, block_bytes = len(part), reading.block_bytes
        for array in arrays:
            if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != block_bytes:
                raise TransferError(
                    f"what came is {array.dtype} of shape {array.shape}, not uint8 of rows of"
                    f" {block_bytes} bytes: nodes can share blocks only if all ranks keep the same"
                    " model in the same way"
                )
            if len(array) > num_left:
                raise TransferError(f"{len(array)} blocks came where {num_left} were left to come")
            if not len(array):
                continue
            reading.rows[reading.next_ids(len(array))] = array
            num_left -= len(array)
            # The other end has left out what had changed.
            start = reading.num_ok
            reading.arrived(reading.request.generations[start : start + len(array)])
            if reading.has_failed:
                return True
        return num_left == 0


def _look_at(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # or asyncio complains that nobody looked at it
