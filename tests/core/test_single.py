"""One id per sequence, for its life."""

from __future__ import annotations

import pytest

from raykv.core import BlockManager, SingleBlockManager
from raykv.errors import ConfigError, DoubleFreeError

from .helpers import counters


def test_ids_ascend_from_1_and_0_is_padding():
    manager = SingleBlockManager(4)
    assert isinstance(manager, BlockManager)
    assert manager.num_total_blocks == 3
    assert [int(manager.allocate(1).ids[0]) for _ in range(1)] == [1]
    held = [manager.allocate(1) for _ in range(3)]
    assert [int(block.ids[0]) for block in held] == [1, 2, 3]
    assert manager.allocate(1) is None
    assert manager.num_free_blocks == manager.num_available_blocks == 0


def test_the_block_size_is_1():
    manager = SingleBlockManager(4)
    assert manager.block_size == manager.allocate(1).block_size == 1


def test_the_last_one_released_is_the_next_handed_out():
    manager = SingleBlockManager(6)
    held = {i: manager.allocate(1) for i in range(1, 6)}
    for i in (2, 5, 3):
        manager.deallocate(held[i])
        held.pop(i).release()
    again = [manager.allocate(1) for _ in range(3)]
    assert [int(block.ids[0]) for block in again] == [3, 5, 2]


def test_it_has_no_prefix_cache():
    manager = SingleBlockManager(4)
    block = manager.allocate(1)
    assert manager.cache([1, 2, 3], block) == 0
    assert len(manager.allocate_shared([1, 2, 3])) == 0
    assert manager.num_blocks_in_prefix_cache == manager.num_evictable_blocks == 0
    assert manager.reset_prefix_cache() == 0
    assert block[0].hash_value is None
    block.release()
    assert manager.num_free_blocks == 3


def test_it_counts_uses_and_references_as_the_others_do():
    manager = SingleBlockManager(4)
    block = manager.allocate(1)
    pin = block.pin()
    manager.deallocate(block)
    assert (manager.num_used_blocks, manager.num_free_blocks) == (0, 2)
    with pytest.raises(DoubleFreeError):
        manager.deallocate(block)
    block.release()
    assert manager.num_free_blocks == 2
    pin.release()
    assert manager.num_free_blocks == 3
    manager.check_integrity()


def test_double_and_foreign_frees_are_refused():
    manager = SingleBlockManager(4)
    block = manager.allocate(1)
    before = counters(manager)
    for block_id, error in ((0, ValueError), (4, ValueError), (-1, ValueError)):
        with pytest.raises(error):
            manager.free(block_id)
    for block_id in (1, 2):
        with pytest.raises(DoubleFreeError):
            manager.free(block_id)
    with pytest.raises(ValueError):
        SingleBlockManager(4).deallocate(block)
    assert counters(manager) == before
    manager.check_integrity()


@pytest.mark.parametrize("num_blocks", [1, 0, -2])
def test_impossible_sizes_are_refused(num_blocks):
    with pytest.raises(ConfigError):
        SingleBlockManager(num_blocks)


def test_messages_name_the_resource():
    manager = SingleBlockManager(4, resource_name="linear-state slot")
    assert manager.resource_name == "linear-state slot"
    assert "linear-state slot" in repr(manager)


def test_one_and_many_at_a_time_go_together():
    manager = SingleBlockManager(8)
    many, one = manager.allocate(3), manager.allocate(1)
    middle = many[1:2]
    assert (middle.ids.tolist(), many.ref_counts.tolist()) == ([2], [1, 2, 1])
    assert manager.num_used_blocks == 4
    many.release()
    assert (manager.num_used_blocks, manager.num_free_blocks) == (2, 5)
    assert manager.allocate(2).ids.tolist() == [1, 3]
    del middle
    twice = one.share()
    manager.deallocate(one)
    assert manager.num_used_blocks == 1
    one.release()
    assert (manager.num_used_blocks, twice.ref_counts.tolist()) == (1, [1])
    twice.release()
    assert manager.num_free_blocks == 7
    manager.check_integrity()


def test_a_pin_of_one_is_a_pin():
    manager = SingleBlockManager(4)
    blocks = manager.allocate(1)
    pins = [manager.pin_one(1), manager.pin(manager.index_of(1))]
    assert blocks.ref_counts.tolist() == [3]
    assert not any(pin.is_use for pin in pins)
    blocks.release()
    for pin in pins:
        assert (manager.num_used_blocks, manager.num_free_blocks) == (0, 2)
        manager.check_integrity()
        pin.release()
    assert manager.num_free_blocks == 3
    manager.check_integrity()


def test_the_index_of_an_id_cannot_be_written_to():
    manager = SingleBlockManager(4)
    ids = manager.allocate(1).detach()
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 2
    manager.adopt(ids).release()
    assert manager.num_free_blocks == 3


def test_a_number_of_blocks_is_an_integer():
    with pytest.raises(TypeError):
        SingleBlockManager(4).allocate(1.0)
