"""Handles: sharing, pinning, slicing, joining, releasing; and the borrowed view of one block."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from raykv.core import Block, BlockManagerImpl, Blocks
from raykv.errors import DoubleFreeError

from .helpers import check_drained, counters, num_pending, publish, run_of, snapshot


def test_a_handle_is_a_sequence_of_blocks(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(3)
    assert len(blocks) == 3
    assert [block.id for block in blocks] == [1, 2, 3]
    assert isinstance(blocks[0], Block)
    assert (blocks[1].id, blocks[-1].id) == (2, 3)
    assert (blocks.block_size, blocks[0].block_size) == (4, 4)
    assert blocks.manager is blocks[0].manager is manager
    with pytest.raises(IndexError):
        blocks[3]


def test_ids_are_read_only_int32(make_manager):
    blocks = make_manager(8, 4).allocate(3)
    assert blocks.ids.dtype == np.int32
    with pytest.raises(ValueError):
        blocks.ids[0] = 7


def test_ref_counts_are_live_handles_plus_one_where_cached(make_manager):
    manager = make_manager(8, 2)
    blocks = manager.allocate(3)
    assert blocks.ref_counts.dtype == np.int32
    assert blocks.ref_counts.tolist() == [1, 1, 1]
    manager.cache(run_of(2, 1, 2), blocks)
    assert blocks.ref_counts.tolist() == [2, 2, 1]
    with blocks.share(), blocks.pin():
        assert blocks.ref_counts.tolist() == [4, 4, 3]
    tail = blocks[1:]
    assert blocks.ref_counts.tolist() == [2, 3, 2]
    assert tail.ref_counts.tolist() == [3, 2]


def test_the_ancestors_that_a_block_keeps_do_not_show_in_ref_counts(make_manager):
    manager = make_manager(8, 2)
    blocks = manager.allocate(3)
    manager.cache(run_of(2, 1, 2, 3), blocks)
    tail = blocks[2:]
    views = list(blocks)
    blocks.release()
    assert [block.ref_count for block in views] == [1, 1, 2]
    tail.release()


def test_share_is_one_more_owner(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    other = blocks.share()
    assert other.ids.tolist() == blocks.ids.tolist()
    assert manager.num_used_blocks == 2
    blocks.release()
    assert (manager.num_used_blocks, manager.num_free_blocks) == (2, 5)
    manager.deallocate(other)
    assert manager.num_used_blocks == 0
    other.release()
    assert manager.num_free_blocks == 7


def test_a_pin_is_a_reference_that_is_no_use(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    pin = blocks.pin()
    blocks.release()
    assert manager.num_used_blocks == 0
    assert manager.num_free_blocks == 5
    assert num_pending(manager) == 2
    assert pin.ref_counts.tolist() == [1, 1]
    pin.release()
    assert manager.num_free_blocks == 7


@pytest.mark.parametrize("how", ["share", "pin", "slice"])
@pytest.mark.parametrize("of", ["pin", "deallocated"])
def test_whatever_is_made_of_a_pin_or_a_deallocated_handle_is_a_pin(make_manager, how, of):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    if of == "pin":
        held = blocks.pin()
        blocks.release()
    else:
        held = blocks
        manager.deallocate(blocks)
    made = held[:] if how == "slice" else getattr(held, how)()
    assert manager.num_used_blocks == 0
    assert made.ref_counts.tolist() == [2, 2]
    with pytest.raises(DoubleFreeError):
        manager.deallocate(made)
    held.release()
    assert manager.num_free_blocks == 5
    made.release()
    check_drained(manager)


@pytest.mark.parametrize("how", ["share", "pin", "slice"])
def test_whatever_is_made_of_a_released_handle_is_empty(make_manager, how):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    blocks.release()
    made = blocks[:] if how == "slice" else getattr(blocks, how)()
    assert len(made) == 0
    made.release()
    check_drained(manager)


def test_a_slice_is_a_new_owner(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(5)
    middle, none, stepped = blocks[1:3], blocks[3:3], blocks[::-2]
    assert middle.ids.tolist() == [2, 3]
    assert len(none) == 0
    assert stepped.ids.tolist() == [5, 3, 1]
    assert blocks.ref_counts.tolist() == [2, 2, 3, 1, 2]
    blocks.release()
    assert manager.num_used_blocks == 4
    assert manager.num_free_blocks == 3
    for handle in (middle, none, stepped):
        handle.release()
    check_drained(manager)


def test_release_is_idempotent_and_leaves_an_empty_handle(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(3)
    other = blocks.share()
    for _ in range(3):
        blocks.release()
        assert len(blocks) == 0
        assert blocks.ids.tolist() == blocks.ref_counts.tolist() == []
        assert list(blocks) == []
        assert other.ref_counts.tolist() == [1, 1, 1]
        assert manager.num_used_blocks == 3


def test_ids_read_before_a_release_stay_readable(make_manager):
    blocks = make_manager(8, 4).allocate(3)
    ids = blocks.ids
    blocks.release()
    assert ids.tolist() == [1, 2, 3]


def test_with_releases_on_exit_and_on_error(make_manager):
    manager = make_manager(8, 4)
    with manager.allocate(2) as blocks:
        assert manager.num_used_blocks == len(blocks) == 2
    assert manager.num_free_blocks == 7
    with pytest.raises(KeyError), manager.allocate(2):
        raise KeyError
    assert manager.num_free_blocks == 7


def test_a_dropped_handle_is_released(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    del blocks
    assert (manager.num_used_blocks, manager.num_free_blocks) == (0, 7)


def test_concat_takes_over_the_references(make_manager):
    manager = make_manager(8, 4)
    parts = [manager.allocate(2), manager.allocate(0), manager.allocate(3)]
    joined = Blocks.concat(parts)
    assert joined.ids.tolist() == [1, 2, 3, 4, 5]
    assert joined.ref_counts.tolist() == [1, 1, 1, 1, 1]
    assert [len(part) for part in parts] == [0, 0, 0]
    for part in parts:
        part.release()
        with pytest.raises(DoubleFreeError):
            manager.deallocate(part)
    assert manager.num_used_blocks == 5
    joined.release()
    check_drained(manager)


def test_concat_of_one_handle_moves_it(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    moved = Blocks.concat([blocks])
    assert moved.ids.tolist() == [1, 2]
    assert len(blocks) == 0
    moved.release()
    check_drained(manager)


@pytest.mark.parametrize("way", ["deallocate then release", "release", "drop"])
def test_a_handle_that_lists_an_id_several_times_counts_it_so(make_manager, way):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    joined = Blocks.concat([blocks.share(), blocks[1:], blocks[:1], blocks.share()])
    assert joined.ids.tolist() == [1, 2, 2, 1, 1, 2]
    assert joined.ref_counts.tolist() == [4] * 6
    again, pin, part = joined.share(), joined.pin(), joined[1:3]
    assert blocks.ref_counts.tolist() == [10, 12]
    assert manager.num_used_blocks == 2
    again.release()
    pin.release()
    part.release()
    assert blocks.ref_counts.tolist() == [4, 4]
    if way == "deallocate then release":
        manager.deallocate(joined)
        assert manager.num_used_blocks == 2
    if way != "drop":
        joined.release()
    del joined
    assert blocks.ref_counts.tolist() == [1, 1]
    assert manager.num_used_blocks == 2
    blocks.release()
    check_drained(manager)


def test_concat_of_uses_and_pins_is_refused_and_changes_nothing(make_manager):
    manager = make_manager(8, 4)
    use, other = manager.allocate(2), manager.allocate(1)
    pin = use.pin()
    before = snapshot(manager, use, other, pin)
    for handles in ([use, pin], [use, other, pin], [pin, use]):
        with pytest.raises(ValueError):
            Blocks.concat(handles)
    assert snapshot(manager, use, other, pin) == before
    manager.deallocate(other)
    with pytest.raises(ValueError):
        Blocks.concat([use, other])
    assert Blocks.concat([pin, other]).ids.tolist() == [1, 2, 3]


def test_concat_across_managers_is_refused_and_changes_nothing(make_manager):
    managers = make_manager(8, 4), make_manager(8, 4)
    blocks = [manager.allocate(2) for manager in managers]
    before = [snapshot(*both) for both in zip(managers, blocks, strict=True)]
    with pytest.raises(ValueError):
        Blocks.concat(blocks)
    assert [snapshot(*both) for both in zip(managers, blocks, strict=True)] == before


def test_concat_of_nothing_or_of_a_handle_with_itself_is_refused(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    before = snapshot(manager, blocks)
    for handles in ([], [blocks, blocks]):
        with pytest.raises(ValueError):
            Blocks.concat(handles)
    assert snapshot(manager, blocks) == before


def test_concat_takes_any_iterable(make_manager):
    manager = make_manager(8, 4)
    joined = Blocks.concat(manager.allocate(1) for _ in range(3))
    assert joined.ids.tolist() == [1, 2, 3]


def test_a_block_is_a_borrowed_view(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(1)
    block = blocks[0]
    assert (block.ref_count, block.is_shared) == (1, False)
    with blocks.share():
        assert (block.ref_count, block.is_shared) == (2, True)
    before = counters(manager)
    del block
    assert counters(manager) == before
    assert blocks.ref_counts.tolist() == [1]


def test_a_view_of_a_block_that_is_free_counts_nobody(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(1)
    block = blocks[0]
    blocks.release()
    assert (block.ref_count, block.is_shared, block.hash_value) == (0, False, None)


def test_detach_and_adopt_hand_a_use_over_and_back(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    ids = blocks.detach()
    assert len(blocks) == 0
    blocks.release()
    assert manager.num_used_blocks == 2
    manager.adopt(ids).release()
    check_drained(manager)


def test_only_one_use_of_distinct_blocks_can_be_detached(make_manager):
    manager = make_manager(8, 4)
    blocks = manager.allocate(2)
    pin, done = blocks.pin(), blocks.share()
    twice = Blocks.concat([blocks.share(), blocks.share()])
    manager.deallocate(done)
    before = snapshot(manager, blocks, pin, done, twice)
    for handle in (pin, done, twice):
        with pytest.raises(ValueError):
            handle.detach()
    assert snapshot(manager, blocks, pin, done, twice) == before


def test_hash_value_names_the_cached_content(make_manager):
    manager = make_manager(8, 2, hash_seed=b"seed")
    tokens = run_of(2, 1, 2, 3)
    publish(manager, run_of(2, 1, 9))
    blocks = manager.allocate_shared(run_of(2, 1))
    blocks = Blocks.concat([blocks, manager.allocate(2)])
    manager.cache(tokens, blocks)
    assert [block.hash_value for block in blocks] == manager.prefix_hashes(tokens)
    manager.reset_prefix_cache()
    assert [block.hash_value for block in blocks] == [None] * 3


def test_a_copy_is_one_more_owner_and_deep_copies_are_refused():
    manager = BlockManagerImpl(8, 2)
    blocks = manager.allocate(3)
    twin = copy.copy(blocks)
    assert blocks.ref_counts.tolist() == [2, 2, 2]
    del twin
    assert blocks.ref_counts.tolist() == [1, 1, 1]
    for clone in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="share"):
            clone(blocks)
    blocks.release()
    assert manager.num_free_blocks == 7


@pytest.mark.parametrize("number", [2.0, 1.5, float("nan"), "2", None])
def test_only_whole_numbers_of_blocks_are_allocated(number):
    manager = BlockManagerImpl(8, 2)
    with pytest.raises(TypeError):
        manager.allocate(number)
    manager.check_integrity()
    assert manager.num_free_blocks == 7
