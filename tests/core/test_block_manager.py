"""The plain and the thread-safe manager: allocation, eviction, closure, reset."""

from __future__ import annotations

import numpy as np
import pytest

from raykv.core import BlockManager, BlockManagerImpl, Blocks, Namespace
from raykv.errors import ConfigError, DoubleFreeError

from .helpers import (
    check_drained,
    counters,
    hit_ids,
    num_pending,
    publish,
    run_of,
    snapshot,
    start,
)

# -- allocation ------------------------------------------------------------------------------------


def test_a_pool_of_n_blocks_has_n_minus_1_to_give(make_manager):
    manager = make_manager(8, 4)
    assert manager.num_total_blocks == manager.num_free_blocks == 7
    assert manager.allocate(8) is None
    blocks = manager.allocate(7)
    assert len(blocks) == 7
    assert manager.num_free_blocks == 0
    assert manager.allocate(1) is None
    blocks.release()


def test_fresh_ids_ascend_from_1_and_padding_0_is_never_handed_out(make_manager):
    manager = make_manager(8, 4)
    first, second = manager.allocate(3), manager.allocate(4)
    assert first.ids.tolist() == [1, 2, 3]
    assert second.ids.tolist() == [4, 5, 6, 7]
    assert manager.allocate(1) is None


def test_released_blocks_come_back_in_the_same_order(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(3)
    manager.deallocate(blocks)
    blocks.release()
    assert manager.allocate(3).ids.tolist() == [1, 2, 3]


def test_ids_of_a_grown_handle_come_back_in_its_order(make_manager):
    manager = make_manager(8, 4)
    one, two = manager.allocate(1), manager.allocate(1)
    Blocks.concat([two, one]).release()
    assert manager.allocate(2).ids.tolist() == [2, 1]


def test_the_last_block_released_is_handed_out_first(make_manager):
    manager = make_manager(8, 4)
    first, second = manager.allocate(2), manager.allocate(2)
    first.release()
    second.release()
    assert manager.allocate(4).ids.tolist() == [3, 4, 1, 2]


def test_allocating_zero_gives_an_empty_handle(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(0)
    assert len(blocks) == 0
    assert blocks.ids.dtype == np.int32
    assert manager.num_free_blocks == 7
    manager.deallocate(blocks)
    blocks.release()


def test_allocating_a_negative_number_is_refused(make_manager):
    manager = make_manager(8, 4)
    before = counters(manager)
    with pytest.raises(ValueError, match="-1"):
        manager.allocate(-1)
    assert counters(manager) == before


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (-3, 4), (8, 0), (8, -1)])
def test_impossible_sizes_are_refused(make_manager, num_blocks, block_size):
    with pytest.raises(ConfigError):
        make_manager(num_blocks, block_size)


def test_an_unknown_eviction_order_is_refused(make_manager):
    with pytest.raises(ConfigError, match="oldest_moon"):
        make_manager(8, 4, eviction="oldest_moon")


def test_managers_are_block_managers(make_manager):
    manager = make_manager(8, 4)
    assert isinstance(manager, BlockManager)
    assert isinstance(manager, BlockManagerImpl)
    assert manager.block_size == 4


def test_utilization_is_used_over_total(make_manager):
    manager = make_manager(9, 4)
    blocks = manager.allocate(2)
    assert manager.kv_cache_utilization == 0.25
    manager.deallocate(blocks)
    assert manager.kv_cache_utilization == 0
    blocks.release()


# -- deallocate and release ------------------------------------------------------------------------


