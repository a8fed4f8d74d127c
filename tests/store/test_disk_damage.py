"""Flipped bits and cut files at every place: values may be lost, none is ever wrong."""

from __future__ import annotations

import pytest

from raykv.store.interface import Loan, StoreCounts
from raykv.store.records import MAX_HEAD_BYTES, complete, parse, record_bytes, value_place
from raykv.store.segment import Segment
from raykv.store.segment_log import SegmentLog

from .helpers import key_of, value_of

RECORD_BYTES = 192
NUM_VALUES = 5  # three in the first segment, two in the last
VALUE_BYTES = 100
HEAD_BYTES = 48 + 32

# Within a record: every byte of the head and the key, some of the value, some of the padding.
PLACES = [*range(HEAD_BYTES), 80, 81, 130, 178, 179, 180, 181, 191]


def places(content):
    return [start + place for start in range(0, len(content), RECORD_BYTES) for place in PLACES]


def open_log(folder):
    counts = StoreCounts()
    return SegmentLog(folder, 1 << 20, 3 * RECORD_BYTES, counts, fsync=False), counts


def put(log, names):
    items = [(key_of(name), memoryview(value_of(name))) for name in names]
    assert log.put(items, Loan()) == [True] * len(items)


def found(log, names=range(NUM_VALUES)):
    """Which values are there; a wrong one fails the test."""
    values = {
        name: log.read(key_of(name), VALUE_BYTES, lambda size: memoryview(bytearray(size)))
        for name in names
    }
    assert all(value in (None, value_of(name)) for name, value in values.items())
    return [name for name in names if values[name] is not None]


@pytest.fixture
def segments(tmp_path):
    """Two files' contents by path."""
    log, _ = open_log(tmp_path)
    put(log, range(NUM_VALUES))
    log.close()
    return {path: path.read_bytes() for path in Segment.find(tmp_path)}


def restore(segments, folder):
    for path in Segment.find(folder):
        path.unlink()
    for path, content in segments.items():
        path.write_bytes(content)


def test_a_flipped_bit_anywhere_costs_its_record_at_most(tmp_path, segments):
    first = 0
    for path, content in segments.items():
        for place in places(content):
            restore(segments, tmp_path)
            damaged = bytearray(content)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            hit, within = divmod(place, RECORD_BYTES)
            is_padding = within >= HEAD_BYTES + VALUE_BYTES
            lost = set() if is_padding else {first + hit}
            log, counts = open_log(tmp_path)
            assert set(found(log)) == set(range(NUM_VALUES)) - lost, place
            is_torn_tail = first + hit == NUM_VALUES - 1  # as a crash leaves it: cut, not counted
            assert counts.stats().corrupt == len(lost) - (len(lost) and is_torn_tail)
            put(log, lost)
            assert found(log) == list(range(NUM_VALUES))
            log.check_integrity()
            log.close()
            log, _ = open_log(tmp_path)
            assert found(log) == list(range(NUM_VALUES))
            log.close()
        first += len(content) // RECORD_BYTES


def test_a_file_cut_anywhere_keeps_the_records_before(tmp_path, segments):
    first = 0
    for path, content in segments.items():
        for size in places(content):
            restore(segments, tmp_path)
            path.write_bytes(content[:size])
            kept = first + size // RECORD_BYTES
            # The padding behind a value is part of its record: cut, it is gone as well.
            lost = set(range(kept, first + len(content) // RECORD_BYTES))
            log, _ = open_log(tmp_path)
            assert set(found(log)) == set(range(NUM_VALUES)) - lost, size
            put(log, lost)
            log.check_integrity()
            log.close()
            log, _ = open_log(tmp_path)
            assert found(log) == list(range(NUM_VALUES))
            log.close()
        first += len(content) // RECORD_BYTES


def test_a_torn_tail_is_cut_off(tmp_path, segments):
    path, content = list(segments.items())[-1]
    for size in places(content)[len(PLACES) :]:
        path.write_bytes(content[:size])
        log, counts = open_log(tmp_path)
        assert path.stat().st_size == RECORD_BYTES
        assert counts.stats().corrupt == 0
        log.close()


@pytest.mark.parametrize("junk", [b"", b"rkv1", b"\xff" * 64, bytes(5000), b"rkv1" * 1000])
def test_junk_between_records_is_passed_over(tmp_path, segments, junk):
    """As a loss of power may leave it: what was written later is there, what came before is not."""
    path, content = next(iter(segments.items()))
    damaged = bytearray(content)
    damaged[: 2 * RECORD_BYTES] = (junk * RECORD_BYTES * 2)[: 2 * RECORD_BYTES].ljust(
        2 * RECORD_BYTES, b"x"
    )
    path.write_bytes(damaged)
    log, _ = open_log(tmp_path)
    assert found(log) == [2, 3, 4]
    log.close()


def test_records_are_found_again_behind_much_junk(tmp_path):
    """The search reads in pieces of 1 MiB; a record may begin on either side of their ends."""
    for gap in ((1 << 20) - 64, 1 << 20, (1 << 20) + 64, (2 << 20) + 128):
        segment = Segment.create(tmp_path, 1)
        with segment.path.open("r+b") as file:
            file.truncate(gap)
        segment.size = gap
        append(segment, b"key", b"value")
        assert [record.key for record in segment.records()] == [b"key"]
        segment.close()
        segment.path.unlink()


def append(segment, key, value):
    record = memoryview(bytearray(record_bytes(len(key), len(value))))
    record[value_place(len(key), len(value))] = value
    complete(record, key, len(value), segment.salt, segment.size)
    segment.append(record)
    return bytes(record)


def test_a_record_within_a_value_or_in_another_place_is_none(tmp_path):
    first, second = (Segment.create(tmp_path, number) for number in (1, 2))
    inner = append(first, b"inner", b"x" * 100)
    assert parse(inner, first.salt, 0).key == b"inner"
    for salt, offset in ((first.salt, 64), (second.salt, 0)):
        assert parse(inner, salt, offset) is None
    # A user who can choose a value's bytes cannot plant a record in it.
    append(second, b"k" * 16, inner + inner)
    assert [record.key for record in second.records()] == [b"k" * 16]
    with second.path.open("r+b") as file:
        file.write(b"bad")  # so that the search looks within the value
    assert list(second.records()) == []
    first.close()
    second.close()


def test_a_head_that_claims_more_than_there_is_is_none(tmp_path):
    segment = Segment.create(tmp_path, 1)
    record = append(segment, b"key", b"v" * 1000)
    segment.cut(len(record) - 64)
    assert segment.record_at(0) is None
    assert parse(record[:MAX_HEAD_BYTES], segment.salt, 0) is not None
    assert parse(record[:47], segment.salt, 0) is None
    assert parse(record[:50], segment.salt, 0) is None
    segment.close()
