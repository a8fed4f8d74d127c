"""Peers and transports that fail: fewer blocks, no error, and every ticket given back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from raykv.host.tickets import LoadTicket

from .nodes import Target, prompt, run, until


def test_a_row_that_has_changed(node):
    node.store(prompt(1, 6))

    async def use(source):
        assert await source.count(prompt(1, 6), 0) == 6
        (load,) = node.books.clients.find("other node").loads.values()
        row = int(load.own[4])
        node.slab.reassign([row])
        node.slab.blocks[row] = 1
        return await Target().read(source, prompt(1, 6)), source.stats()

    num, stats = run([node], use)
    assert num == 4
    assert node.reports == [["OK"] * 4 + ["STALE", "FAILED"]]
    assert stats["stale"] == 1
    assert not stats["peers"]["a"]["is_resting"]


def test_a_damaged_row_is_set_aside_at_the_peer(node):
    node.store(prompt(1, 6))

    async def use(source):
        assert await source.count(prompt(1, 6), 0) == 6
        (load,) = node.books.clients.find("other node").loads.values()
        node.slab.blocks[int(load.own[2]), 100] ^= 1
        assert await Target().read(source, prompt(1, 6)) == 2
        await until(lambda: node.reports)
        return await source.count(prompt(1, 6), 0)

    assert run([node], use) == 2
    assert node.reports[0][:3] == ["OK", "OK", "CORRUPT"]
    assert node.books.stats().corrupt == 1


def test_a_dead_server_and_then_rest(node):
    node.store(prompt(1, 6))

    async def use(source):
        assert await source.count(prompt(1, 6), 0) == 6
        node.server.close()
        assert await Target().read(source, prompt(1, 6)) == 0
        assert await source.count(prompt(1, 6), 0) == 0
        return source.stats()

    stats = run([node], use)
    assert node.num_asked == 1, "it is left alone"
    assert node.reports == [["FAILED"] * 6]
    assert stats["peers"]["a"]["is_resting"]
    assert stats["failures"] == 1


def test_a_peer_that_raises(nodes):
    nodes[0].error = RuntimeError("no such actor")
    nodes[1].store(prompt(1, 2))

    async def use(source):
        counts = [await source.count(prompt(1, 2), 0) for _ in range(3)]
        return counts, source.stats()

    counts, stats = run(nodes, use)
    assert counts == [2, 2, 2]
    assert nodes[0].num_asked == 1
    assert stats["last_error"] == "RuntimeError: no such actor"


def test_a_peer_whose_call_is_called_off(nodes):
    nodes[0].error = asyncio.CancelledError()
    nodes[1].store(prompt(1, 2))
    assert run(nodes, lambda source: source.count(prompt(1, 2), 0)) == 2


def test_a_late_peer_is_asked_no_more_and_its_ticket_given_back(nodes):
    for node in nodes:
        node.store(prompt(1, 2))
    nodes[0].delay_s = 1.0

    async def use(source):
        counts = [await source.count(prompt(1, 2), 0) for _ in range(3)]
        assert nodes[0].num_pinned == 1
        await until(lambda: not nodes[0].num_pinned)
        assert not source._late
        return counts

    assert run(nodes, use, find_timeout_s=0.4) == [2, 2, 2]
    assert nodes[0].num_asked == 1
    assert nodes[0].reports == [["CANCELLED"] * 2]


@pytest.mark.parametrize("what", ["first_block", "too many", "lengths"])
def test_a_ticket_that_makes_no_sense(node, what):
    node.store(prompt(1, 6))
    find = node.find

    async def lie(want):
        ticket = await find(want)
        ids, first = ticket.host_ids, ticket.first_block
        if what == "first_block":
            first += 1
        elif what == "too many":
            ids = np.tile(ids, 2)
        generations = ticket.generations[:-1] if what == "lengths" else ticket.generations
        return LoadTicket(ticket.id, first, ids, generations, ticket.checksums)

    async def tell(result):
        node.books.loaded("other node", [type(result)(result.ticket_id, np.full(6, 4, np.uint8))])

    node.find, node.loaded = lie, tell
    assert run([node], lambda source: Target().read(source, prompt(1, 6))) == 0


def test_a_lost_report_is_made_again(node):
    node.store(prompt(1, 3))
    node.num_lost_reports = 2
    assert run([node], lambda source: Target().read(source, prompt(1, 3))) == 3
    assert node.reports == [["OK"] * 3]


def test_a_transport_that_raises(node):
    node.store(prompt(1, 3))

    async def fail(*args):
        raise KeyError(args[0])

    async def close():
        pass

    transport = SimpleNamespace(read_rows=fail, close=close, stats=dict)

    async def use(source):
        return await Target().read(source, prompt(1, 3)), source.stats()

    num, stats = run([node], use, transport=transport)
    assert num == 0
    assert node.reports == [["FAILED"] * 3]
    assert stats["last_error"].startswith("KeyError")


@pytest.mark.parametrize("what", ["count", "read"])
def test_cancelled(node, what):
    node.store(prompt(1, 3))
    node.delay_s = 0.05

    async def use(source):
        target = Target()
        work = (
            source.count(prompt(1, 3), 0) if what == "count" else target.read(source, prompt(1, 3))
        )
        task = asyncio.create_task(work)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert node.num_pinned == 1
        assert (target.rows == 7).all()

    run([node], use)
    assert node.reports == [["CANCELLED"] * 3]


def test_cancelled_while_rows_arrive(node):
    node.store(prompt(1, 20))

    async def use(source):
        target = Target()
        await source.count(prompt(1, 20), 0)
        task = asyncio.create_task(target.read(source, prompt(1, 20)))
        target.reported = SimpleNamespace(append=lambda num: task.cancel())
        with pytest.raises(asyncio.CancelledError):
            await task

    run([node], use)
    assert node.reports == [["CANCELLED"] * 20]
