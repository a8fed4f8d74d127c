"""Connections that are kept: bounded, each for one user at a time."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.errors import IntegrityError, TransferError
from raykv.host.transport.connections import Connections

from .slabs import SECRET


class FakeStream:
    """What is kept need not be connected to anything."""

    is_closed = False

    def close(self):
        self.is_closed = True


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "keep", "drop", "lose", "close"]), st.integers(0, 2)),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=200)
def test_any_use(steps):
    connections = Connections(SECRET, max_idle=3)
    streams, taken, is_closed = [], [], False
    for what, number in steps:
        address = f"a{number}"
        if what == "take":
            stream = connections.take(address)
            if stream is None:
                stream = FakeStream()
                stream.address = address
                streams.append(stream)
            assert not stream.is_closed
            assert stream not in taken
            assert stream.address == address
            taken.append(stream)
        elif what == "keep" and taken:
            stream = taken.pop(0)
            connections.keep(stream.address, stream)
        elif what == "lose" and taken:
            taken.pop().close()
        elif what == "drop":
            connections.drop(address)
            assert connections.take(address) is None
        elif what == "close":
            connections.close()
            is_closed = True
        connections.check_integrity()
        num_open = sum(not stream.is_closed for stream in streams)
        assert num_open == len(taken) + connections.num_idle, "lost or closed in use"
        assert not is_closed or connections.num_idle == 0


def test_an_integrity_check_sees_a_connection_kept_twice():
    connections = Connections(SECRET)
    stream = FakeStream()
    connections.keep("a", stream)
    connections.check_integrity()
    connections.keep("a", stream)
    with pytest.raises(IntegrityError, match="twice"):
        connections.check_integrity()


def test_turns_are_bounded_per_address():
    async def main():
        connections = Connections(SECRET, max_per_address=2)
        inside, most = {"a": 0, "b": 0}, {"a": 0, "b": 0}

        async def use(address):
            async with connections.turn(address):
                inside[address] += 1
                most[address] = max(most[address], inside[address])
                await asyncio.sleep(0)
                inside[address] -= 1

        await asyncio.gather(*(use(address) for address in "ab" * 10))
        gc.collect()
        return most, len(connections._turns)

    assert asyncio.run(main()) == ({"a": 2, "b": 2}, 0)


def test_who_is_cancelled_leaves_its_turn():
    async def main():
        connections = Connections(SECRET, max_per_address=1)

        async def hold():
            async with connections.turn("a"):
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(hold()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        async with asyncio.timeout(5), connections.turn("a"):
            pass

    asyncio.run(main())


def test_a_closed_one_opens_nothing():
    connections = Connections(SECRET)
    connections.close()
    with pytest.raises(TransferError, match="closed"):
        asyncio.run(connections.open("127.0.0.1:1/" + "0" * 16, 64))
