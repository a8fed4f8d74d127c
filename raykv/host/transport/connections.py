"""Open connections to block servers, kept for the next read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from raykv.errors import IntegrityError, TransferError
from raykv.host.transport import wire
from raykv.host.transport.stream import Stream, connect


class Connections:
    """Connections to any number of servers: a few to each at a time, and a few kept idle.

    Args:
        secret: the pool's.
        max_per_address: in use at a time; who wants another one waits.
        max_idle: kept in all; the one that was idle for longest is closed for another.

    Raises:
        ConfigError: the secret is too short.
    """

    def __init__(self, secret: bytes, *, max_per_address: int = 2, max_idle: int = 16) -> None:
        wire.check_secret(secret)
        self._secret = secret
        self._max_per_address = max_per_address
        self._max_idle = max_idle
        self._idle: list[tuple[str, Stream]] = []
        # An entry lives while somebody is inside or waits.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._is_closed = False

    @property
    def num_idle(self) -> int:
        """Connections that are open and wait for use."""
        return len(self._idle)

    @asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Within, one connection to this address may be used."""
        turns = self._turns.get(address)
        if turns is None:
            turns = self._turns[address] = asyncio.Semaphore(self._max_per_address)
        async with turns:
            yield

    def take(self, address: str) -> Stream | None:
        """A connection that is open already; it may have died since it was used."""
        for at in reversed(range(len(self._idle))):
            if self._idle[at][0] == address:
                return self._idle.pop(at)[1]
        return None

    async def open(self, address: str, block_bytes: int) -> Stream:
        """Connect, and make sure that it is the server that was meant.

        Raises:
            OSError: nobody listens there.
            TransferError: who does is another server, does not know the secret, or has blocks of
                another size.
        """
        if self._is_closed:
            raise TransferError("the transport is closed")
        host, port, identity = _parsed(address)
        stream = await connect(host, port)
        try:
            hello = await self._greet(stream)
            _check_server(hello, address, identity, block_bytes)
        except BaseException:
            stream.close()
            raise
        return stream

    def keep(self, address: str, stream: Stream) -> None:
        """Keep a connection over which an exchange was completed."""
        self._idle.append((address, stream))
        while len(self._idle) > (0 if self._is_closed else self._max_idle):
            self._idle.pop(0)[1].close()

    def drop(self, address: str) -> None:
        """Close what is idle to this address: its server is gone."""
        for each, stream in self._idle:
            if each == address:
                stream.close()
        self._idle = [each for each in self._idle if each[0] != address]

    def close(self) -> None:
        """Close what is idle, and what is given back later; idempotent."""
        self._is_closed = True
        for _, stream in self._idle:
            stream.close()
        self._idle.clear()

    def check_integrity(self) -> None:
        """Check the bounds, and that each connection is kept once.

        Raises:
            IntegrityError: something is wrong.
        """
        if len({id(stream) for _, stream in self._idle}) != len(self._idle):
            raise IntegrityError("a connection is kept twice, so two reads would get it")
        if len(self._idle) > (0 if self._is_closed else self._max_idle):
            raise IntegrityError(f"{len(self._idle)} idle connections are kept: too many")

    async def _greet(self, stream: Stream) -> wire.Hello:
        """Both ends prove that they know the secret."""
        data = await stream.receive(wire.HELLO_BYTES)
        hello = wire.Hello.unpack(data)
        proof = wire.prove(self._secret, data)
        await stream.send(proof)
        wire.check_welcome(self._secret, data, proof, await stream.receive(wire.WELCOME_BYTES))
        return hello


def _check_server(hello: wire.Hello, address: str, identity: bytes, block_bytes: int) -> None:
    if hello.identity != identity:
        raise TransferError(f"another block server than {address} listens there now")
    if hello.block_bytes != block_bytes:
        raise TransferError(
            f"blocks at {address} have {hello.block_bytes} bytes, ours {block_bytes}: nodes can"
            " share blocks only if all ranks keep the same model in the same way"
        )


def _parsed(address: str) -> tuple[str, int, bytes]:
    place, _, identity = address.rpartition("/")
    host, _, port = place.rpartition(":")
    try:
        number, name = int(port), bytes.fromhex(identity)
    except ValueError:
        number, name = 0, b""
    if not host or not 0 < number < 2**16 or len(name) != wire.IDENTITY_BYTES:
        raise TransferError(f"{address!r} is no address of a TCP block server, host:port/identity")
    return host, number, name
