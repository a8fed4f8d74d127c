"""Reads over TCP from a slab that this process or another one serves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import numpy as np
import pytest

from raykv.errors import ConfigError, TransferError
from raykv.host.transport import TcpServer, TcpTransport
from raykv.host.transport.interface import rows_per_batch
from raykv.memory.host_slab import HostSlab

from .slabs import (
    CORRUPT,
    FAILED,
    OK,
    SECRET,
    STALE,
    Served,
    filled_slab,
    overwrite,
    read,
    request_for,
)

NUM_BLOCKS, BLOCK_BYTES = 40, 300_000


@pytest.fixture(scope="module")
def source():
    with filled_slab(NUM_BLOCKS, BLOCK_BYTES) as slab:
        yield slab


@pytest.fixture
def own():
    """One that a test may change."""
    with filled_slab(NUM_BLOCKS, BLOCK_BYTES, seed=3) as slab:
        yield slab


@pytest.fixture
def target():
    with HostSlab.create(NUM_BLOCKS, BLOCK_BYTES) as slab:
        yield slab


@contextlib.contextmanager
def serving(slab, **options):
    server = TcpServer(slab, SECRET, **options)
    try:
        yield server
    finally:
        server.close()


def test_every_block_from_another_process(source, target):
    served = Served(source)
    try:
        ids = np.random.default_rng(5).permutation(np.arange(1, NUM_BLOCKS))
        places = np.random.default_rng(6).permutation(np.arange(1, NUM_BLOCKS))
        reported = []
        outcomes, error = read(
            served.address, request_for(source, ids), target, places, reported.append
        )
    finally:
        served.close()
    assert error is None
    assert outcomes == [OK] * len(ids)
    assert (target.blocks[places] == source.blocks[ids]).all()
    assert not (target.blocks[places] == source.blocks[np.roll(ids, 1)]).all(axis=1).any()
    assert not target.blocks[0].any()
    step = rows_per_batch(BLOCK_BYTES)
    assert reported == [*range(step, len(ids), step), len(ids)]


@pytest.mark.parametrize("num", [1, 2, 13, 14, 15, 39])
def test_any_number_of_rows_and_no_others_are_touched(source, target, num):
    target.blocks[1:] = 7
    ids = np.arange(NUM_BLOCKS - num, NUM_BLOCKS)
    places = np.arange(1, num + 1)
    with serving(source) as server:
        outcomes, _ = read(server.address, request_for(source, ids), target, places)
    assert outcomes == [OK] * num
    assert (target.blocks[places] == source.blocks[ids]).all()
    assert (target.blocks[num + 1 :] == 7).all()


def test_nothing_to_read_asks_nobody(source, target):
    outcomes, error = read("127.0.0.1:1/" + "0" * 16, request_for(source, np.arange(0)), target, [])
    assert outcomes == []
    assert error is None


def test_a_connection_is_used_again(source, target):
    ids = np.arange(1, 6)

    async def main(server):
        transport = TcpTransport(SECRET)
        for _ in range(4):
            await transport.read_rows(
                server.address, request_for(source, ids), target.blocks, ids, lambda num: None
            )
        stats = transport.stats()
        await transport.close()
        return stats

    with serving(source) as server:
        stats = asyncio.run(main(server))
    assert stats["opened"] == 1
    assert stats["rows"] == 20
    assert stats["bytes"] == 20 * BLOCK_BYTES
    assert stats["idle_connections"] == 1


def test_many_reads_at_once(source, target):
    async def main(server):
        transport = TcpTransport(SECRET, max_per_address=3)
        ids = np.arange(1, NUM_BLOCKS)
        reads = [
            transport.read_rows(
                server.address, request_for(source, part), target.blocks, part, lambda num: None
            )
            for part in np.array_split(ids, 13)
        ]
        outcomes = np.concatenate(await asyncio.gather(*reads))
        stats = transport.stats()
        await transport.close()
        return outcomes, stats

    with serving(source) as server:
        outcomes, stats = asyncio.run(main(server))
    assert outcomes.tolist() == [OK] * (NUM_BLOCKS - 1)
    assert (target.blocks[1:] == source.blocks[1:]).all()
    assert 1 <= stats["opened"] <= 3


def test_a_server_that_closed_the_idle_connection_is_asked_again(source, target):
    ids = np.arange(1, 4)

    async def main():
        transport = TcpTransport(SECRET)

        async def once(server):
            outcomes = await transport.read_rows(
                server.address, request_for(source, ids), target.blocks, ids, lambda num: None
            )
            return outcomes.tolist()

        with serving(source) as server:
            assert await once(server) == [OK] * 3
            for task in list(server._connections):  # as when it was idle for long
                server._loop.call_soon_threadsafe(task.cancel)
            assert await once(server) == [OK] * 3
            assert transport.stats()["opened"] == 2
        assert await once(server) == [FAILED] * 3, "it is gone for good"
        await transport.close()

    asyncio.run(main())


# -- content that changes --------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 12, 13, 38])
def test_a_row_that_has_changed_before(own, target, at):
    ids = np.arange(1, NUM_BLOCKS)
    request = request_for(own, ids, with_checksums=False)
    overwrite(own, at + 1)
    with serving(own) as server:
        outcomes, error = read(server.address, request, target, ids)
        assert server.counts["changed"] == 1
    assert error is None
    assert outcomes[: at + 1] == [OK] * at + [STALE]
    assert OK not in outcomes[at:]
    assert (target.blocks[1 : at + 1] == own.blocks[1 : at + 1]).all()


def test_a_row_that_changes_while_it_is_sent(own, target):
    """The new content arrives, and is told by the generation alone."""
    ids = np.arange(1, 11)
    request = request_for(own, ids, with_checksums=False)
    with serving(own) as server:
        send = server._generations

        class Changing:
            """Generations as they are at first; from the second look on one has been raised."""

            num_looks = 0

            def __getitem__(self, rows):
                self.num_looks += 1
                if self.num_looks == 2:
                    overwrite(own, 4)
                return send[rows]

        server._generations = Changing()
        outcomes, _ = read(server.address, request, target, ids)
    assert outcomes == [OK] * 3 + [STALE] + [OK] * 6, "what follows was sent before"
    assert (target.blocks[1:4] == own.blocks[1:4]).all()


def test_a_damaged_row(own, target):
    own.blocks[17, 299_999] ^= 1
    ids = np.arange(1, NUM_BLOCKS)

    async def main(server):
        transport = TcpTransport(SECRET)
        outcomes = [
            await transport.read_rows(
                server.address, request_for(own, part), target.blocks, part, lambda num: None
            )
            for part in (ids, ids[20:])
        ]
        stats = transport.stats()
        await transport.close()
        return outcomes, stats

    with serving(own) as server:
        (first, second), stats = asyncio.run(main(server))
    assert first[:17].tolist() == [OK] * 16 + [CORRUPT]
    assert second.tolist() == [OK] * 19
    assert stats["opened"] == 2, "the rest of the first answer is still on its way"
    assert stats["corrupt"] == 1


def test_without_checksums_damage_passes(own, target):
    """What the checksum test would see if nothing was compared."""
    own.blocks[17, 0] ^= 1
    with serving(own) as server:
        outcomes, _ = read(
            server.address, request_for(own, [17], with_checksums=False), target, [1]
        )
    assert outcomes == [OK]


# -- who may read ----------------------------------------------------------------------------------


def test_a_wrong_secret(source, target):
    with serving(source) as server:
        outcomes, error = read(
            server.address, request_for(source, [1, 2]), target, [1, 2], secret=b"x" * 32
        )
        assert server.counts["refused"] == 1
        assert server.counts["rows"] == 0
    assert outcomes == [FAILED] * 2
    assert isinstance(error, TransferError)
    assert not target.blocks.any()


def test_another_server_at_the_port(source, target):
    with serving(source) as server:
        place = server.address.rpartition("/")[0]
        address = f"{place}/{'ab' * 8}"
        outcomes, error = read(address, request_for(source, [1]), target, [1])
    assert outcomes == [FAILED]
    assert "another block server" in str(error)


def test_blocks_of_another_size(source):
    with HostSlab.create(4, 100) as target, serving(source) as server:
        outcomes, error = read(server.address, request_for(source, [1]), target, [1])
    assert outcomes == [FAILED]
    assert "300000 bytes, ours 100" in str(error)


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "127.0.0.1:1", "127.0.0.1:x/00", "h:99999/" + "0" * 16, ":1/" + "0" * 16,
     "127.0.0.1:1/zz", "127.0.0.1:9/" + "0" * 14, "a" * 90 + ".b:1/" + "0" * 16],
)  # fmt: skip
def test_what_is_no_address(source, target, address):
    outcomes, error = read(address, request_for(source, [1]), target, [1])
    assert outcomes == [FAILED]
    assert error is not None


# -- the server's own ------------------------------------------------------------------------------


def connect(server):
    host, _, port = server.address.rpartition("/")[0].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_it_listens_on_loopback(source):
    with serving(source) as server:
        assert server.address.startswith("127.0.0.1:")
        assert server._listener.getsockname()[0] == "127.0.0.1"


def test_who_says_nothing_is_dropped(source):
    with serving(source, timeout_s=0.05) as server, connect(server) as link:
        while link.recv(4096):
            pass
        assert server.counts["refused"] == 1


def test_too_many_connections_are_closed(source, target):
    with serving(source, max_connections=2) as server:
        with connect(server) as one, connect(server) as other:
            assert one.recv(1)
            assert other.recv(1)
            with connect(server) as third:
                assert third.recv(1) == b""
        while server._connections:  # it notices that they are closed
            threading.Event().wait(0.01)
        outcomes, _ = read(server.address, request_for(source, [1]), target, [1])
        assert outcomes == [OK]


def test_close_ends_connections_and_is_idempotent(source):
    server = TcpServer(source, SECRET)
    with connect(server) as link:
        assert link.recv(1)
        server.close()
        server.close()
        with contextlib.suppress(ConnectionError):
            while link.recv(4096):
                pass
    with pytest.raises(ConnectionError):
        connect(server)
    assert not any(thread is server._thread for thread in threading.enumerate())


def test_refusals(source):
    with pytest.raises(ConfigError, match="5 bytes"):
        TcpServer(source, b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        TcpTransport(b"short")
    with serving(source) as server:
        port = server._listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            TcpServer(source, SECRET, port=port)
    with pytest.raises(ConfigError, match="cannot serve blocks"):
        TcpServer(source, SECRET, host="no such host")
    slab = HostSlab.create(2, 8)
    slab.close()
    with pytest.raises(TransferError, match="closed"):
        TcpServer(slab, SECRET)
