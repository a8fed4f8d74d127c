"""Admission of a whole list: all or nothing, hits held before anything is evicted."""

from __future__ import annotations

import pytest

from raykv.core import AdmitRequest

from .helpers import check_drained, counters, hit_ids, publish, run_of, snapshot


def ids_of(granted):
    return [one.block_ids.tolist() for one in granted]


def test_each_request_gets_its_hit_and_fresh_blocks_behind_it(make_manager):
    manager = make_manager(12, 2)
    cached = publish(manager, run_of(2, 1, 2, 3))
    granted = manager.admit(
        [
            AdmitRequest(4, run_of(2, 1, 2, 9)),
            AdmitRequest(2),
            AdmitRequest(3, run_of(2, 1, 2, 3)),
            AdmitRequest(0),
        ]
    )
    assert [one.num_shared for one in granted] == [2, 0, 3, 0]
    assert ids_of(granted) == [[*cached[:2], 4, 5], [6, 7], cached, []]
    assert manager.num_used_blocks == 7
    handles = [manager.adopt(one.block_ids) for one in granted]
    assert handles[0].ref_counts.tolist() == [3, 3, 1, 1]
    for handle in handles:
        manager.deallocate(handle)
        handle.release()
    check_drained(manager)


def test_a_hit_is_cut_to_the_blocks_asked_for(make_manager):
    manager = make_manager(12, 2)
    cached = publish(manager, run_of(2, 1, 2, 3))
    (granted,) = manager.admit([AdmitRequest(2, run_of(2, 1, 2, 3))])
    assert granted.block_ids.tolist() == cached[:2]
    manager.adopt(granted.block_ids).release()


def test_a_list_that_does_not_fit_changes_nothing(make_manager):
    manager = make_manager(8, 2)
    old, new = publish(manager, run_of(2, 1, 2)), publish(manager, run_of(2, 3))
    held = manager.allocate(2)
    before = snapshot(manager, held)
    for requests in (
        [AdmitRequest(2, run_of(2, 1, 2)), AdmitRequest(4)],
        [AdmitRequest(6)],
        [AdmitRequest(1), AdmitRequest(5)],
    ):
        assert manager.admit(requests) is None
        assert snapshot(manager, held) == before
    kept = [manager.allocate(1) for _ in range(5)]
    order = [int(block.ids[0]) for block in kept[2:]]
    assert order == [old[1], old[0], new[0]]  # the failures did not refresh what they matched


def test_hits_of_the_whole_list_are_held_before_anything_is_evicted_for_it(make_manager):
    manager = make_manager(7, 2)
    wanted = publish(manager, run_of(2, 1, 2))  # the oldest: what eviction would take first
    publish(manager, run_of(2, 3, 4))
    granted = manager.admit([AdmitRequest(4), AdmitRequest(2, run_of(2, 1, 2))])
    assert granted[1].block_ids.tolist() == wanted
    assert set(granted[0].block_ids.tolist()).isdisjoint(wanted)
    assert manager.num_available_blocks == 0
    handles = [manager.adopt(one.block_ids) for one in granted]
    assert hit_ids(manager, run_of(2, 1, 2)) == wanted
    del handles
    check_drained(manager)


def test_equal_prompts_of_one_list_count_their_hit_once(make_manager):
    manager = make_manager(6, 2)
    cached = publish(manager, run_of(2, 1, 2, 3))
    granted = manager.admit([AdmitRequest(4, run_of(2, 1, 2, 3)) for _ in range(2)])
    assert ids_of(granted) == [[*cached, 4], [*cached, 5]]
    assert manager.num_used_blocks == 5
    for one in granted:
        manager.adopt(one.block_ids).release()
    check_drained(manager)


def test_an_empty_list_is_admitted(make_manager):
    manager = make_manager(6, 2)
    before = counters(manager)
    assert manager.admit([]) == []
    assert counters(manager) == before


@pytest.mark.parametrize("sizes", [[-1], [2, -1], [-2, 5]])
def test_negative_sizes_are_refused_and_change_nothing(make_manager, sizes):
    manager = make_manager(8, 2)
    before = counters(manager)
    with pytest.raises(ValueError):
        manager.admit([AdmitRequest(size) for size in sizes])
    assert counters(manager) == before


def test_tokens_that_are_none_are_refused_and_change_nothing(make_manager):
    manager = make_manager(8, 2)
    publish(manager, run_of(2, 1))
    before = counters(manager)
    with pytest.raises(ValueError):
        manager.admit([AdmitRequest(2, run_of(2, 1)), AdmitRequest(2, [1.5, 2.5])])
    assert counters(manager) == before
