"""Growth of running sequences: what is planned, and what each gets of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.core import BlockManagerImpl, Sequence
from raykv.core.block_tables import BlockTables
from raykv.core.copy_on_write import CopyOnWrite
from raykv.core.row_growth import NO_GROWTH, RowGrowth

SIZE, NUM_ROWS, WIDTH = 4, 6, 8


class Running:
    """Sequences with rows, and what grows them."""

    def __init__(self, *num_blocks):
        self.manager = BlockManagerImpl(NUM_ROWS * WIDTH * 2, SIZE)
        self.tables = BlockTables(NUM_ROWS, WIDTH, SIZE)
        self.copies = CopyOnWrite(self.manager, self.tables)
        self.growth = RowGrowth(self.tables, self.copies)
        self.sequences = []
        for count in num_blocks:
            self.add(self.manager.allocate(count).detach())

    def add(self, ids):
        sequence = Sequence([1])
        row = sequence.single_block_id = len(self.sequences) + 1
        self.tables.append(row, ids)
        sequence.kv_state.block_ids = self.tables.ids(row)
        sequence.kv_state.num_computed_tokens = len(ids) * SIZE
        self.sequences.append(sequence)
        return sequence

    def fork(self, sequence):
        """A branch that shares all blocks; the last one is half filled."""
        with self.manager.adopt(sequence.kv_state.block_ids) as blocks:
            shared = blocks.share()
            blocks.detach()
        child = self.add(shared.detach())
        for each in (sequence, child):
            each.kv_state.num_computed_tokens = sequence.kv_state.num_blocks * SIZE - SIZE // 2
        self.copies.has_forks = True
        return child

    def grow(self, wanted):
        plan = self.growth.plan(self.sequences, wanted)
        ids = self.manager.allocate(plan.num_blocks).detach()
        self.growth.apply(plan, ids)
        return plan, ids.tolist()

    def ids(self):
        """What each sequence has, which is what its row says."""
        self.tables.check_integrity()
        found = [sequence.kv_state.block_ids.tolist() for sequence in self.sequences]
        assert found == [self.tables.ids(s.single_block_id).tolist() for s in self.sequences]
        return found


def test_nothing_to_grow_is_no_blocks():
    assert NO_GROWTH.num_blocks == 0
    running = Running(2, 3)
    plan = running.growth.plan(running.sequences, [2, 1])
    assert plan.num_blocks == 0
    assert plan.sequences == plan.copies == []


def test_only_who_needs_more_grows_and_in_order():
    running = Running(1, 2, 1)
    plan, ids = running.grow([3, 2, 2])
    assert plan.sequences == [running.sequences[0], running.sequences[2]]
    assert plan.rows.tolist() == [1, 3]
    assert plan.counts.tolist() == [2, 1]
    assert running.ids() == [[1, *ids[:2]], [2, 3], [4, ids[2]]]


def test_a_plan_changes_nothing():
    running = Running(2, 1)
    running.fork(running.sequences[0])
    before = running.ids(), running.manager.num_free_blocks
    plan = running.growth.plan(running.sequences, [4, 1, 2])
    assert plan.num_blocks == 3, "two more, and a copy"
    assert (running.ids(), running.manager.num_free_blocks) == before
    assert running.copies.take("") == []


def test_one_grant_serves_growth_first_and_copies_then():
    running = Running(2, 1)
    parent, child = running.sequences[0], running.fork(running.sequences[0])
    plan, ids = running.grow([3, 1, 2])
    assert plan.copies == [(parent, 1)]
    assert running.ids() == [[1, ids[1], ids[0]], [3], [1, 2]]
    assert running.copies.take("") == [(2, ids[1])]
    assert child.kv_state.block_ids.tolist() == [1, 2], "the last writer keeps the block"


@given(
    st.lists(
        st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH)), min_size=1, max_size=NUM_ROWS - 1
    )
)
@settings(max_examples=100, deadline=None)
def test_all_at_once_is_one_by_one(sizes):
    running = Running(*(have for have, _ in sizes))
    before = running.ids()
    plan, ids = running.grow([want for _, want in sizes])
    fresh = iter(ids)
    for old, new, (have, want) in zip(before, running.ids(), sizes, strict=True):
        assert new == [*old, *(next(fresh) for _ in range(want - have))]
    assert list(fresh) == []
    assert plan.num_blocks == len(ids)
    assert np.all(plan.counts > 0)
