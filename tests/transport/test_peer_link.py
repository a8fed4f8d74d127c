"""Estimates follow what was measured, and are forgotten; who fails is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.host.transport.peer_link import START_BYTES_PER_S, START_LATENCY_S, PeerLink

MIB = 1 << 20


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def link(clock):
    return PeerLink(clock)


def test_start(link):
    assert link.bytes_per_s == pytest.approx(START_BYTES_PER_S)
    assert link.latency_s == START_LATENCY_S
    assert link.copy_s(10**9) == pytest.approx(1 + START_LATENCY_S)
    assert not link.is_resting


def test_large_copies_count_more_than_small_ones(link, clock):
    small = PeerLink(clock)
    small.copied(MIB, MIB / 1e8)
    assert small.bytes_per_s > 0.8 * START_BYTES_PER_S
    link.copied(1024 * MIB, 1024 * MIB / 1e8)
    assert link.bytes_per_s == pytest.approx(1e8, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e6, 1e11)), min_size=1))
def test_the_estimate_stays_within_what_was_seen(copies):
    link = PeerLink(Clock())
    for num_bytes, bytes_per_s in copies:
        link.copied(num_bytes, num_bytes / bytes_per_s)
    seen = [START_BYTES_PER_S, *(bytes_per_s for _, bytes_per_s in copies)]
    assert 0.999 * min(seen) <= link.bytes_per_s <= 1.001 * max(seen)


def test_latency(link):
    for _ in range(30):
        link.answered(0.5)
    assert link.latency_s == pytest.approx(0.5, rel=0.01)
    assert link.copy_s(0) == link.latency_s


def test_what_was_measured_is_forgotten(link, clock):
    link.copied(1024 * MIB, 1024 * MIB / 1e6)
    link.answered(4.0)
    assert link.bytes_per_s < 1.1e6
    clock.now_s += 3600
    assert link.bytes_per_s == pytest.approx(START_BYTES_PER_S, rel=0.01)
    assert link.latency_s == pytest.approx(START_LATENCY_S, rel=0.01)


def test_who_fails_rests_for_longer_each_time(link, clock):
    pauses = []
    for _ in range(8):
        link.failed()
        started_s = clock.now_s
        while link.is_resting:
            clock.now_s += 0.25
        pauses.append(clock.now_s - started_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    link.copied(1, 1)
    link.failed()
    clock.now_s += 1
    assert not link.is_resting
