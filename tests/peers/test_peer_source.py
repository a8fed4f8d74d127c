"""Blocks from other nodes: from the best peer, if that is worth it; all tickets given back."""

from __future__ import annotations

import asyncio

import pytest

from raykv.core import Namespace
from raykv.errors import IntegrityError

from .nodes import BLOCK_BYTES, BLOCK_SIZE, Target, num_right, prompt, run, until


def test_all_blocks_of_a_prompt(node):
    """To the last one, which a tier leaves to a rank to compute."""
    node.store(prompt(1, 12))
    target = Target()

    async def use(source):
        assert await source.count(prompt(1, 12), 0) == 12
        assert node.num_pinned == 1
        assert await target.read(source, prompt(1, 12)) == 12
        return source.stats()

    stats = run([node], use)
    assert target.reported[-1] == 12
    assert num_right(target.rows, target.row_ids, prompt(2, 12), 0, 12) == 0
    assert (target.rows[target.row_ids[12:]] == 7).all()
    assert node.reports == [["OK"] * 12]
    assert node.num_asked == 1, "the read took what count found"
    assert (stats["blocks"], stats["bytes"], stats["found"]) == (12, 12 * BLOCK_BYTES, 1)
    assert stats["transport"]["rows"] == 12
    assert stats["kept"] == 0


def test_from_a_block_on_and_no_more_than_rows(node):
    node.store(prompt(1, 12))
    target = Target(num=4)

    async def use(source):
        assert await source.count(prompt(1, 20), 5) == 7
        return await target.read(source, prompt(1, 20), 6)

    assert run([node], use) == 4
    assert node.reports == [["CANCELLED"] + ["OK"] * 4 + ["CANCELLED"] * 2]


def test_what_nobody_has(node):
    node.store(prompt(1, 3))

    async def use(source):
        assert await source.count(prompt(2, 3), 0) == 0
        assert await source.count(prompt(1, 3), 3) == 0
        assert await source.count(prompt(1, 3, namespace=Namespace("x")), 0) == 0
        assert await source.count(prompt(1, 0), 0) == 0
        return await Target().read(source, prompt(2, 3))

    assert run([node], use) == 0
    assert run([], use) == 0
    assert node.reports == []


def test_a_read_without_a_count(node):
    node.store(prompt(1, 3))
    assert run([node], lambda source: Target().read(source, prompt(1, 3))) == 3
    assert run([node], lambda source: Target(0).read(source, prompt(1, 3))) == 0
    assert node.num_asked == 1


def test_a_kept_ticket_of_other_blocks_is_not_used(node):
    node.store(prompt(1, 6))

    async def use(source):
        assert await source.count(prompt(1, 6), 3) == 3
        return await Target().read(source, prompt(1, 6), 1)

    assert run([node], use) == 5
    assert sorted(node.reports) == [["CANCELLED"] * 3, ["OK"] * 5]


def test_the_peer_with_most_is_taken_and_the_others_are_let_go(nodes):
    nodes[0].store(prompt(1, 3))
    nodes[1].store(prompt(1, 8))

    async def use(source):
        assert await source.count(prompt(1, 10), 0) == 8
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [node.num_pinned for node in nodes] == [0, 1]
        return await Target().read(source, prompt(1, 10))

    assert run(nodes, use) == 8
    assert nodes[0].reports == [["CANCELLED"] * 3]


def test_of_two_the_faster_is_taken(nodes):
    for node in nodes:
        node.store(prompt(1, 4))

    async def use(source):
        await source.count(prompt(2, 1), 0)  # it knows the peers now
        source._links["a"].copied(1 << 30, 10)
        await source.count(prompt(1, 4, 10.0), 0)
        return await Target().read(source, prompt(1, 4, 10.0))

    assert run(nodes, use) == 4
    assert [node.reports for node in nodes] == [[["CANCELLED"] * 4], [["OK"] * 4]]


def test_only_what_is_faster_than_to_compute(node):
    node.store(prompt(1, 8))
    num_tokens = 8 * BLOCK_SIZE

    async def use(source):
        await source.count(prompt(2, 1), 0)  # it knows the peer now
        source._links["a"].copied(1 << 30, (1 << 30) / 1e4)
        copy_s = source._links["a"].copy_s(8 * BLOCK_BYTES)
        assert copy_s == pytest.approx(4, rel=0.1)
        counts = [
            await source.count(prompt(1, 8, num_tokens / prefill_s), 0)
            for prefill_s in (copy_s / 2, copy_s * 2)
        ]
        assert source.stats()["not_worth"] == 1
        return counts

    assert run([node], use) == [0, 8]


def test_a_ticket_is_not_kept_for_ever(node):
    node.store(prompt(1, 3))

    async def use(source):
        assert await source.count(prompt(1, 3), 0) == 3
        await until(lambda: not node.num_pinned)
        assert source.stats()["kept"] == 0
        return await Target().read(source, prompt(1, 3))

    assert run([node], use, keep_s=0.03) == 3
    assert node.reports == [["CANCELLED"] * 3, ["OK"] * 3]


def test_counting_twice_keeps_one(node):
    node.store(prompt(1, 3))

    async def use(source):
        counts = [await source.count(prompt(1, 3), 0) for _ in range(3)]
        source.check_integrity()
        assert source.stats()["kept"] == 1
        return counts, [await Target().read(source, prompt(1, 3)) for _ in range(2)]

    assert run([node], use) == ([3, 3, 3], [3, 3])


def test_a_closed_source_has_nothing(node):
    node.store(prompt(1, 3))

    async def use(source):
        assert await source.count(prompt(1, 3), 0) == 3
        await source.close()
        assert node.num_pinned == 0
        assert await Target().read(source, prompt(1, 3)) == 0
        return await source.count(prompt(1, 3), 0)

    assert run([node], use) == 0


def test_the_integrity_check_sees_a_forgotten_ticket(node):
    node.store(prompt(1, 3))

    async def use(source):
        await source.count(prompt(1, 3), 0)
        source.check_integrity()
        (kept,) = source._kept.values()
        kept.timer.cancel()
        with pytest.raises(IntegrityError, match="stay pinned"):
            source.check_integrity()
        source._kept.clear()
        source._release(kept.found)

    run([node], use)
