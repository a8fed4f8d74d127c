"""A wish about how dearly cached blocks are kept, and its way to the cache."""

from __future__ import annotations

import math
import pickle

import pytest

from raykv.config import PoolConfig
from raykv.core import Sequence
from raykv.core.retention import DEFAULT_RETENTION, Retention
from raykv.rank import RankKV

SIZE = 4


@pytest.mark.parametrize("priority", [-1, 101, 1000])
def test_a_priority_out_of_range_is_refused(priority):
    with pytest.raises(ValueError, match=f"priority is {priority}, .* 0 to 100"):
        Retention(priority=priority)


@pytest.mark.parametrize("duration_s", [0, -1, -0.5, math.nan])
def test_a_duration_that_is_none_is_refused(duration_s):
    with pytest.raises(ValueError, match=r"duration .* above 0"):
        Retention(duration_s=duration_s)


@pytest.mark.parametrize("priority", [0, 1, 99, 100])
@pytest.mark.parametrize("duration_s", [None, 1e-9, 1, math.inf])
def test_what_is_in_range_is_kept_and_travels(priority, duration_s):
    retention = Retention(priority, duration_s)
    assert (retention.priority, retention.duration_s) == (priority, duration_s)
    assert pickle.loads(pickle.dumps(retention)) == retention  # noqa: S301 - our own bytes


def test_the_default_is_in_the_middle_and_for_ever():
    assert Retention() == DEFAULT_RETENTION == Sequence([1]).retention
    assert (DEFAULT_RETENTION.priority, DEFAULT_RETENTION.duration_s) == (50, None)


# -- its way to the cache ------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def kv(clock):
    config = PoolConfig(num_blocks=9, block_size=SIZE, eviction="priority")
    kv = RankKV(config, clock=clock)
    yield kv
    kv.check_integrity()


def run_of(kv, tokens):
    [(run, _)] = kv.block_manager._cache.find(tokens)
    return run


def start(kv, tokens, retention):
    sequence = Sequence(tokens, retention=retention)
    assert kv.allocate(sequence)
    sequence.kv_state.num_computed_tokens = len(tokens)
    return sequence


def test_a_sequences_wish_reaches_the_run_of_its_blocks(kv):
    wishes = [Retention(90, 5), Retention(10), DEFAULT_RETENTION]
    for index, wish in enumerate(wishes):
        kv.deallocate(start(kv, [index] * 8, wish))
    for index, wish in enumerate(wishes):
        run = run_of(kv, [index] * 8)
        assert run.retention == wish
        assert run.expires_s == (105.0 if index == 0 else math.inf)


@pytest.mark.parametrize("how", ["cache", "deallocate"])
def test_the_time_counts_from_the_publication_not_from_the_admission(kv, clock, how):
    sequence = start(kv, list(range(8)), Retention(90, 5))
    clock.now_s = 160.0
    getattr(kv, how)(sequence)
    assert run_of(kv, list(range(8))).expires_s == 165.0
    if how == "cache":
        kv.deallocate(sequence)


def test_a_fork_wishes_the_same(kv):
    parent = start(kv, list(range(6)), Retention(90, 5))
    child = parent.fork()
    kv.deallocate(parent)
    child.extend([50, 51])
    assert kv.allocate(child)
    kv.get_swap_block_transfer_infos()
    kv.ack_swaps()
    child.kv_state.num_computed_tokens = 8
    kv.deallocate(child)
    assert run_of(kv, [*range(6), 50, 51]).retention == Retention(90, 5)


def test_when_the_time_is_over_blocks_go_like_any_other(kv, clock):
    """By the rank's clock, read at admission."""

    def survives(seconds):
        kv.reset_prefix_cache()
        kv.deallocate(start(kv, [1] * 16, Retention(90, 10)))
        clock.now_s += 1
        kv.deallocate(start(kv, [2] * 16, DEFAULT_RETENTION))
        clock.now_s += seconds
        kv.deallocate_without_cache(start(kv, [3] * 16, DEFAULT_RETENTION))
        return len(kv.block_manager._cache.find([1] * 16)) > 0

    assert survives(5)
    assert not survives(20)
