"""What eviction costs: not more for what stands before the victim, and nothing is left behind."""

from __future__ import annotations

import heapq
from types import SimpleNamespace

import pytest

from raykv.core import BlockManagerImpl
from raykv.core.eviction_order import LruOrder

from .helpers import check_drained, hit_ids, publish, run_of, start
from .test_eviction import EVERY, ShallowFirst, own


@pytest.fixture
def heap_calls(monkeypatch):
    """Counts what the order does to its heaps."""
    calls = [0]

    def counting(function):
        def call(*args):
            calls[0] += 1
            return function(*args)

        return call

    spy = SimpleNamespace(
        heappush=counting(heapq.heappush),
        heappop=counting(heapq.heappop),
        heapify=heapq.heapify,
    )
    monkeypatch.setattr("raykv.core.eviction_order.heapq", spy)
    return calls


def hedge(eviction, num_branches, trunk=tuple(range(100, 132))) -> BlockManagerImpl:
    """A trunk in many stretches, and branches of one block at its end."""
    manager = BlockManagerImpl(num_branches + len(trunk) + 1, 2, eviction=eviction)
    publish(manager, run_of(2, *trunk))
    for mark in range(num_branches):
        publish(manager, run_of(2, *trunk, 200 + mark))
    for length in range(len(trunk), 0, -1):  # each re-stamps the front only
        hit_ids(manager, run_of(2, *trunk[:length]))
    return manager


@pytest.mark.parametrize("eviction", ["lrfu", "priority", own(ShallowFirst)])
def test_evicting_branches_of_a_blocked_parent_costs_a_few_steps_each(eviction, heap_calls):
    per_branch = []
    for num_branches in (250, 1000):
        manager = hedge(eviction, num_branches)
        heap_calls[0] = 0
        while manager.num_evictable_blocks:
            manager.allocate(manager.num_free_blocks + 1).detach()
        per_branch.append(heap_calls[0] / num_branches)
    assert max(per_branch) < 12


@pytest.mark.parametrize("eviction", EVERY)
def test_a_parent_used_again_and_again_leaves_no_trail(eviction):
    """Its children stand in its way, so nothing of it ever surfaces to be skipped."""
    manager = hedge(eviction, 4)
    trunk = run_of(2, *range(100, 132))
    other = start(manager, run_of(2, 7))
    manager.cache(run_of(2, 7), other)
    for step in range(3000):
        hit_ids(manager, trunk[: 2 * (32 - step % 32)])
        publish(manager, run_of(2, 7, 1000 + step))  # the order looks at the parent, evicts another
    other.release()
    order = manager._cache._order
    if eviction == "lru":
        assert len(order._queue) < 300
    else:
        assert len(order._unscored) <= 1024
        assert len(order._heap) + sum(map(len, order._blocked.values())) < 300
    manager.check_integrity()


@pytest.mark.parametrize("eviction", ["lru", own(ShallowFirst)])
def test_children_that_come_and_go_leave_no_trail(eviction):
    manager = BlockManagerImpl(8, 2, eviction=eviction)
    trunk = run_of(2, 1, 2)
    held = start(manager, trunk)
    manager.cache(trunk, held)
    for mark in range(300):
        for length in (1, 2):
            publish(manager, [*trunk[: 2 * length], 10 + mark, mark])
    (run,) = manager._cache.roots[("", "", 0)].children.values()
    assert run.anchors is None or len(run.anchors._heap) <= 2
    held.release()
    check_drained(manager)


def test_sweeping_the_order_is_paid_for_by_as_many_releases(monkeypatch):
    """One run in very many stretches: the sweep must not come as often as for one stretch."""
    size, swept, compact = 512, [], LruOrder.compact
    monkeypatch.setattr(
        LruOrder, "compact", lambda *args: swept.append(compact(*args)) or swept[-1]
    )
    manager = BlockManagerImpl(size + 1, 1)
    tokens = list(range(size))
    publish(manager, tokens)
    for _ in range(4):
        for length in range(size, 0, -1):
            hit_ids(manager, tokens[:length])
    assert 0 < sum(swept) <= 4 * size + 64
