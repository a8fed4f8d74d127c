"""Any order of questions, reads, cancellations, stores and lost leases among three nodes."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.host.peer_source import PeerSource
from raykv.host.transport import ObjectStoreTransport, TcpTransport, take_rows

from .nodes import BLOCK_BYTES, BLOCK_SIZE, NUM_BLOCKS, SECRET, Node, num_right, prompt

PROMPTS, MOST = st.integers(0, 4), st.integers(1, 20)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 2), PROMPTS, MOST),
        st.tuples(st.just("count"), st.integers(0, 5), PROMPTS, MOST),
        st.tuples(st.just("read"), st.integers(0, 5), PROMPTS, MOST),
        st.tuples(st.just("cancel"), st.integers(0, 8), PROMPTS, MOST),
        st.tuples(st.just("expire"), st.integers(0, 2), PROMPTS, MOST),
    ),
    max_size=30,
)


def lose_lease(node):
    """Its books forget the other node, so that what it has pinned may be given to others."""
    node.books.leave("other node")
    node.books.confirmed_dead("other node")
    node.books.join("other node", 1, 0.0)


async def carry_out(steps, nodes, transport):
    num_read = 0
    source = PeerSource(
        lambda: nodes, transport,
        block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES, find_timeout_s=60, keep_s=60,
    )  # fmt: skip
    row_ids = np.random.default_rng(3).permutation(np.arange(1, NUM_BLOCKS))
    for what, number, name, num_blocks in steps:
        wanted = prompt(name, num_blocks)
        rows = np.full((NUM_BLOCKS, BLOCK_BYTES), 7, np.uint8)
        reported = [0]
        if what == "store":
            nodes[number].store(wanted)
        elif what == "expire":
            lose_lease(nodes[number])
        elif what == "count":
            num = await source.count(wanted, number)
            assert 0 <= num <= max(0, num_blocks - number)
        else:
            work = source.read(wanted, number, rows, row_ids, reported.append)
            task = asyncio.create_task(work)
            if what == "cancel":
                for _ in range(number):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                num = reported[-1]
            else:
                num = await task
                assert num == reported[-1]
            num_read += num
            assert reported == sorted(set(reported))
            assert num_right(rows, row_ids, wanted, number, num) == num
            assert (rows[np.setdiff1d(np.arange(NUM_BLOCKS), row_ids[:num_blocks])] == 7).all()
            before = rows.copy()
            await asyncio.sleep(0)
            assert (rows == before).all(), "touched after the end"
        source.check_integrity()
        for node in nodes:
            node.books.check_integrity()
    await source.close()
    source.check_integrity()
    return num_read


def run(steps, make_transport):
    nodes = [Node(name) for name in "abc"]
    try:
        return asyncio.run(carry_out(steps, nodes, make_transport(nodes)))
    finally:
        for node in nodes:
            assert node.num_pinned == 0, "a ticket was not given back"
            node.close()


def over_tcp(_):
    return TcpTransport(SECRET, timeout_s=60)


def over_objects(nodes):
    async def fetch(address, request):
        (node,) = [node for node in nodes if node.address == address]
        await asyncio.sleep(0)
        return take_rows(node.slab, request)

    return ObjectStoreTransport(fetch, timeout_s=60)


@given(STEPS)
@settings(max_examples=30)
def test_any_order_over_tcp(steps):
    run(steps, over_tcp)


@given(STEPS)
@settings(max_examples=30)
def test_any_order_over_an_object_store(steps):
    run(steps, over_objects)


def test_such_runs_read_something():
    """What the properties above are about does happen."""
    steps = [("store", 0, 1, 6), ("count", 0, 1, 6), ("read", 0, 1, 6), ("read", 2, 1, 6)]
    assert run(steps, over_tcp) == 10
    assert run(steps, over_objects) == 10


def test_evicted_between_count_and_read():
    """The lease is lost, the blocks are given to another prompt: nothing wrong arrives."""
    steps = [("store", 0, 1, 20), ("count", 0, 1, 20), ("expire", 0, 0, 1)]
    steps += [("store", 0, 2, 20), ("store", 0, 3, 20)]
    assert run([*steps, ("read", 0, 1, 20)], over_tcp) < 20
