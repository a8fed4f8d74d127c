"""Rows alone: who holds which, in what order they came, and which are stale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raykv.core import BlockManagerImpl, Sequence, SingleBlockManager
from raykv.core.block_tables import BlockTables
from raykv.core.rows import Rows
from raykv.errors import IntegrityError, RequestError

SIZE, NUM_ROWS, WIDTH = 4, 6, 5


class Rank:
    """Rows with managers around them, as a rank has them."""

    def __init__(self, dp_rank=3):
        self.manager = BlockManagerImpl(NUM_ROWS * WIDTH, SIZE)
        self.singles = SingleBlockManager(NUM_ROWS)
        self.tables = BlockTables(NUM_ROWS, WIDTH, SIZE)
        self.rows = Rows(dp_rank, SIZE, self.tables, self.singles)

    def admit(self, num_blocks=2, num_shared=0):
        sequence = Sequence(range(num_blocks * SIZE))
        [row] = self.singles.allocate(1).detach().tolist()
        ids = self.manager.allocate(num_blocks).detach()
        self.rows.attach(sequence, row, ids, num_shared)
        return sequence

    def release(self, sequence):
        row = self.rows.find(sequence)
        self.manager.adopt(self.tables.truncate(row, 0)).release()
        self.rows.detach(row)
        sequence.forget()

    def check(self):
        self.rows.check_integrity(self.manager)


@pytest.fixture
def rank():
    made = Rank()
    yield made
    made.check()


def test_a_sequence_learns_where_it_is_and_what_it_has(rank):
    first, second = rank.admit(2, num_shared=1), rank.admit(3)
    assert (first.dp_rank, first.single_block_id) == (3, 1)
    assert (second.dp_rank, second.single_block_id) == (3, 2)
    state = first.kv_state
    assert state.block_size == SIZE
    assert state.block_ids.tolist() == rank.tables.ids(1).tolist() == [1, 2]
    assert state.num_shared_blocks == 1
    assert state.num_computed_tokens == SIZE
    assert state.num_admitted_tokens == 2 * SIZE
    assert second.kv_state.num_computed_tokens == 0
    assert first.owner is None, "that is the rank's to say"


def test_a_row_is_found_only_by_who_holds_it(rank):
    held, fresh = rank.admit(), Sequence([1])
    assert rank.rows.find(held) == 1
    assert rank.rows.find(fresh) is None
    elsewhere = Rank(dp_rank=4).admit()
    twin = Rank(dp_rank=3).admit()  # another pool: same rank, same row
    beyond = Sequence([1])
    beyond.dp_rank, beyond.single_block_id = 3, NUM_ROWS
    moved = rank.admit()
    moved.dp_rank = 4
    for stranger in (elsewhere, twin, beyond, moved):
        with pytest.raises(RequestError, match="another pool or rank"):
            rank.rows.find(stranger)


def test_who_came_earlier_is_told_by_admission_not_by_row(rank):
    first, second, third = (rank.admit() for _ in range(3))
    assert rank.rows.admitted_before(first) == []
    assert rank.rows.admitted_before(third) == [first, second]
    rank.release(first)
    again = rank.admit()
    assert again.single_block_id == 1
    assert rank.rows.admitted_before(again) == [second, third]
    assert [row for row, _ in rank.rows.held()] == [1, 2, 3]


def test_a_mark_goes_with_its_row(rank):
    full, blank = rank.admit(1), rank.admit(0)
    rank.rows.mark_holders_stale()
    assert rank.rows.stale == {full.single_block_id}, "a row without blocks has nothing old"
    rank.release(full)
    assert rank.rows.stale == set()
    rank.release(blank)
    assert rank.rows.is_empty


def lose_sequence(rank, sequence):
    rank.rows.sequences[sequence.single_block_id] = None


def move_sequence(rank, sequence):
    rank.rows.sequences[sequence.single_block_id] = None
    rank.rows.sequences[5] = sequence


def mark_nobody(rank, sequence):
    rank.rows.stale.add(sequence.single_block_id + 1)


def lose_row(rank, sequence):
    rank.singles.adopt(np.array([sequence.single_block_id], np.int32)).release()


def swap_ids(rank, sequence):
    sequence.kv_state.block_ids = sequence.kv_state.block_ids[::-1]


def fill_nobodys_row(rank, sequence):
    rank.tables.append(5, sequence.kv_state.block_ids)


def lose_use(rank, sequence):
    rank.manager.adopt(sequence.kv_state.block_ids[:1]).release()


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lose_sequence, "books differ"),
        (lose_row, "books differ"),
        (mark_nobody, "marked as stale"),
        (move_sequence, "disagree"),
        (swap_ids, "disagree"),
        (fill_nobodys_row, "without sequence has blocks"),
        (lose_use, "does not use"),
    ],
)
def test_the_audit_sees_what_disagrees(tamper, message):
    rank = Rank()
    sequence = rank.admit()
    rank.check()
    tamper(rank, sequence)
    with pytest.raises(IntegrityError, match=message):
        rank.check()


class RowHistories(RuleBasedStateMachine):
    """Sequences come and go in step with a dictionary."""

    def __init__(self):
        super().__init__()
        self.rank = Rank()
        self.held = {}  # sequence: (row, ids), in order of admission
        self.stale = set()

    def pick(self, number):
        return list(self.held)[number % len(self.held)]

    @precondition(lambda self: len(self.held) < NUM_ROWS - 1)
    @rule(num_blocks=st.integers(0, WIDTH))
    def admit(self, num_blocks):
        sequence = self.rank.admit(num_blocks)
        self.held[sequence] = sequence.single_block_id, sequence.kv_state.block_ids.tolist()

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 9))
    def release(self, number):
        sequence = self.pick(number)
        self.rank.release(sequence)
        self.stale.discard(sequence)
        del self.held[sequence]

    @rule()
    def reset(self):
        self.rank.rows.mark_holders_stale()
        self.stale.update(sequence for sequence, (_, ids) in self.held.items() if ids)

    @invariant()
    def rows_are_those_of_the_dictionary(self):
        rows = self.rank.rows
        self.rank.check()
        assert {s: (row, self.rank.tables.ids(row).tolist()) for row, s in rows.held()} == self.held
        assert rows.stale == {self.held[sequence][0] for sequence in self.stale}
        assert rows.is_empty == (not self.held)
        for place, sequence in enumerate(self.held):
            assert rows.find(sequence) == self.held[sequence][0]
            assert set(rows.admitted_before(sequence)) == set(list(self.held)[:place])


TestRowHistories = RowHistories.TestCase
TestRowHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
