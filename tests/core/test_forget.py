"""Forgetting: wrong content leaves the prefix cache with all that depends on it."""

from __future__ import annotations

import numpy as np
import pytest

from raykv.core import BlockManagerImpl, Namespace
from raykv.errors import IntegrityError

from .helpers import check_drained, counters, hit_ids, num_pending, publish, run_of, start
from .test_eviction import EVERY


@pytest.fixture(params=EVERY)
def manager(request):
    manager = BlockManagerImpl(17, 2, eviction=request.param)
    yield manager
    check_drained(manager)


def cached(manager) -> set[int]:
    ids = np.arange(manager.num_total_blocks + 1)
    return set(ids[manager.is_cached(ids)].tolist())


def test_a_block_goes_with_all_behind_it_and_nothing_else(manager):
    trunk = publish(manager, run_of(2, 1, 2, 3))
    branch = publish(manager, run_of(2, 1, 2, 4))[2:]
    early = publish(manager, run_of(2, 1, 5))[1:]
    other = publish(manager, run_of(2, 6))
    assert set(manager.forget([trunk[1]]).tolist()) == {*trunk[1:], *branch}
    assert cached(manager) == {trunk[0], *early, *other}
    assert hit_ids(manager, run_of(2, 1, 2, 3)) == trunk[:1]
    assert hit_ids(manager, run_of(2, 1, 5)) == [trunk[0], *early]
    assert manager.num_free_blocks == 13
    assert manager.num_evictable_blocks == manager.num_blocks_in_prefix_cache == 3
    assert manager.num_evicted_blocks == 0


def test_a_child_at_the_cut_stays_and_one_behind_it_goes(manager):
    trunk = publish(manager, run_of(2, 1, 2, 3))
    stays = publish(manager, run_of(2, 1, 4))[1:]
    goes = publish(manager, run_of(2, 1, 2, 5))[2:]
    assert set(manager.forget(trunk[1:2]).tolist()) == {*trunk[1:], *goes}
    assert cached(manager) == {trunk[0], *stays}


def test_several_at_once_and_ids_that_are_not_cached(manager):
    trunk = publish(manager, run_of(2, 1, 2, 3))
    branch = publish(manager, run_of(2, 1, 4, 5))[1:]
    held = manager.allocate(1)
    before = counters(manager)
    assert manager.forget([0, *held.ids.tolist(), 16]).tolist() == []
    assert counters(manager) == before
    gone = manager.forget([branch[1], trunk[2], trunk[1], trunk[2]]).tolist()
    assert sorted(gone) == sorted([*trunk[1:], branch[1]])
    assert cached(manager) == {trunk[0], branch[0]}
    held.release()


def test_a_forgotten_first_block_leaves_no_root_behind(manager):
    ids = publish(manager, run_of(2, 1, 2), Namespace(tenant="a"))
    publish(manager, run_of(2, 1))
    assert set(manager.forget(ids[:1]).tolist()) == set(ids)
    assert len(manager._cache.roots) == 1
    assert publish(manager, run_of(2, 1, 2), Namespace(tenant="a"))


def test_what_is_held_is_pending_until_it_is_let_go(manager):
    trunk = publish(manager, run_of(2, 1, 2, 3))
    reader = manager.allocate_shared(run_of(2, 1, 2))
    assert set(manager.forget(trunk[:1]).tolist()) == set(trunk)
    assert manager.num_used_blocks == 2
    assert manager.num_free_blocks == 14
    assert reader.ref_counts.tolist() == [1, 1]
    assert num_pending(manager) == 0
    manager.deallocate(reader)
    assert num_pending(manager) == 2
    manager.check_integrity()
    reader.release()
    assert manager.num_free_blocks == 16


def test_who_holds_what_was_forgotten_cannot_publish_it_again(manager):
    writer = start(manager, run_of(2, 1, 2, 3))
    manager.cache(run_of(2, 1, 2), writer)
    manager.forget(writer.ids[1:2])
    assert manager.cache(run_of(2, 1, 2, 3), writer) == 0
    assert hit_ids(manager, run_of(2, 1, 2, 3)) == writer.ids[:1].tolist()
    manager.check_integrity()
    writer.release()
    assert manager.num_free_blocks == 15
    again = publish(manager, run_of(2, 1, 2, 3))  # what is allocated anew can be
    assert hit_ids(manager, run_of(2, 1, 2, 3)) == again


