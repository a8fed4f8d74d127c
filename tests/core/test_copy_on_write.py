"""Copy on write without a rank: who owes copies, and what is owed, handed out and held."""

from __future__ import annotations

import numpy as np
import pytest

from raykv.core import Sequence
from raykv.core.block_tables import BlockTables
from raykv.core.copy_on_write import CopyOnWrite, SwapList


@pytest.fixture
def manager(make_manager):
    return make_manager(9, 4)


def owe(swaps, manager, source, target):
    swaps.add(source, target, *(manager.pin(np.array([block])) for block in (source, target)))


def test_copies_are_handed_out_once_and_in_order(manager):
    swaps = SwapList()
    assert swaps.take() == []
    blocks = manager.allocate(4)
    owe(swaps, manager, 1, 2)
    owe(swaps, manager, 3, 4)
    assert swaps.take() == [(1, 2), (3, 4)]
    assert swaps.take() == []
    owe(swaps, manager, 2, 3)
    assert swaps.take() == [(2, 3)]
    swaps.acknowledge()
    blocks.release()
    assert manager.num_free_blocks == 8


def test_a_chain_is_copied_from_its_root(manager):
    swaps = SwapList()
    blocks = manager.allocate(5)
    for source, target in [(1, 2), (2, 3), (3, 4), (1, 5)]:
        owe(swaps, manager, source, target)
    assert swaps.take() == [(1, 2), (1, 3), (1, 4), (1, 5)]
    assert manager.ref_counts([1, 2, 3, 4, 5]).tolist() == [5, 2, 2, 2, 2]
    swaps.acknowledge()
    assert blocks.ref_counts.tolist() == [1] * 5


def test_what_was_handed_out_is_no_chain_any_more(manager):
    """It is copied first, and may be written to before the next copy."""
    swaps = SwapList()
    blocks = manager.allocate(3)
    owe(swaps, manager, 1, 2)
    assert swaps.take() == [(1, 2)]
    owe(swaps, manager, 2, 3)
    assert swaps.take() == [(2, 3)]
    swaps.acknowledge()
    assert blocks.ref_counts.tolist() == [1, 1, 1]


def test_both_ends_stay_until_the_copy_is_done(manager):
    swaps = SwapList()
    blocks = manager.allocate(2)
    owe(swaps, manager, 1, 2)
    manager.deallocate(blocks)
    blocks.release()
    assert manager.num_used_blocks == 0
    assert manager.num_free_blocks == 6
    swaps.acknowledge()
    assert manager.num_free_blocks == 6, "nothing was handed out, so nothing can be done"
    swaps.take()
    assert manager.num_free_blocks == 6
    owe(swaps, manager, 1, 2)
    swaps.acknowledge()
    assert manager.num_free_blocks == 6, "the second copy is still owed"
    swaps.take()
    swaps.acknowledge()
    assert manager.num_free_blocks == 8
    swaps.acknowledge()
    assert manager.num_free_blocks == 8


def test_a_source_is_pinned_once_per_copy(manager):
    swaps = SwapList()
    blocks = manager.allocate(3)
    owe(swaps, manager, 1, 2)
    swaps.take()
    owe(swaps, manager, 1, 3)
    blocks.release()
    swaps.acknowledge()
    assert manager.num_free_blocks == 6
    assert manager.ref_counts([1, 3]).tolist() == [1, 1]
    swaps.take()
    swaps.acknowledge()
    assert manager.num_free_blocks == 8


# -- who owes them ---------------------------------------------------------------------------------


class Branches:
    """Sequences that share their first two blocks, computed up to the middle of the second."""

    def __init__(self, manager, count, driver_ids=("",)):
        self.manager = manager
        self.tables = BlockTables(count + 1, 3, manager.block_size)
        self.copies = CopyOnWrite(manager, self.tables)
        self.copies.has_forks = True
        blocks = manager.allocate(2)
        handles = [blocks, *(blocks.share() for _ in range(count - 1))]
        self.sequences = []
        for row, handle in enumerate(handles, 1):
            sequence = Sequence(range(6))
            sequence.single_block_id = row
            sequence.driver_id = driver_ids[row % len(driver_ids)]
            self.tables.append(row, handle.detach())
            sequence.kv_state.block_ids = self.tables.ids(row)
            sequence.kv_state.num_computed_tokens = 6
            sequence.kv_state.num_shared_blocks = 2
            self.sequences.append(sequence)

    def replace(self, sequence, index=1):
        [target] = self.manager.allocate(1).detach().tolist()
        self.copies.replace(sequence, index, target)
        return target


def test_all_writers_of_a_block_but_the_last_owe_a_copy(manager):
    branches = Branches(manager, 3)
    first, second, third = branches.sequences
    assert branches.copies.due(branches.sequences) == [(first, 1), (second, 1)]
    assert branches.copies.due([third, first]) == [(third, 1), (first, 1)], "the second may write"
    assert branches.copies.due([]) == []


def test_who_writes_behind_the_shared_blocks_owes_none(manager):
    branches = Branches(manager, 2)
    writer, _ = branches.sequences
    writer.kv_state.num_computed_tokens = 8
    assert branches.copies.due([writer]) == []
    writer.kv_state.num_computed_tokens = 4
    assert branches.copies.due([writer]) == [(writer, 1)]
    writer.kv_state.num_computed_tokens = 3
    assert branches.copies.due([writer]) == [(writer, 0)]


def test_without_forks_nobody_is_looked_at(manager):
    branches = Branches(manager, 2)
    branches.copies.has_forks = False
    assert branches.copies.due(branches.sequences) == []


def test_a_replaced_block_is_the_writers_own(manager):
    branches = Branches(manager, 2)
    writer, other = branches.sequences
    target = branches.replace(writer)
    assert writer.kv_state.block_ids.tolist() == branches.tables.ids(1).tolist() == [1, target]
    assert writer.kv_state.num_shared_blocks == 1
    assert other.kv_state.block_ids.tolist() == branches.tables.ids(2).tolist() == [1, 2]
    assert other.kv_state.num_shared_blocks == 2
    assert manager.use_counts([1, 2, target]).tolist() == [2, 1, 1]
    assert branches.copies.due(branches.sequences) == []
    assert branches.copies.take("") == [(2, target)]


def test_each_driver_does_the_copies_of_its_own_sequences(manager):
    branches = Branches(manager, 3, driver_ids=("b", "a"))
    first, second, _ = branches.sequences
    targets = branches.replace(first), branches.replace(second)
    assert branches.copies.take("nobody") == []
    assert branches.copies.take("a") == [(2, targets[0])]
    assert branches.copies.take("b") == [(2, targets[1])]
    branches.copies.acknowledge("nobody")
    branches.copies.acknowledge("a")
    assert manager.ref_counts([2, *targets]).tolist() == [2, 1, 2]


def test_a_driver_that_is_gone_holds_no_block(manager):
    branches = Branches(manager, 3, driver_ids=("b", "a"))
    first, second, _ = branches.sequences
    targets = branches.replace(first), branches.replace(second)
    branches.copies.forget("nobody")
    branches.copies.forget("a")
    assert manager.ref_counts([2, *targets]).tolist() == [2, 1, 2], "of b's copy still"
    assert list(branches.copies.owed) == ["b"]
    assert branches.copies.take("a") == []
