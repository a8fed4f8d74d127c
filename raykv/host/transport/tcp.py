"""Reads rows of other nodes' slabs over TCP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.errors import TransferError
from raykv.host.tickets import LoadOutcome
from raykv.host.transport import wire
from raykv.host.transport.connections import Connections
from raykv.host.transport.interface import RowRequest, consecutive
from raykv.host.transport.reading import Reading
from raykv.host.transport.stream import Stream


class TcpTransport:
    """A ``Transport`` that receives straight into the slab's memory.

    Args:
        secret: the pool's, which the servers know.
        timeout_s: seconds that connecting, and each batch of some megabytes, may take.
        max_per_address: reads from one server at a time; further ones wait.
        max_idle: connections that are kept for further reads.

    Attributes:
        last_error: why the last read that failed did; None if none has.

    Raises:
        ConfigError: the secret is too short.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        timeout_s: float = 2.0,
        max_per_address: int = 2,
        max_idle: int = 16,
    ) -> None:
        self.last_error: Exception | None = None
        self._timeout_s = timeout_s
        self._connections = Connections(secret, max_per_address=max_per_address, max_idle=max_idle)
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
        if len(request):
            async with self._connections.turn(address):
                await self._read(address, reading)
        self._counts.update(reading.counts())
        return reading.outcomes

    def stats(self) -> dict[str, Any]:
        """Rows by outcome, connections opened and broken, and the last error."""
        return {
            **self._counts,
            "idle_connections": self._connections.num_idle,
            "last_error": None if self.last_error is None else str(self.last_error),
        }

    async def close(self) -> None:
        """See Transport."""
        self._connections.close()

    async def _read(self, address: str, reading: Reading) -> None:
        stream = self._connections.take(address)
        try:
            if stream is not None and await self._exchanged(address, stream, reading):
                return
            # The server may have closed an idle connection; a new one tells whether it lives.
            self._connections.drop(address)
            async with asyncio.timeout(self._timeout_s):
                stream = await self._connections.open(address, reading.block_bytes)
            self._counts["opened"] += 1
            await self._exchange(address, stream, reading)
        except (OSError, TransferError, UnicodeError) as error:
            self.last_error = error
            self._counts["broken"] += 1

    async def _exchanged(self, address: str, stream: Stream, reading: Reading) -> bool:
        """Read over a connection that was idle. False: it was closed, and nothing came."""
        try:
            await self._exchange(address, stream, reading)
        except TimeoutError:
            raise
        except (OSError, TransferError):
            if reading.num_ok:
                raise
            return False
        return True

    async def _exchange(self, address: str, stream: Stream, reading: Reading) -> None:
        try:
            is_whole = await self._receive(stream, reading)
        except BaseException:  # cancelled, too: what comes next belongs to nobody
            stream.close()
            raise
        if is_whole:
            self._connections.keep(address, stream)
        else:
            stream.close()

    async def _receive(self, stream: Stream, reading: Reading) -> bool:
        """Ask and take the answer; whether the server has said all that it will."""
        async with asyncio.timeout(self._timeout_s):
            await stream.send(wire.pack_request(reading.request.ids, reading.request.generations))
        while reading.num_left:
            async with asyncio.timeout(self._timeout_s):
                head = await stream.receive(wire.COUNT_BYTES)
                num = wire.unpack_batch(head, reading.num_left)
                if not num:
                    reading.end(LoadOutcome.STALE)
                    return True
                row_ids = reading.next_ids(num)
                for run in consecutive(row_ids):
                    await stream.receive_rows(reading.rows[run])
                generations = wire.unpack_generations(await stream.receive(8 * num))
            is_over = reading.arrived(generations)
            if reading.has_failed:
                return is_over
            # Data that is there already is taken without waiting: let others have the loop.
            await asyncio.sleep(0)
        return True