def hold_the_end(manager, *marks):
    """A handle of nothing but the last block."""
    with manager.allocate_shared(run_of(2, *marks)) as whole:
        return whole[-1:]


def test_ancestors_of_a_held_block_can_be_evicted_once_it_is_forgotten(manager):
    publish(manager, run_of(2, 1, 2, 3))
    publish(manager, run_of(2, 1, 2, 4, 5))
    publish(manager, run_of(2, 1, 2, 4, 6))
    tail = hold_the_end(manager, 1, 2, 4, 6)  # in a run of its own, behind another one
    assert manager.num_evictable_blocks == 2
    manager.forget(tail.ids)
    assert manager.num_evictable_blocks == manager.num_blocks_in_prefix_cache == 5
    manager.check_integrity()
    with manager.allocate(15):
        assert cached(manager) == set()
    tail.release()


def test_a_handle_lists_what_it_did_when_others_come_in_place_of_what_was_forgotten(manager):
    publish(manager, run_of(2, 1, 2, 3))
    reader = manager.allocate_shared(run_of(2, 1, 2, 3))
    before = reader.index.tolist()
    manager.forget(reader.ids[2:])
    publish(manager, run_of(2, 1, 2, 3))  # goes on where the run was cut
    assert reader.index.tolist() == before
    assert hit_ids(manager, run_of(2, 1, 2, 3))[2:] != before[2:]
    manager.check_integrity()
    reader.release()


def test_ancestors_in_the_same_run_likewise(manager):
    publish(manager, run_of(2, 1, 2, 3))
    tail = hold_the_end(manager, 1, 2, 3)
    assert manager.num_evictable_blocks == 0
    manager.forget(tail.ids)
    assert manager.num_evictable_blocks == 2
    tail.release()


def test_ancestors_that_others_hold_stay_held(manager):
    publish(manager, run_of(2, 1, 2, 3, 4))
    publish(manager, run_of(2, 1, 2, 5))
    reader, tail = hold_the_end(manager, 1, 2), hold_the_end(manager, 1, 2, 3, 4)
    branch = hold_the_end(manager, 1, 2, 5)
    manager.forget(tail.ids)
    assert manager.num_evictable_blocks == 1
    manager.forget(branch.ids)
    assert manager.num_evictable_blocks == 1
    reader.release()
    assert manager.num_evictable_blocks == 3
    tail.release()
    branch.release()


@pytest.mark.parametrize("bad", [-1, 17])
def test_an_id_outside_the_pool_is_refused(manager, bad):
    ids = publish(manager, run_of(2, 1))
    with pytest.raises(ValueError, match=f"block {bad} cannot be forgotten"):
        manager.forget([*ids, bad])
    assert hit_ids(manager, run_of(2, 1)) == ids


def test_eviction_goes_on_in_its_order_after_a_cut():
    manager = BlockManagerImpl(9, 2)
    old = publish(manager, run_of(2, 1, 2, 3))
    publish(manager, run_of(2, 1, 4))
    young = publish(manager, run_of(2, 5, 6))
    manager.forget(old[1:2])
    assert hit_ids(manager, run_of(2, 1)) == old[:1]
    with manager.allocate(manager.num_free_blocks + 1):
        assert len(cached(manager)) == 3  # the child of old[0] went first
    with manager.allocate(manager.num_free_blocks + 2):
        assert cached(manager) == {old[0]}
    assert not cached(manager) & set(young)
    check_drained(manager)


def test_the_audit_notices_a_descendant_that_was_left_behind():
    manager = BlockManagerImpl(9, 2)
    trunk = publish(manager, run_of(2, 1, 2))
    branch = publish(manager, run_of(2, 1, 2, 3))
    assert len(branch) == 3
    manager._cache._run(manager._cache.run_of[trunk[0]]).shrink(1)
    with pytest.raises(IntegrityError):
        manager.check_integrity()
