"""Many random operations in one go: no growth, no drift."""

from __future__ import annotations

import pytest

from raykv.bench.soak import soak

MARGIN_BYTES = 128 * 1024  # entries of what is gone, until they are swept


def check(report, num_operations):
    assert report.num_operations >= num_operations
    assert report.num_evicted > num_operations // 10
    half = len(report.full_bytes) // 2
    for sizes in (report.emptied_bytes, report.full_bytes):
        assert max(sizes[half:]) <= max(sizes[:half]) + MARGIN_BYTES, "something is left behind"


@pytest.mark.parametrize(
    ("eviction", "num_operations"), [("lru", 100_000), ("lrfu", 20_000), ("priority", 20_000)]
)
def test_a_short_soak(eviction, num_operations):
    check(soak(num_operations, eviction=eviction, num_checkpoints=6), num_operations)


@pytest.mark.nightly
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("eviction", ["lru", "lrfu", "priority"])
def test_ten_million_operations(eviction):
    check(soak(10_000_000, eviction=eviction), 10_000_000)
