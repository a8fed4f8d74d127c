"""One TCP connection on an event loop, to and from memory that is there already."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.errors import TransferError


class Stream:
    """Sends and receives exact numbers of bytes; what is cut short is an error.

    A call that is cancelled touches its memory no more, and leaves the stream of no use.

    Args:
        sock: connected, not blocking; closed with the stream.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        # Small messages follow large ones.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            OSError: the connection broke.
        """
        await self._loop.sock_sendall(self._sock, data)

    async def send_rows(self, rows: NDArray[np.uint8]) -> None:
        """Send contiguous rows, straight from their memory; see ``send``."""
        await self._loop.sock_sendall(self._sock, _flat(rows))

    async def receive(self, num_bytes: int) -> bytes:
        """Receive so many bytes.

        Raises:
            OSError: the connection broke.
            TransferError: the other end closed it before that.
        """
        data = bytearray(num_bytes)
        await self._fill(memoryview(data))
        return bytes(data)

    async def receive_rows(self, rows: NDArray[np.uint8]) -> None:
        """Fill contiguous rows, straight into their memory; see ``receive``."""
        await self._fill(_flat(rows))

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._sock.close()

    async def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            num = await self._loop.sock_recv_into(self._sock, view[done:])
            if not num:
                raise TransferError(
                    f"the other end closed the connection after {done} of {len(view)} bytes"
                )
            done += num


async def connect(host: str, port: int) -> Stream:
    """Connect to a listening socket.

    Raises:
        OSError: nobody listens there, or the host has no address.
        UnicodeError: the host cannot be a name.
    """
    loop = asyncio.get_running_loop()
    # Where the host is a number, as it mostly is, nobody is asked and nothing waits.
    numeric: Any = {"type": socket.SOCK_STREAM, "flags": socket.AI_NUMERICHOST}
    try:
        found = socket.getaddrinfo(host, port, **numeric)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        return Stream(sock)
    except BaseException:
        sock.close()
        raise


def _flat(rows: NDArray[np.uint8]) -> memoryview:
    return rows.reshape(-1).data
