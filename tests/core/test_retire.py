"""Retired weights: what they computed is evicted before all else, under every policy."""

from __future__ import annotations

import random

import pytest

from raykv.core import BlockManagerImpl, Namespace
from raykv.core.eviction_order import LruOrder
from raykv.core.retention import Retention
from raykv.core.retired_order import RetiredFirst
from raykv.errors import IntegrityError

from .helpers import check_drained, counters, hit_ids, publish, run_of, start
from .test_eviction import EVERY

OLD, NEW = Namespace(weights_version=1), Namespace(weights_version=2)
TENANT = Namespace(tenant="t", weights_version=1)


@pytest.fixture(params=EVERY)
def manager(request):
    manager = BlockManagerImpl(17, 2, eviction=request.param)
    yield manager
    check_drained(manager)


def victims(manager) -> list[int]:
    """All cached blocks in the order in which they go."""
    held, order = [manager.allocate(manager.num_free_blocks)], []
    while manager.num_evictable_blocks:
        held.append(manager.allocate(1))
        order += held[-1].ids.tolist()
        manager.check_integrity()
    for blocks in held:
        blocks.release()
    return order


def test_retired_blocks_go_first_children_before_parents(manager):
    new = publish(manager, run_of(2, 1, 2), NEW)
    trunk = publish(manager, run_of(2, 1, 2), OLD)
    left = publish(manager, run_of(2, 1, 2, 3), OLD)[2:]
    right = publish(manager, run_of(2, 1, 4), OLD)[1:]
    other = publish(manager, run_of(2, 9), TENANT)
    plain = publish(manager, run_of(2, 1))
    hit_ids(manager, run_of(2, 1, 2, 3), OLD)  # used last, and yet
    assert manager.retire(1) == 5
    order = victims(manager)
    assert set(order[:5]) == {*trunk, *left, *right, *other}
    assert order.index(left[0]) < order.index(trunk[1]) < order.index(trunk[0])
    assert order.index(right[0]) < order.index(trunk[0])
    assert set(order[5:]) == {*new, *plain}


def test_without_retirement_the_order_is_the_policys():
    manager = BlockManagerImpl(17, 2)
    ids = [publish(manager, run_of(2, mark), space) for mark, space in enumerate([NEW, OLD, NEW])]
    assert isinstance(manager._cache._order, LruOrder), "nobody pays for what nobody asked for"
    assert victims(manager) == [block_id for each in ids for block_id in each]


def test_what_is_released_or_published_later_goes_first_too(manager):
    running = start(manager, run_of(2, 1, 2), OLD)
    manager.cache(run_of(2, 1, 2), running, namespace=OLD)
    new = publish(manager, run_of(2, 5, 6), NEW)
    assert manager.retire(1) == 0
    held = manager.allocate(13)
    assert manager.num_evictable_blocks == 1, "one of the new is gone, for the old ones are held"
    old = running.ids.tolist()
    running.release()
    late = start(manager, run_of(2, 7), OLD)
    assert late.ids.tolist() == [old[1]]
    manager.cache(run_of(2, 7), late, namespace=OLD)
    late.release()
    held.release()
    order = victims(manager)
    assert set(order[:2]) == {old[0], old[1]}
    assert order[2:] == new[:1]


def test_retired_blocks_are_still_found_and_held(manager):
    ids = publish(manager, run_of(2, 1, 2, 3), OLD)
    others = publish(manager, run_of(2, 8, 9), NEW)
    assert manager.retire(1) == 3
    with manager.allocate_shared(run_of(2, 1, 2), namespace=OLD) as hit:
        assert hit.ids.tolist() == ids[:2]
        order = victims(manager)
        assert order[0] == ids[2]
        assert set(order[1:]) == set(others)
    assert hit_ids(manager, run_of(2, 1, 2, 3), OLD) == ids[:2]


def test_a_failed_allocation_evicts_nothing_that_is_retired(manager):
    publish(manager, run_of(2, 1, 2), OLD)
    manager.retire(1)
    before = counters(manager)
    assert manager.allocate(17) is None
    assert counters(manager) == before


def test_retiring_twice_or_what_nobody_computed_changes_nothing(manager):
    old = publish(manager, run_of(2, 1), OLD)
    assert [manager.retire(version) for version in (7, 1, 1)] == [0, 1, 1]
    assert len(manager._cache._order.retired.entries()) == 1
    new = publish(manager, run_of(2, 1), NEW)
    assert victims(manager) == [*old, *new]


def test_several_versions_and_a_reset_between(manager):
    first, second = publish(manager, run_of(2, 1), NEW), publish(manager, run_of(2, 2), OLD)
    plain = publish(manager, run_of(2, 3))
    assert [manager.retire(version) for version in (1, 2)] == [1, 1]
    assert victims(manager) == [*second, *first, *plain]
    publish(manager, run_of(2, 4), NEW)
    assert manager.reset_prefix_cache() == 1
    plain, first = publish(manager, run_of(2, 3)), publish(manager, run_of(2, 1), NEW)
    assert victims(manager) == [*first, *plain], "retired for good"


def test_a_pin_of_retired_weights_goes_first():
    manager = BlockManagerImpl(17, 2, eviction="priority")
    dear = start(manager, run_of(2, 1), OLD)
    old = dear.ids.tolist()
    manager.cache(run_of(2, 1), dear, namespace=OLD, retention=Retention(100))
    dear.release()
    new = publish(manager, run_of(2, 1), NEW)
    manager.retire(1)
    assert victims(manager) == [*old, *new]


def test_ups_and_downs_leave_no_trail_in_either_order(manager):
    """The queue of what is retired is swept as the policy's own is."""
    rng = random.Random(3)
    manager.retire(1)
    for step in range(3000):
        hit_ids(manager, run_of(2, *range(rng.randrange(5))), OLD)
        publish(manager, run_of(2, *range(1 + step % 4)), OLD if step % 3 else NEW)
    assert len(manager._cache._order.retired._queue) < 300
    manager.check_integrity()


def test_the_audit_sees_a_retired_stretch_that_is_not_queued():
    manager = BlockManagerImpl(17, 2)
    publish(manager, run_of(2, 1), OLD)
    manager.retire(1)
    manager._cache._order = RetiredFirst(manager._cache._order._others, [1])
    with pytest.raises(IntegrityError, match="retired stretch"):
        manager.check_integrity()
