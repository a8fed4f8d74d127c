"""The swap list alone: what is owed, handed out and held."""

from __future__ import annotations

import pytest

from raykv.core.copy_on_write import SwapList


@pytest.fixture
def manager(make_manager):
    return make_manager(9, 4)


def test_copies_are_handed_out_once_and_in_order(manager):
    swaps = SwapList(manager)
    assert swaps.take() == []
    blocks = manager.allocate(4)
    swaps.add(1, 2)
    swaps.add(3, 4)
    assert swaps.take() == [(1, 2), (3, 4)]
    assert swaps.take() == []
    swaps.add(2, 3)
    assert swaps.take() == [(2, 3)]
    swaps.acknowledge()
    blocks.release()
    assert manager.num_free_blocks == 8


def test_a_chain_is_copied_from_its_root(manager):
    swaps = SwapList(manager)
    blocks = manager.allocate(5)
    for source, target in [(1, 2), (2, 3), (3, 4), (1, 5)]:
        swaps.add(source, target)
    assert swaps.take() == [(1, 2), (1, 3), (1, 4), (1, 5)]
    assert manager.ref_counts([1, 2, 3, 4, 5]).tolist() == [5, 2, 2, 2, 2]
    swaps.acknowledge()
    assert blocks.ref_counts.tolist() == [1] * 5


def test_what_was_handed_out_is_no_chain_any_more(manager):
    """It is copied first, and may be written to before the next copy."""
    swaps = SwapList(manager)
    blocks = manager.allocate(3)
    swaps.add(1, 2)
    assert swaps.take() == [(1, 2)]
    swaps.add(2, 3)
    assert swaps.take() == [(2, 3)]
    swaps.acknowledge()
    assert blocks.ref_counts.tolist() == [1, 1, 1]


def test_both_ends_stay_until_the_copy_is_done(manager):
    swaps = SwapList(manager)
    blocks = manager.allocate(2)
    swaps.add(1, 2)
    manager.deallocate(blocks)
    blocks.release()
    assert manager.num_used_blocks == 0
    assert manager.num_free_blocks == 6
    swaps.acknowledge()
    assert manager.num_free_blocks == 6, "nothing was handed out, so nothing can be done"
    swaps.take()
    assert manager.num_free_blocks == 6
    swaps.add(1, 2)
    swaps.acknowledge()
    assert manager.num_free_blocks == 6, "the second copy is still owed"
    swaps.take()
    swaps.acknowledge()
    assert manager.num_free_blocks == 8
    swaps.acknowledge()
    assert manager.num_free_blocks == 8


def test_a_source_is_pinned_once_per_copy(manager):
    swaps = SwapList(manager)
    blocks = manager.allocate(3)
    swaps.add(1, 2)
    swaps.take()
    swaps.add(1, 3)
    blocks.release()
    swaps.acknowledge()
    assert manager.num_free_blocks == 6
    assert manager.ref_counts([1, 3]).tolist() == [1, 1]
    swaps.take()
    swaps.acknowledge()
    assert manager.num_free_blocks == 8
