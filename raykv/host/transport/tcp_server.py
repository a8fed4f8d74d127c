"""Serves a slab's rows to other nodes over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from raykv.errors import ConfigError, TransferError
from raykv.host.transport import wire
from raykv.host.transport.interface import consecutive, rows_per_batch
from raykv.host.transport.stream import Stream
from raykv.memory.host_slab import HostSlab

# A reader that has nothing to ask connects anew after this.
_IDLE_S = 60.0
# After an error of accepting, such as no file descriptors being left.
_ACCEPT_PAUSE_S = 0.1


class TcpServer:
    """A ``BlockServer``: a thread that sends rows straight from the slab's memory.

    Args:
        slab: what is served; stays open until the server is closed.
        secret: the pool's, at least 16 random bytes; readers must know it.
        host: the address to listen on, which readers connect to as well.
        port: 0 takes a free one.
        timeout_s: seconds until a reader that does not take a batch of rows is dropped.
        max_connections: further ones are closed at once.

    Attributes:
        address: see BlockServer.
        counts: rows and requests served, rows that had changed, readers refused and lost.

    Raises:
        ConfigError: the secret is too short, or the address cannot be listened on.
        TransferError: the slab is closed.
    """

    def __init__(
        self,
        slab: HostSlab,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        timeout_s: float = 5.0,
        max_connections: int = 64,
    ) -> None:
        wire.check_secret(secret)
        if slab.is_closed:
            raise TransferError("the host slab is closed in this process: attach it again")
        self.counts: Counter[str] = Counter()
        self._secret = secret
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._blocks, self._generations = slab.blocks, slab.generations
        self._identity = secrets.token_bytes(wire.IDENTITY_BYTES)
        self._listener = _listen(host, port, max_connections)
        self.address = f"{host}:{self._listener.getsockname()[1]}/{self._identity.hex()}"
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._is_closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="raykv-blocks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See BlockServer."""
        with contextlib.suppress(RuntimeError):  # its loop is closed already
            self._loop.call_soon_threadsafe(self._is_closing.set)
        self._thread.join()
        self._blocks = np.empty((0, 0), np.uint8)
        self._generations = np.empty(0, np.uint64)

    # -- inside, all in the thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        with self._listener:
            accepting = asyncio.create_task(self._accept())
            await self._is_closing.wait()
            tasks = [accepting, *self._connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._connections) >= self._max_connections:
                self.counts["refused"] += 1
                sock.close()
                continue
            task = asyncio.create_task(self._attend(sock))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _attend(self, sock: socket.socket) -> None:
        with sock:
            try:
                stream = Stream(sock)
                async with asyncio.timeout(self._timeout_s):
                    await self._greet(stream)
            except (OSError, TransferError):
                self.counts["refused"] += 1
                return
            # Most ways to end are a reader that is done, or dead.
            with contextlib.suppress(OSError, TransferError):
                while True:
                    await self._answer(stream)
            self.counts["lost"] += 1

    async def _greet(self, stream: Stream) -> None:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        num_blocks, block_bytes = self._blocks.shape
        hello = wire.Hello(num_blocks, block_bytes, self._identity, nonce).pack()
        await stream.send(hello)
        proof = await stream.receive(wire.PROOF_BYTES)
        await stream.send(wire.welcome(self._secret, hello, proof))

    async def _answer(self, stream: Stream) -> None:
        num_blocks, block_bytes = self._blocks.shape
        async with asyncio.timeout(_IDLE_S):
            head = await stream.receive(wire.COUNT_BYTES)
        _, num_bytes = wire.request_size(head, num_blocks)
        async with asyncio.timeout(self._timeout_s):
            ids, wanted = wire.unpack_request(await stream.receive(num_bytes), num_blocks)
        self.counts["requests"] += 1
        step = rows_per_batch(block_bytes)
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            async with asyncio.timeout(self._timeout_s):
                if not await self._send_batch(stream, ids[part], wanted[part]):
                    return

    async def _send_batch(
        self, stream: Stream, ids: NDArray[np.int64], wanted: NDArray[np.uint64]
    ) -> bool:
        """Send rows up to the first that has changed; whether none has."""
        changed = np.flatnonzero(self._generations[ids] != wanted)
        num = int(changed[0]) if len(changed) else len(ids)
        await stream.send(wire.pack_batch(num))
        if not num:
            self.counts["changed"] += 1
            return False
        for run in consecutive(ids[:num]):
            await stream.send_rows(self._blocks[run])
        # Only now: a row that was given to another writer meanwhile may have been sent in parts.
        generations = self._generations[ids[:num]]
        await stream.send(wire.pack_generations(generations))
        self.counts["rows"] += num
        if (generations != wanted[:num]).any():
            self.counts["changed"] += 1
            return False
        if num < len(ids):
            return await self._send_batch(stream, ids[num:], wanted[num:])
        return True


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(backlog)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot serve blocks on {host} port {port}: {error}: give an address of this machine"
            " and a free port, or port 0"
        ) from None
    return listener
