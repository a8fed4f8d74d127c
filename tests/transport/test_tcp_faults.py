"""Servers that die, freeze, change and lie in the middle: fewer rows, and never a wrong one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.host.transport import TcpServer, TcpTransport, wire
from raykv.memory.host_slab import HostSlab

from .slabs import (
    FAILED,
    OK,
    SECRET,
    STALE,
    Served,
    filled_slab,
    honest_answer,
    liar,
    num_ok,
    overwrite,
    read,
    request_for,
)

# Far more than the kernel keeps on its way, so that the middle is the middle.
NUM_BLOCKS, BLOCK_BYTES = 401, 1 << 18
IDS = np.arange(1, NUM_BLOCKS)


@pytest.fixture
def source():
    with filled_slab(NUM_BLOCKS, BLOCK_BYTES) as slab:
        yield slab


@pytest.fixture
def target():
    with HostSlab.create(NUM_BLOCKS, BLOCK_BYTES) as slab:
        yield slab


@pytest.fixture
def served(source):
    served = Served(source)
    yield served
    served.close()


def once(act):
    """Calls it at the first blocks that arrive."""
    acted = []

    def on_blocks(num):
        if not acted:
            acted.append(num)
            act()

    return on_blocks


def test_killed_in_the_middle(source, target, served):
    outcomes, error = read(served.address, request_for(source, IDS), target, IDS, once(served.kill))
    num = num_ok(outcomes)
    assert 0 < num < len(IDS)
    assert set(outcomes[num:]) == {FAILED}
    assert error is not None
    assert (target.blocks[1 : num + 1] == source.blocks[1 : num + 1]).all()
    assert not (target.blocks[num + 1 :] == source.blocks[num + 1 :]).all()
    outcomes, _ = read(served.address, request_for(source, IDS), target, IDS)
    assert outcomes == [FAILED] * len(IDS), "nobody is there"


def test_frozen_in_the_middle(source, target, served):
    try:
        outcomes, error = read(
            served.address,
            request_for(source, IDS),
            target,
            IDS,
            once(served.freeze),
            timeout_s=1.0,
        )
        num = num_ok(outcomes)
        assert 0 < num < len(IDS)
        assert isinstance(error, TimeoutError)
        assert (target.blocks[1 : num + 1] == source.blocks[1 : num + 1]).all()
        # Its kernel still takes connections.
        outcomes, error = read(served.address, request_for(source, IDS), target, IDS, timeout_s=0.1)
        assert outcomes == [FAILED] * len(IDS)
        assert isinstance(error, TimeoutError)
    finally:
        served.thaw()
    outcomes, _ = read(served.address, request_for(source, IDS), target, IDS)
    assert outcomes == [OK] * len(IDS)
    assert (target.blocks == source.blocks).all()


@pytest.mark.parametrize("with_checksums", [False, True])
def test_reassigned_in_the_middle(source, target, served, with_checksums):
    request = request_for(source, IDS, with_checksums=with_checksums)
    was = source.blocks[350].copy()
    outcomes, error = read(
        served.address, request, target, IDS, once(lambda: overwrite(source, 350))
    )
    assert error is None
    assert outcomes[:350] == [OK] * 349 + [STALE]
    assert OK not in outcomes[350:]
    assert (target.blocks[1:350] == source.blocks[1:350]).all()
    assert not (target.blocks[350] == was).all()


def test_cancelled_in_the_middle(source, target, served):
    async def main():
        transport = TcpTransport(SECRET)

        async def attempt(on_blocks):
            return await transport.read_rows(
                served.address, request_for(source, IDS), target.blocks, IDS, on_blocks
            )

        task = asyncio.create_task(attempt(once(lambda: asyncio.current_task().cancel())))
        with pytest.raises(asyncio.CancelledError):
            await task
        target.blocks[1:] = 9  # somebody else's now
        await asyncio.sleep(0.2)
        assert (target.blocks[1:] == 9).all()
        assert transport.stats()["idle_connections"] == 0
        outcomes = await attempt(lambda num: None)
        assert outcomes.tolist() == [OK] * len(IDS)
        await transport.close()

    asyncio.run(main())
    assert (target.blocks == source.blocks).all()


def test_an_answer_that_breaks_is_not_begun_again_in_its_middle(source, target):
    """Over a kept connection, where nothing but the place tells one row from another."""
    source.generations[1:] = 5
    server = TcpServer(source, SECRET)

    def break_off():
        for task in list(server._connections):
            server._loop.call_soon_threadsafe(task.cancel)

    async def main():
        transport = TcpTransport(SECRET)

        async def attempt(ids, on_blocks):
            request = request_for(source, ids, with_checksums=False)
            return await transport.read_rows(server.address, request, target.blocks, ids, on_blocks)

        assert (await attempt(IDS[:1], lambda num: None)).tolist() == [OK]
        outcomes = await attempt(IDS, once(break_off))
        assert transport.stats()["opened"] == 1
        await transport.close()
        return outcomes.tolist()

    outcomes = asyncio.run(main())
    server.close()
    num = num_ok(outcomes)
    assert 0 < num < len(IDS)
    assert (target.blocks[1 : num + 1] == source.blocks[1 : num + 1]).all()


# -- liars -----------------------------------------------------------------------------------------

SMALL_IDS = np.arange(1, 9)


@pytest.fixture(scope="module")
def small():
    with filled_slab(9, 64) as slab:
        yield slab


def ask_liar(slab, answer, **options):
    """Read from a liar into a slab of 7s; returns outcomes, rows and the error."""
    timeout_s = options.pop("timeout_s", 5.0)

    async def main():
        transport = TcpTransport(SECRET, timeout_s=timeout_s)
        rows = np.full((9, 64), 7, np.uint8)
        async with liar(answer, **options) as address:
            outcomes = await transport.read_rows(
                address, request_for(slab, SMALL_IDS), rows, SMALL_IDS, lambda num: None
            )
            await transport.close()
        assert transport.stats()["idle_connections"] == 0
        return outcomes.tolist(), rows, transport.last_error

    return asyncio.run(main())


def test_an_honest_answer(small):
    """What the lies below are made of is good as it is."""
    outcomes, rows, error = ask_liar(small, lambda body: honest_answer(small, body))
    assert error is None
    assert outcomes == [OK] * 8
    assert (rows[1:] == small.blocks[1:]).all()


def test_another_blocks_content(small):
    """Right in all but the content."""

    def answer(body):
        said = bytearray(honest_answer(small, body))
        start = wire.COUNT_BYTES + 3 * 64
        said[start : start + 64] = small.blocks[8].tobytes()
        return bytes(said)

    outcomes, rows, _ = ask_liar(small, answer)
    assert num_ok(outcomes) == 3
    assert (rows[1:4] == small.blocks[1:4]).all()


@given(st.data())
@settings(max_examples=60)
def test_any_damage_to_an_answer(small, data):
    """A byte altered, or some cut out, added, or missing at the end."""
    (kind,) = data.draw(st.tuples(st.sampled_from(["alter", "cut", "add", "end", "rubbish"])))
    damaged = []

    def answer(body):
        said = bytearray(honest_answer(small, body))
        at = data.draw(st.integers(0, len(said) - 1))
        some = data.draw(st.binary(min_size=1, max_size=40))
        if kind == "alter":
            said[at] ^= some[0] or 1
        elif kind == "cut":
            del said[at : at + len(some)]
        elif kind == "add":
            said[at:at] = some
        elif kind == "end":
            del said[at:]
        else:
            said = bytearray(some)
        damaged.append(bytes(said) != honest_answer(small, body))
        return bytes(said)

    outcomes, rows, _ = ask_liar(small, answer)
    num = num_ok(outcomes)
    assert (rows[1 : num + 1] == small.blocks[1 : num + 1]).all()
    assert num < 8 or kind in {"add", "cut"} or not damaged[0]


@given(st.binary(max_size=400))
@settings(max_examples=30)
def test_rubbish_instead_of_a_server(small, rubbish):
    outcomes, rows, error = ask_liar(small, None, hello=rubbish)
    assert outcomes == [FAILED] * 8
    assert error is not None
    assert (rows == 7).all()


def test_a_server_that_does_not_know_the_secret(small):
    """It waves everybody through, but cannot prove itself."""
    outcomes, rows, error = ask_liar(
        small, lambda body: honest_answer(small, body), answer_proof=bytes(wire.WELCOME_BYTES)
    )
    assert outcomes == [FAILED] * 8
    assert "does not know the pool's secret" in str(error)
    assert (rows == 7).all()


def test_a_trickle_ends(small):
    """Something always comes, but never a batch."""

    def answer(body):
        async def trickle():
            for byte in honest_answer(small, body):
                yield bytes([byte])
                await asyncio.sleep(0.02)

        return trickle()

    outcomes, _, error = ask_liar(small, answer, timeout_s=0.2)
    assert outcomes == [FAILED] * 8
    assert isinstance(error, TimeoutError)
