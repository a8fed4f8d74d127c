from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.core import BlockManagerImpl
from raykv.core.block_tables import BlockTables
from raykv.errors import IntegrityError

NUM_ROWS, WIDTH = 5, 6


def check(tables, wanted):
    tables.check_integrity()
    for row, ids in enumerate(wanted):
        assert tables.ids(row).tolist() == ids
        assert tables.table[row].tolist() == ids + [0] * (WIDTH - len(ids))
    assert tables.num_blocks.tolist() == [len(ids) for ids in wanted]


operations = st.one_of(
    st.tuples(st.just("append"), st.integers(0, NUM_ROWS - 1), st.integers(0, WIDTH)),
    st.tuples(st.just("truncate"), st.integers(0, NUM_ROWS - 1), st.integers(0, WIDTH)),
    st.tuples(
        st.just("append_many"),
        st.lists(st.integers(0, NUM_ROWS - 1), unique=True),
        st.lists(st.integers(1, 3), min_size=NUM_ROWS, max_size=NUM_ROWS),
    ),
)


@given(st.lists(operations, max_size=40))
@settings(max_examples=200, deadline=None)
def test_tables_are_lists_of_lists(steps):
    tables, wanted = BlockTables(NUM_ROWS, WIDTH, 3), [[] for _ in range(NUM_ROWS)]
    fresh = iter(range(1, 10_000))
    for name, where, amount in steps:
        if name == "append":
            ids = [next(fresh) for _ in range(min(amount, WIDTH - len(wanted[where])))]
            tables.append(where, np.array(ids, np.int32))
            wanted[where] += ids
        elif name == "truncate":
            count = min(amount, len(wanted[where]))
            assert tables.truncate(where, count).tolist() == wanted[where][count:]
            del wanted[where][count:]
        else:
            rows = [row for row in where if len(wanted[row]) < WIDTH]
            counts = [
                min(n, WIDTH - len(wanted[row])) for n, row in zip(amount, rows, strict=False)
            ]
            ids = [[next(fresh) for _ in range(n)] for n in counts]
            flat = np.array(list(itertools.chain(*ids)), np.int32)
            tables.append_many(np.array(rows, np.int64), np.array(counts, np.int64), flat)
            for row, new in zip(rows, ids, strict=True):
                wanted[row] += new
        check(tables, wanted)


@given(
    lengths=st.lists(st.integers(1, WIDTH * 3), min_size=1, max_size=NUM_ROWS - 1),
    steps=st.lists(st.integers(0, 4), max_size=8),
    num_blocks=st.integers(2, 20),
)
@settings(max_examples=100, deadline=None)
def test_grow_gives_each_row_what_its_tokens_need_or_nothing(lengths, steps, num_blocks):
    manager, tables = BlockManagerImpl(num_blocks, 3), BlockTables(NUM_ROWS, WIDTH, 3)
    rows, num_tokens = np.arange(1, len(lengths) + 1), np.array(lengths)
    for more in [0, *steps]:
        num_tokens = np.minimum(num_tokens + more, WIDTH * 3)
        before = tables.table.copy()
        needed = -(-num_tokens // 3)
        if tables.grow(manager, rows, num_tokens):
            assert tables.num_blocks[rows].tolist() == needed.tolist()
            assert manager.num_used_blocks == needed.sum()
            ids = tables.table[tables.table > 0].tolist()
            assert sorted(ids) == list(range(1, int(needed.sum()) + 1))
        else:
            assert needed.sum() > num_blocks - 1
            assert np.array_equal(tables.table, before)
            return
        tables.check_integrity()


def test_ids_are_a_copy_that_cannot_be_written():
    tables = BlockTables(2, 4, 3)
    tables.append(1, np.array([5, 6], np.int32))
    ids = tables.ids(1)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 9
    tables.truncate(1, 0)
    assert ids.tolist() == [5, 6]
    assert ids.dtype == tables.table.dtype == np.int32


@pytest.mark.parametrize("column", [2, 3, 5])
def test_integrity_sees_what_stands_behind_an_end(column):
    tables = BlockTables(3, 6, 3)
    tables.append(1, np.array([5, 6], np.int32))
    tables.table[2, column] = 7
    with pytest.raises(IntegrityError, match="behind its end"):
        tables.check_integrity()


@pytest.mark.parametrize("value", [0, -1])
def test_integrity_sees_padding_within_a_row(value):
    tables = BlockTables(3, 6, 3)
    tables.append(1, np.array([5, 6, 7], np.int32))
    tables.table[1, 1] = value
    with pytest.raises(IntegrityError, match="padding"):
        tables.check_integrity()