def test_deallocate_lowers_the_used_count_at_once_and_release_frees(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(3)
    assert (manager.num_used_blocks, manager.num_free_blocks) == (3, 4)
    manager.deallocate(blocks)
    assert (manager.num_used_blocks, manager.num_free_blocks) == (0, 4)
    assert num_pending(manager) == 3
    blocks.release()
    assert (manager.num_used_blocks, manager.num_free_blocks) == (0, 7)


def test_release_without_deallocate_settles_the_used_count(make_manager):
    manager = make_manager(8, 4)
    manager.allocate(3).release()
    assert manager.num_used_blocks == 0
    check_drained(manager)


@pytest.mark.parametrize("last", ["sequence", "fork", "prefix cache", "copy in flight"])
def test_an_id_returns_to_the_free_list_only_with_its_last_reference(make_manager, last):
    manager = make_manager(4, 2)
    sequence = manager.allocate(1)
    fork, copy = sequence.share(), sequence.pin()
    manager.cache(run_of(2, 5), sequence)
    drop = {
        "sequence": sequence.release,
        "fork": fork.release,
        "prefix cache": manager.reset_prefix_cache,
        "copy in flight": copy.release,
    }
    final = drop.pop(last)
    for step in drop.values():
        step()
        assert manager.num_free_blocks == 2
    assert manager.num_available_blocks == (3 if last == "prefix cache" else 2)
    final()
    assert manager.num_free_blocks == 3
    assert manager.allocate(3) is not None


@pytest.mark.parametrize(
    "order",
    [
        ("cache", "deallocate", "release"),
        ("cache", "release", "deallocate"),
        ("deallocate", "cache", "release"),
        ("deallocate", "release", "cache"),
        ("release", "cache", "deallocate"),
        ("release", "deallocate", "cache"),
    ],
)
def test_order_of_cache_deallocate_and_release_does_not_matter(make_manager, order):
    manager = make_manager(8, 2)
    tokens = run_of(2, 1, 2, 3)
    blocks = manager.allocate(3)

    def deallocate():
        if "release" in order[: order.index("deallocate")]:
            with pytest.raises(DoubleFreeError):
                manager.deallocate(blocks)
        else:
            manager.deallocate(blocks)

    steps = {
        "cache": lambda: manager.cache(tokens, blocks),
        "deallocate": deallocate,
        "release": blocks.release,
    }
    for step in order:
        steps[step]()
    cached = 3 if order.index("cache") < order.index("release") else 0
    assert manager.num_blocks_in_prefix_cache == manager.num_evictable_blocks == cached
    check_drained(manager)


def test_a_second_deallocate_raises_and_changes_nothing(make_manager):
    manager = make_manager(8, 4)
    blocks, other = manager.allocate(2), manager.allocate(1)
    manager.deallocate(blocks)
    before = snapshot(manager, blocks, other)
    with pytest.raises(DoubleFreeError):
        manager.deallocate(blocks)
    assert snapshot(manager, blocks, other) == before


def test_deallocate_after_release_raises_and_changes_nothing(make_manager):
    manager = make_manager(8, 4)
    blocks, other = manager.allocate(2), manager.allocate(1)
    blocks.release()
    before = snapshot(manager, other)
    with pytest.raises(DoubleFreeError):
        manager.deallocate(blocks)
    assert snapshot(manager, other) == before


def test_deallocating_a_pin_raises_and_changes_nothing(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    pin = blocks.pin()
    before = snapshot(manager, blocks, pin)
    with pytest.raises(DoubleFreeError):
        manager.deallocate(pin)
    assert snapshot(manager, blocks, pin) == before


def test_deallocating_a_foreign_handle_is_refused(make_manager):
    mine, other = make_manager(8, 4), make_manager(8, 4)
    blocks = other.allocate(2)
    before = snapshot(other, blocks)
    with pytest.raises(ValueError):
        mine.deallocate(blocks)
    assert snapshot(other, blocks) == before
    assert mine.num_used_blocks == 0


def test_two_sharers_releasing_in_any_order_end_at_used_0(make_manager):
    for first in (0, 1):
        for deallocate_first in (True, False):
            manager = make_manager(8, 4)
            blocks = manager.allocate(3)
            sharers = [blocks, blocks.share()]
            for number, index in enumerate([first, 1 - first]):
                if deallocate_first:
                    manager.deallocate(sharers[index])
                sharers[index].release()
                assert manager.num_used_blocks == (3 if number == 0 else 0)
            check_drained(manager)


def test_one_sharers_release_never_makes_the_others_blocks_look_unused(make_manager):
    manager = make_manager(4, 4)
    blocks = manager.allocate(3)
    sharer = blocks.share()
    manager.deallocate(blocks)
    assert manager.num_used_blocks == 3
    blocks.release()
    assert manager.num_used_blocks == 3
    assert manager.kv_cache_utilization == 1
    assert manager.num_available_blocks == 0
    assert manager.allocate(1) is None
    manager.deallocate(sharer)
    assert manager.num_used_blocks == 0


# -- free: for the last reference only -------------------------------------------------------------


@pytest.mark.parametrize("block_id", [0, -1, 8, 1000])
def test_freeing_padding_or_an_unknown_id_is_refused(make_manager, block_id):
    manager = make_manager(8, 4)
    before = counters(manager)
    with pytest.raises(ValueError):
        manager.free(block_id)
    with pytest.raises(ValueError):
        manager.free_many([block_id])
    assert counters(manager) == before


def test_freeing_a_free_id_raises_and_never_lists_it_twice(make_manager):
    manager = make_manager(8, 4)
    with pytest.raises(DoubleFreeError, match="free"):
        manager.free(3)
    assert sorted(manager.allocate(7).ids.tolist()) == list(range(1, 8))


def test_freeing_a_referenced_id_raises_and_changes_nothing(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    before = snapshot(manager, blocks)
    with pytest.raises(DoubleFreeError, match="1"):
        manager.free(1)
    with pytest.raises(DoubleFreeError):
        manager.free_many([1, 2])
    assert snapshot(manager, blocks) == before


def test_freeing_a_cached_id_raises_and_changes_nothing(make_manager):
    manager = make_manager(8, 2)
    (block_id,) = publish(manager, run_of(2, 5))
    before = counters(manager)
    with pytest.raises(DoubleFreeError):
        manager.free(block_id)
    assert counters(manager) == before
    assert hit_ids(manager, run_of(2, 5)) == [block_id]


# -- eviction --------------------------------------------------------------------------------------


def test_allocate_evicts_just_enough(make_manager):
    manager = make_manager(8, 2)
    publish(manager, run_of(2, 1, 2, 3, 4))
    assert (manager.num_free_blocks, manager.num_evictable_blocks) == (3, 4)
    running = manager.allocate(2)
    assert manager.num_blocks_in_prefix_cache == 4
    more = manager.allocate(3)  # one is free, two are evicted
    assert manager.num_blocks_in_prefix_cache == manager.num_evictable_blocks == 2
    assert manager.num_evicted_blocks == 2
    assert manager.num_free_blocks == 0
    assert {int(i) for i in more.ids} == {7, 4, 3}
    running.release()


def test_allocate_evicts_nothing_while_free_blocks_suffice(make_manager):
    manager = make_manager(8, 2)
    cached = publish(manager, run_of(2, 1, 2, 3, 4))
    blocks = manager.allocate(3)
    assert set(blocks.ids.tolist()).isdisjoint(cached)
    assert manager.num_blocks_in_prefix_cache == manager.num_evictable_blocks == 4


def test_an_allocation_that_cannot_succeed_evicts_nothing_and_changes_nothing(make_manager):
    manager = make_manager(8, 2)
    old, new = run_of(2, 1, 2), run_of(2, 3)
    publish(manager, old)
    publish(manager, new)
    held = manager.allocate(2)
    before = snapshot(manager, held)
    for _ in range(3):
        assert manager.allocate(6) is None
    assert snapshot(manager, held) == before
    assert manager.allocate(5) is not None


def test_failed_allocations_do_not_change_the_order_of_eviction(make_manager):
    manager = make_manager(5, 2)
    order = [publish(manager, run_of(2, mark))[0] for mark in (1, 2, 3, 4)]
    victims = []
    kept = []
    for _ in order:
        assert manager.allocate(5) is None
        kept.append(manager.allocate(1))
        victims += kept[-1].ids.tolist()
    assert victims == order


def test_referenced_blocks_are_never_evicted(make_manager):
    manager = make_manager(7, 2)
    publish(manager, run_of(2, 1, 2))
    publish(manager, run_of(2, 3, 4))
    held = manager.allocate_shared(run_of(2, 1, 2))
    assert manager.num_available_blocks == 4
    assert manager.allocate(5) is None
    rest = manager.allocate(4)
    assert set(rest.ids.tolist()).isdisjoint(held.ids.tolist())
    assert hit_ids(manager, run_of(2, 1, 2)) == held.ids.tolist()


def test_pinned_blocks_are_never_evicted(make_manager):
    manager = make_manager(4, 2)
    blocks = start(manager, run_of(2, 1, 2))
    manager.cache(run_of(2, 1, 2), blocks)
    pin = blocks.pin()
    manager.deallocate(blocks)
    blocks.release()
    assert manager.num_used_blocks == 0
    assert manager.num_available_blocks == 1
    assert manager.allocate(2) is None
    pin.release()
    assert manager.allocate(3) is not None


def test_eviction_is_lru_by_release_not_by_allocation(make_manager):
    manager = make_manager(4, 2)
    handles = []
    for mark in (1, 2, 3):
        handles.append(start(manager, run_of(2, mark)))
        manager.cache(run_of(2, mark), handles[-1])
    for index in (1, 2, 0):
        handles[index].release()
    kept = [manager.allocate(1) for _ in range(3)]
    assert [block.ids.tolist() for block in kept] == [[2], [3], [1]]


def test_within_a_chain_the_deepest_block_goes_first(make_manager):
    manager = make_manager(5, 2)
    chain = publish(manager, run_of(2, 1, 2, 3, 4))
    kept = [manager.allocate(1) for _ in chain]
    assert [block.ids[0] for block in kept] == chain[::-1]


def test_a_match_refreshes_recency(make_manager):
    manager = make_manager(4, 2)
    one, two, three = (publish(manager, run_of(2, mark))[0] for mark in (1, 2, 3))
    assert hit_ids(manager, run_of(2, 1)) == [one]
    kept = [manager.allocate(1) for _ in range(3)]
    assert [int(block.ids[0]) for block in kept] == [two, three, one]


def test_matching_a_part_of_a_chain_refreshes_that_part_only(make_manager):
    manager = make_manager(6, 2)
    chain = publish(manager, run_of(2, 1, 2, 3, 4))
    (other,) = publish(manager, run_of(2, 9))
    assert hit_ids(manager, run_of(2, 1, 2)) == chain[:2]
    kept = [manager.allocate(1) for _ in range(5)]
    expected = [chain[3], chain[2], other, chain[1], chain[0]]
    assert [int(block.ids[0]) for block in kept] == expected


def test_a_long_generation_after_a_hit_is_evicted_from_its_end(make_manager):
    manager = make_manager(8, 2)
    publish(manager, run_of(2, 1, 2))
    chain = publish(manager, run_of(2, 1, 2, 3, 4, 5, 6, 7))
    kept = [manager.allocate(1) for _ in chain]
    assert [int(block.ids[0]) for block in kept] == chain[::-1]


def test_of_two_branches_the_older_goes_first_and_the_trunk_last(make_manager):
    manager = make_manager(7, 2)
    first = publish(manager, run_of(2, 1, 2, 3, 4))
    second = publish(manager, run_of(2, 1, 2, 5, 6))
    assert second[:2] == first[:2]
    kept = [manager.allocate(1) for _ in range(6)]
    expected = [first[3], first[2], second[3], second[2], first[1], first[0]]
    assert [int(block.ids[0]) for block in kept] == expected


def test_a_parent_is_never_evicted_before_its_child_after_reinsertion(make_manager):
    manager = make_manager(5, 2)
    tokens = run_of(2, 1, 2, 3, 4)
    publish(manager, tokens)
    manager.allocate(2).release()  # the chain shrinks from its end
    assert hit_ids(manager, tokens) == [1, 2]
    chain = publish(manager, tokens)  # and grows again
    kept = [manager.allocate(1) for _ in chain]
    assert [int(block.ids[0]) for block in kept] == chain[::-1]


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_the_same_prefix_computed_twice_side_by_side_keeps_its_closure(make_manager, first_to_go):
    manager = make_manager(9, 2)
    common, tokens = run_of(2, 1, 2), [run_of(2, 1, 2, mark) for mark in (3, 4)]
    twins = [manager.allocate(3), manager.allocate(3)]
    assert manager.cache(tokens[0], twins[0]) == 3
    assert manager.cache(tokens[1], twins[1]) == 1  # its tail now hangs below the other's prefix
    first, second = twins[first_to_go], twins[1 - first_to_go]
    second_ids = second.ids.tolist()
    manager.deallocate(first)
    first.release()
    held = manager.num_available_blocks
    assert manager.allocate(held + 1) is None
    taken = manager.allocate(held)
    assert set(taken.ids.tolist()).isdisjoint({1, 2, *second_ids})
    assert hit_ids(manager, tokens[1 - first_to_go]) == [1, 2, second_ids[2]]
    taken.release()
    second.release()
    assert hit_ids(manager, common) == [1, 2]
    kept = []
    while (block := manager.allocate(1)) is not None:
        kept.append(block)
    order = [int(block.ids[0]) for block in kept]
    assert order.index(2) < order.index(1)
    assert order.index(second_ids[2]) < order.index(2)
    del kept, block
    check_drained(manager)


def test_a_freed_or_evicted_block_carries_nothing_of_its_old_identity(make_manager):
    manager = make_manager(4, 2)
    old = run_of(2, 1, 2, 3)
    publish(manager, old)
    with manager.allocate(3) as reused:  # evicts all three
        assert reused.ref_counts.tolist() == [1, 1, 1]
        assert [block.hash_value for block in reused] == [None] * 3
        assert [block.is_shared for block in reused] == [False] * 3
        assert hit_ids(manager, old) == []
        assert manager.cache(run_of(2, 7, 8, 9), reused) == 3
        assert hit_ids(manager, old) == []
        assert hit_ids(manager, run_of(2, 7, 8, 9)) == reused.ids.tolist()


# -- prefix cache through the manager --------------------------------------------------------------


def test_a_match_lists_the_published_ids_and_owns_a_reference_to_each(make_manager):
    manager = make_manager(8, 2)
    tokens = run_of(2, 1, 2, 3)
    ids = publish(manager, tokens)
    hit = manager.allocate_shared(tokens)
    assert hit.ids.tolist() == ids
    assert hit.ref_counts.tolist() == [2, 2, 2]
    assert manager.num_used_blocks == 3
    assert manager.num_evictable_blocks == 0
    again = manager.allocate_shared(tokens)
    assert hit.ref_counts.tolist() == again.ref_counts.tolist() == [3, 3, 3]
    assert manager.num_used_blocks == 3


def test_only_full_blocks_are_published_and_matched(make_manager):
    manager = make_manager(8, 4)
    tokens = list(range(11))
    blocks = manager.allocate(3)
    assert manager.cache(tokens, blocks) == 2
    assert hit_ids(manager, tokens) == [1, 2]
    assert hit_ids(manager, tokens[:8]) == [1, 2]
    assert hit_ids(manager, tokens[:7]) == [1]
    assert hit_ids(manager, tokens[:3]) == []
    assert hit_ids(manager, []) == []


def test_publishing_is_clamped_to_the_blocks_of_the_handle(make_manager):
    manager = make_manager(8, 2)
    blocks = manager.allocate(2)
    assert manager.cache(run_of(2, 1, 2, 3, 4), blocks) == 2
    assert hit_ids(manager, run_of(2, 1, 2, 3, 4)) == [1, 2]


def test_content_already_cached_is_not_cached_twice(make_manager):
    manager = make_manager(8, 2)
    tokens = run_of(2, 1, 2)
    twins = [manager.allocate(2), manager.allocate(2)]
    assert manager.cache(tokens, twins[0]) == 2
    assert manager.cache(tokens, twins[1]) == 0
    assert manager.num_blocks_in_prefix_cache == 2
    assert hit_ids(manager, tokens) == [1, 2]
    twins[1].release()
    assert manager.num_free_blocks == 5


def test_reinserting_changes_no_count(make_manager):
    manager = make_manager(8, 2)
    tokens = run_of(2, 1, 2, 3)
    blocks = manager.allocate(3)
    assert manager.cache(tokens, blocks) == 3
    before = snapshot(manager, blocks)
    for num_tokens in (6, 4, 2, 0):
        assert manager.cache(tokens[:num_tokens], blocks) == 0
    assert snapshot(manager, blocks) == before


def test_publishing_piece_by_piece_equals_publishing_at_once(make_manager):
    manager = make_manager(8, 2)
    tokens = run_of(2, 1, 2, 3, 4)
    blocks = manager.allocate(4)
    assert [manager.cache(tokens[:n], blocks) for n in (1, 2, 5, 6, 8)] == [0, 1, 1, 1, 1]
    assert hit_ids(manager, tokens) == [1, 2, 3, 4]


@pytest.mark.parametrize("hint", [0, 1, 2, 5])
def test_the_hint_of_existing_shared_blocks_changes_nothing(make_manager, hint):
    manager = make_manager(8, 2)
    tokens = run_of(2, 1, 2, 3)
    publish(manager, tokens[:4])
    blocks = start(manager, tokens)
    assert manager.cache(tokens, blocks, num_existing_shared=hint) == 1
    assert hit_ids(manager, tokens) == [1, 2, 3]


def test_a_match_starts_at_token_0_only(make_manager):
    manager = make_manager(8, 2)
    publish(manager, run_of(2, 1, 2, 3))
    assert hit_ids(manager, run_of(2, 2, 3)) == []
    assert hit_ids(manager, run_of(2, 3)) == []
    assert hit_ids(manager, [9, *run_of(2, 1, 2, 3)]) == []


@pytest.mark.parametrize("position", range(12))
def test_one_different_token_ends_the_match_at_its_block(make_manager, position):
    manager = make_manager(8, 2)
    tokens = list(range(100, 112))
    publish(manager, tokens)
    tokens[position] += 1
    assert len(hit_ids(manager, tokens)) == position // 2


def test_a_branch_in_the_middle_of_a_run_matches_both_ways(make_manager):
    manager = make_manager(12, 2)
    trunk = publish(manager, run_of(2, 1, 2, 3, 4))
    branch = publish(manager, run_of(2, 1, 2, 8, 9))
    assert branch[:2] == trunk[:2]
    assert set(branch[2:]).isdisjoint(trunk)
    assert hit_ids(manager, run_of(2, 1, 2, 3, 4)) == trunk
    assert hit_ids(manager, run_of(2, 1, 2, 8, 9)) == branch
    assert hit_ids(manager, run_of(2, 1, 2, 8, 4)) == branch[:3]


def test_a_run_that_shrank_and_grew_differently_offers_no_stale_tail(make_manager):
    manager = make_manager(5, 2)
    publish(manager, run_of(2, 1, 2, 3, 4))
    manager.allocate(3).release()
    assert hit_ids(manager, run_of(2, 1, 2, 3, 4)) == [1]
    other = publish(manager, run_of(2, 1, 7, 8))
    assert hit_ids(manager, run_of(2, 1, 2, 3, 4)) == [1]
    assert hit_ids(manager, run_of(2, 1, 7, 3)) == other[:2]
    assert hit_ids(manager, run_of(2, 1, 7, 8)) == other


def test_the_caller_may_change_the_token_array_after_publishing(make_manager):
    manager = make_manager(8, 2)
    buffer = np.array(run_of(2, 1, 2), np.int32)
    blocks = manager.allocate(2)
    manager.cache(buffer, blocks)
    buffer[:] = 7
    assert hit_ids(manager, run_of(2, 1, 2)) == [1, 2]
    assert hit_ids(manager, buffer) == []
    buffer[:] = run_of(2, 1, 2)
    hit = manager.allocate_shared(buffer)
    buffer[:] = 9
    assert hit.ids.tolist() == [1, 2]
    assert hit_ids(manager, buffer) == []


def test_the_caller_may_change_the_token_array_while_a_run_grows(make_manager):
    manager = make_manager(8, 2)
    buffer = np.array(run_of(2, 1, 2, 3, 4), np.int32)
    blocks = manager.allocate(4)
    for num_tokens in (2, 4, 8):
        manager.cache(buffer[:num_tokens], blocks)
    buffer[:] = 0
    assert hit_ids(manager, run_of(2, 1, 2, 3, 4)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: np.array(tokens, np.uint16),
        lambda tokens: np.array(tokens * 2, np.int32).reshape(2, -1).T[:, 0],
    ],
)
def test_tokens_may_be_any_sequence_of_ints(make_manager, convert):
    manager = make_manager(8, 2)
    tokens = run_of(2, 1, 2, 3)
    assert manager.cache(convert(tokens), manager.allocate(3)) == 3
    manager.allocate_shared(convert(tokens)).release()
    assert hit_ids(manager, tokens) == [1, 2, 3]


@pytest.mark.parametrize("bad", [[1.5, 2.5], [[1, 2], [3, 4]], [2**31, 0], ["a", "b"]])
def test_what_is_no_row_of_token_ids_is_refused_and_changes_nothing(make_manager, bad):
    manager = make_manager(8, 2)
    blocks = manager.allocate(2)
    before = snapshot(manager, blocks)
    with pytest.raises(ValueError):
        manager.cache(bad, blocks)
    with pytest.raises(ValueError):
        manager.allocate_shared(bad)
    with pytest.raises(ValueError):
        manager.prefix_hashes(bad)
    assert snapshot(manager, blocks) == before


def test_publishing_an_id_under_other_tokens_is_refused_and_changes_nothing(make_manager):
    manager = make_manager(8, 2)
    blocks = manager.allocate(3)
    manager.cache(run_of(2, 1, 2), blocks[:2])
    before = snapshot(manager, blocks)
    with pytest.raises(ValueError):
        manager.cache(run_of(2, 5, 6), blocks)
    with pytest.raises(ValueError):  # block 3 could be new, but block 1 stands elsewhere
        manager.cache(run_of(2, 5, 6), Blocks.concat([blocks[2:], blocks[:1]]))
    assert snapshot(manager, blocks) == before
    assert hit_ids(manager, run_of(2, 5)) == []


def test_publishing_one_id_as_two_blocks_is_refused_and_changes_nothing(make_manager):
    manager = make_manager(8, 2)
    blocks = manager.allocate(1)
    twice = Blocks.concat([blocks.share(), blocks.share()])
    before = snapshot(manager, blocks, twice)
    with pytest.raises(ValueError):
        manager.cache(run_of(2, 5, 6), twice)
    assert snapshot(manager, blocks, twice) == before
    assert hit_ids(manager, run_of(2, 5)) == []


def test_publishing_a_foreign_handle_is_refused(make_manager):
    mine, other = make_manager(8, 2), make_manager(8, 2)
    blocks = other.allocate(2)
    with pytest.raises(ValueError):
        mine.cache(run_of(2, 1, 2), blocks)
    with pytest.raises(ValueError):
        mine.allocate_shared(run_of(2, 1, 2), existing=blocks)
    assert mine.num_blocks_in_prefix_cache == other.num_blocks_in_prefix_cache == 0


def test_publishing_a_released_handle_publishes_nothing(make_manager):
    manager = make_manager(8, 2)
    blocks = manager.allocate(2)
    blocks.release()
    assert manager.cache(run_of(2, 1, 2), blocks) == 0
    assert manager.num_blocks_in_prefix_cache == 0
    assert manager.num_free_blocks == 7


def test_without_a_prefix_cache_nothing_is_published_or_matched(make_manager):
    manager = make_manager(8, 2, enable_prefix_cache=False)
    blocks = manager.allocate(2)
    assert manager.cache(run_of(2, 1, 2), blocks) == 0
    assert len(manager.allocate_shared(run_of(2, 1, 2))) == 0
    existing = manager.allocate_shared(run_of(2, 1, 2), existing=blocks)
    assert existing.ids.tolist() == [1, 2]
    assert manager.reset_prefix_cache() == 0
    existing.release()
    blocks.release()
    assert manager.num_free_blocks == 7


def test_with_existing_its_ids_come_first_then_what_the_cache_holds_beyond(make_manager):
    manager = make_manager(12, 2)
    tokens = run_of(2, 1, 2, 3, 4)
    cached = publish(manager, tokens)
    own = manager.allocate(2)  # computed by itself, side by side
    longer = manager.allocate_shared(tokens, existing=own)
    assert longer.ids.tolist() == own.ids.tolist() + cached[2:]
    assert own.ref_counts.tolist() == [2, 2]
    assert len(own) == 2  # the caller still owns it
    own.release()
    assert longer.ref_counts.tolist() == [1, 1, 2, 2]


def test_with_existing_beyond_the_match_the_result_is_existing(make_manager):
    manager = make_manager(12, 2)
    publish(manager, run_of(2, 1))
    own = manager.allocate(3)
    again = manager.allocate_shared(run_of(2, 1, 2, 3), existing=own)
    assert again.ids.tolist() == own.ids.tolist()
    assert manager.num_used_blocks == 3
    assert own.ref_counts.tolist() == [2, 2, 2]


# -- closure ---------------------------------------------------------------------------------------


def test_a_handle_sliced_in_its_middle_keeps_the_blocks_before_it(make_manager):
    manager = make_manager(6, 2)
    tokens = run_of(2, 1, 2, 3, 4, 5)
    blocks = start(manager, tokens)
    manager.cache(tokens, blocks)
    middle = blocks[2:3]
    blocks.release()
    assert manager.num_evictable_blocks == 2  # 4 and 5; 1 and 2 are ancestors of 3
    assert manager.num_used_blocks == 1
    assert num_pending(manager) == 2
    assert manager.allocate(3) is None
    taken = manager.allocate(2)
    assert sorted(taken.ids.tolist()) == [4, 5]
    assert hit_ids(manager, tokens) == [1, 2, 3]
    middle.release()
    assert manager.num_evictable_blocks == 3


def test_a_shared_part_released_before_the_tail_is_kept_while_the_tail_is(make_manager):
    manager = make_manager(5, 2)
    tokens = run_of(2, 1, 2, 3, 4)
    blocks = start(manager, tokens)
    manager.cache(tokens, blocks)
    head, tail = blocks[:2], blocks[2:]
    blocks.release()
    head.release()
    assert manager.num_evictable_blocks == 0
    assert manager.allocate(1) is None
    tail.release()
    assert manager.num_evictable_blocks == 4
    kept = [manager.allocate(1) for _ in range(4)]
    assert [int(block.ids[0]) for block in kept] == [4, 3, 2, 1]


def test_a_tail_published_beneath_anothers_blocks_keeps_them(make_manager):
    """A full repeat: the second sequence references none of the blocks above its tail."""
    manager = make_manager(8, 2)
    first = start(manager, run_of(2, 1, 2, 3))
    second = manager.allocate(4)
    manager.cache(run_of(2, 1, 2, 3), first)
    first_ids = first.ids.tolist()
    assert manager.cache(run_of(2, 1, 2, 3, 4), second) == 1
    first.release()
    assert manager.num_evictable_blocks == 0
    assert manager.allocate(1) is None
    assert hit_ids(manager, run_of(2, 1, 2, 3, 4)) == [*first_ids, 7]
    tail = second[3:]
    second.release()
    assert manager.num_evictable_blocks == 0
    assert manager.num_free_blocks == 3
    tail.release()
    assert manager.num_evictable_blocks == 4


def test_a_full_repeat_does_not_keep_anothers_blocks(make_manager):
    manager = make_manager(5, 2)
    tokens = run_of(2, 1, 2)
    first, second = manager.allocate(2), manager.allocate(2)
    manager.cache(tokens, first)
    manager.cache(tokens, second)
    first.release()
    assert manager.num_evictable_blocks == 2
    taken = manager.allocate(2)
    assert taken.ids.tolist() in ([1, 2], [2, 1])


def test_closure_reaches_through_several_branches(make_manager):
    manager = make_manager(12, 2)
    publish(manager, run_of(2, 1, 2, 3))
    publish(manager, run_of(2, 1, 2, 4, 5))
    publish(manager, run_of(2, 1, 2, 4, 6, 7))
    full = manager.allocate_shared(run_of(2, 1, 2, 4, 6, 7))
    leaf = full[4:]
    full_ids = full.ids.tolist()
    full.release()
    rest = manager.allocate(manager.num_available_blocks)
    assert set(rest.ids.tolist()).isdisjoint(full_ids)
    assert hit_ids(manager, run_of(2, 1, 2, 4, 6, 7)) == full_ids
    leaf.release()
    assert manager.num_evictable_blocks == 5


def test_ancestors_become_evictable_in_the_release_of_their_last_descendant(make_manager):
    manager = make_manager(6, 2)
    chain = publish(manager, run_of(2, 1, 2, 3))
    full = manager.allocate_shared(run_of(2, 1, 2, 3))
    tail = full[2:]
    full.release()  # 1 and 2 have no reference any more, but 3 has
    (other,) = publish(manager, run_of(2, 9))  # released after them, before the tail
    tail.release()
    kept = [manager.allocate(1) for _ in range(5)]  # the first one is free
    assert [int(block.ids[0]) for block in kept[1:]] == [other, *chain[::-1]]


# -- reset -----------------------------------------------------------------------------------------


def test_reset_forgets_every_entry_and_returns_their_number(make_manager):
    manager = make_manager(8, 2)
    publish(manager, run_of(2, 1, 2))
    publish(manager, run_of(2, 1, 3), namespace=Namespace(tenant="a"))
    assert manager.reset_prefix_cache() == 4
    assert manager.num_blocks_in_prefix_cache == 0
    assert manager.num_free_blocks == 7
    assert hit_ids(manager, run_of(2, 1, 2)) == []
    assert manager.reset_prefix_cache() == 0


def test_reset_leaves_running_sequences_undisturbed(make_manager):
    manager = make_manager(8, 2)
    tokens = run_of(2, 1, 2, 3)
    running = start(manager, tokens)
    manager.cache(tokens, running)
    publish(manager, run_of(2, 9))
    assert manager.reset_prefix_cache() == 4
    assert running.ids.tolist() == [1, 2, 3]
    assert running.ref_counts.tolist() == [1, 1, 1]
    assert manager.num_used_blocks == 3
    assert manager.num_free_blocks == 4
    manager.deallocate(running)
    running.release()
    check_drained(manager)


def test_nothing_computed_before_a_reset_is_ever_matched_again(make_manager):
    manager = make_manager(12, 2)
    tokens = run_of(2, 1, 2, 3, 4)
    published, unpublished = start(manager, tokens), manager.allocate(4)
    manager.cache(tokens, published)
    manager.reset_prefix_cache()
    assert hit_ids(manager, tokens) == []
    for blocks in (published, unpublished):
        assert manager.cache(tokens, blocks) == 0
        assert manager.cache(tokens, blocks.share()) == 0
        assert manager.cache(tokens, blocks[:2]) == 0
    assert hit_ids(manager, tokens) == []


def test_what_a_sequence_across_a_reset_computes_later_is_not_matched_either(make_manager):
    manager = make_manager(12, 2)
    tokens = run_of(2, 1, 2, 3, 4)
    running = manager.allocate(2)
    manager.reset_prefix_cache()
    running = Blocks.concat([running, manager.allocate(2)])  # computed on top of stale blocks
    assert manager.cache(tokens, running) == 0
    assert hit_ids(manager, tokens) == []
    assert manager.num_blocks_in_prefix_cache == 0


def test_a_stale_sequence_publishes_nothing_below_a_fresh_copy_of_its_prefix(make_manager):
    manager = make_manager(12, 2)
    stale = manager.allocate(2)
    manager.reset_prefix_cache()
    fresh = publish(manager, run_of(2, 1, 2))
    stale = Blocks.concat([stale, manager.allocate(1)])
    assert manager.cache(run_of(2, 1, 2, 3), stale) == 0
    assert hit_ids(manager, run_of(2, 1, 2, 3)) == fresh


def test_only_what_stands_before_the_first_stale_block_is_published(make_manager):
    manager = make_manager(12, 2)
    tokens = run_of(2, 1, 2, 3, 4)
    stale = manager.allocate(1)
    manager.reset_prefix_cache()
    mixed = Blocks.concat([manager.allocate(2), stale, manager.allocate(1)])
    assert manager.cache(tokens, mixed) == 2
    assert hit_ids(manager, tokens) == mixed.ids.tolist()[:2]
    assert manager.cache(tokens, mixed) == 0


def test_ids_freed_after_a_reset_may_be_published_again(make_manager):
    manager = make_manager(4, 2)
    tokens = run_of(2, 1, 2, 3)
    running = start(manager, tokens)
    manager.reset_prefix_cache()
    running.release()
    assert publish(manager, tokens) == [1, 2, 3]
    assert hit_ids(manager, tokens) == [1, 2, 3]


def test_reset_frees_blocks_that_only_their_descendants_kept(make_manager):
    manager = make_manager(6, 2)
    publish(manager, run_of(2, 1, 2, 3))
    full = manager.allocate_shared(run_of(2, 1, 2, 3))
    tail = full[2:]
    full.release()
    assert manager.num_free_blocks == 2
    assert manager.reset_prefix_cache() == 3
    assert manager.num_free_blocks == 4
    tail.release()
    assert manager.num_free_blocks == 5


# -- prefix hashes ---------------------------------------------------------------------------------


def test_prefix_hashes_name_full_blocks_of_the_tokens(make_manager):
    manager = make_manager(8, 4, hash_seed=b"seed")
    names = manager.prefix_hashes(range(11))
    assert len(names) == 2
    assert all(isinstance(name, bytes) and len(name) == 16 for name in names)
    assert names == manager.prefix_hashes(np.arange(8, dtype=np.int32))


def test_a_cached_block_knows_its_prefix_hash_and_others_do_not(make_manager):
    manager = make_manager(8, 2, hash_seed=b"seed")
    tokens = run_of(2, 1, 2, 3)
    blocks = manager.allocate(3)
    assert [block.hash_value for block in blocks] == [None] * 3
    manager.cache(tokens[:4], blocks)
    assert [block.hash_value for block in blocks] == [*manager.prefix_hashes(tokens[:4]), None]
