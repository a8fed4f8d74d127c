from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        st.lists(st.integers(0, 3), min_size=NUM_ROWS, max_size=NUM_ROWS),
    ),
)


@given(st.lists(operations, max_size=40))
@settings(max_examples=200, deadline=None)
def test_tables_are_lists_of_lists(steps):
    tables, wanted = BlockTables(NUM_ROWS, WIDTH), [[] for _ in range(NUM_ROWS)]
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
            counts = [
                min(n, WIDTH - len(wanted[row])) for n, row in zip(amount, where, strict=False)
            ]
            ids = [[next(fresh) for _ in range(n)] for n in counts]
            tables.append_many(
                np.array(where, np.int32), np.array(counts, np.int32), np.array(sum(ids, []))
            )
            for row, new in zip(where, ids, strict=True):
                wanted[row] += new
        check(tables, wanted)


def test_ids_are_a_copy_that_cannot_be_written():
    tables = BlockTables(2, 4)
    tables.append(1, np.array([5, 6], np.int32))
    ids = tables.ids(1)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 9
    tables.truncate(1, 0)
    assert ids.tolist() == [5, 6]
    assert ids.dtype == tables.table.dtype == np.int32


@pytest.mark.parametrize("column", [2, 3, 5])
def test_integrity_sees_what_stands_behind_an_end(column):
    tables = BlockTables(3, 6)
    tables.append(1, np.array([5, 6], np.int32))
    tables.table[2, column] = 7
    with pytest.raises(IntegrityError, match="behind its end"):
        tables.check_integrity()


@pytest.mark.parametrize("value", [0, -1])
def test_integrity_sees_padding_within_a_row(value):
    tables = BlockTables(3, 6)
    tables.append(1, np.array([5, 6, 7], np.int32))
    tables.table[1, 1] = value
    with pytest.raises(IntegrityError, match="padding"):
        tables.check_integrity()
