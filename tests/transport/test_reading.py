"""What all transports check."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.host.tickets import LoadOutcome
from raykv.host.transport import RowRequest
from raykv.host.transport.interface import (
    BATCH_BYTES,
    consecutive,
    num_leading_ok,
    outcomes_of,
    rows_per_batch,
)
from raykv.host.transport.reading import Reading
from raykv.memory.checksums import block_checksums

from .slabs import CORRUPT, FAILED, OK, STALE


@given(st.lists(st.integers(0, 20)))
def test_consecutive_rows(ids):
    runs = consecutive(np.array(ids, np.int64))
    assert [row for run in runs for row in range(run.start, run.stop)] == ids
    for one, other in itertools.pairwise(runs):
        assert one.stop != other.start


def test_rows_per_batch():
    assert rows_per_batch(1 << 20) == BATCH_BYTES >> 20
    assert rows_per_batch(BATCH_BYTES + 1) == 1


@given(st.lists(st.sampled_from([0, 1, 2, 3])))
def test_leading_ok(outcomes):
    num = num_leading_ok(np.array(outcomes, np.uint8))
    assert not any(outcomes[:num])
    assert num == len(outcomes) or outcomes[num]


@pytest.fixture
def rows():
    return np.random.default_rng(1).integers(0, 256, (7, 40), np.uint8)


def request_of(rows, ids):
    return RowRequest(np.array(ids), np.array(ids, np.uint64) * 10, block_checksums(rows[ids]))


def test_outcomes(rows):
    ids = [4, 2, 6, 5]
    request = request_of(rows, ids)
    places = np.array(ids)
    generations = request.generations.copy()
    assert outcomes_of(request, generations, rows, places).tolist() == [OK] * 4
    rows[2, 39] ^= 1
    rows[6, 0] ^= 1
    generations[2:] += np.uint64(1)
    assert outcomes_of(request, generations, rows, places).tolist() == [OK, CORRUPT, STALE, STALE]
    request.checksums[:] = 0  # nothing to compare
    assert outcomes_of(request, generations, rows, places).tolist() == [OK, OK, STALE, STALE]


def test_a_request_has_one_of_each():
    with pytest.raises(ValueError, match="one of each per row"):
        RowRequest(np.arange(3), np.zeros(3, np.uint64), np.zeros(2, np.uint64))


def test_a_reading_reports_as_it_grows(rows):
    ids, reported = [4, 2, 6, 5], []
    request = request_of(rows, ids)
    reading = Reading(request, rows, np.array(ids), reported.append)
    assert reading.block_bytes == 40
    assert reading.next_ids(3).tolist() == [4, 2, 6]
    assert not reading.arrived(request.generations[:3])
    assert reading.next_ids(1).tolist() == [5]
    assert reading.num_left == 1
    assert reading.arrived(request.generations[3:])
    assert reading.num_left == 0
    assert reported == [3, 4]
    assert reading.outcomes.tolist() == [OK] * 4
    assert reading.counts() == {"rows": 4, "bytes": 160}


def test_a_reading_ends_with_the_first_bad_row(rows):
    ids, reported = [4, 2, 6, 5], []
    request = request_of(rows, ids)
    rows[2] = 0
    reading = Reading(request, rows, np.array(ids), reported.append)
    assert not reading.arrived(request.generations[:3]), "the server does not know"
    assert reading.has_failed
    assert reading.num_left == 0
    assert reported == [1]
    assert reading.outcomes.tolist() == [OK, CORRUPT, OK, FAILED]
    assert reading.counts() == {"rows": 1, "bytes": 40, "corrupt": 1}


def test_a_changed_row_ends_the_answer(rows):
    request = request_of(rows, [4, 2])
    reading = Reading(request, rows, np.array([4, 2]), lambda num: None)
    assert reading.arrived(request.generations[:1] + np.uint64(1))
    assert reading.outcomes.tolist() == [STALE, FAILED]


def test_a_reading_that_is_ended(rows):
    reading = Reading(request_of(rows, [4, 2]), rows, np.array([4, 2]), lambda num: None)
    reading.end(LoadOutcome.STALE)
    assert reading.num_left == 0
    assert reading.outcomes.tolist() == [STALE, FAILED]


@pytest.mark.parametrize(
    ("row_ids", "message"),
    [([0, 1], "padding"), ([1, 7], "spans"), ([1, 1], "2 times"), ([1], "into 1")],
)
def test_unsound_places_are_refused(rows, row_ids, message):
    with pytest.raises(ValueError, match=message):
        Reading(request_of(rows, [4, 2]), rows, np.array(row_ids), lambda num: None)


def test_unsound_memory_is_refused(rows):
    request = request_of(rows, [4, 2])
    for memory in (rows[:, ::2], rows.astype(np.int16), rows[0]):
        with pytest.raises(ValueError, match="contiguous uint8"):
            Reading(request, memory, np.array([1, 2]), lambda num: None)
