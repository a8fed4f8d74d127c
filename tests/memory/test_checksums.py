"""Checksums: alike for alike bytes, different for a changed bit, one per row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.memory import checksums
from raykv.memory.checksums import NO_CHECKSUM, block_checksum, block_checksums


def random_rows(num_rows=5, num_bytes=300):
    return np.random.default_rng(0).integers(0, 256, (num_rows, num_bytes), np.uint8)


def test_known_values():
    """XXH3's own, so that what one version stored another can check."""
    assert block_checksum(b"") == 0x2D06800538D394C2
    assert block_checksum(bytes(256)) == 0xA68DFBB1D75C6E8D


def test_one_checksum_per_row():
    rows = random_rows()
    sums = block_checksums(rows)
    assert sums.dtype == np.uint64
    assert sums.tolist() == [block_checksum(row.tobytes()) for row in rows]
    assert len(set(sums.tolist())) == len(rows)
    assert block_checksums(row for row in rows).tolist() == sums.tolist()
    assert block_checksums(rows[:0]).tolist() == []


def test_only_the_bytes_count():
    row = random_rows()[0]
    for dtype in ("uint16", "float32"):
        assert block_checksum(row.view(dtype)) == block_checksum(row)
        assert block_checksum(row.view(dtype).reshape(5, -1)) == block_checksum(row)


@given(at=st.integers(0, 299), bit=st.integers(0, 7), row=st.integers(0, 4))
def test_a_changed_bit_changes_the_checksum(at, bit, row):
    rows = random_rows()
    before = block_checksums(rows)
    rows[row, at] ^= 1 << bit
    assert np.flatnonzero(block_checksums(rows) != before).tolist() == [row]


def test_no_content_has_the_value_for_none(monkeypatch):
    assert block_checksum(bytes(300)) != NO_CHECKSUM
    monkeypatch.setattr(checksums, "xxh3_64_intdigest", lambda _: 0)
    assert block_checksum(b"unlucky") != NO_CHECKSUM


def test_memory_with_gaps_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        block_checksum(random_rows()[:, ::2][0])
