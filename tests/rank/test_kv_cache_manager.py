from __future__ import annotations

import numpy as np
import pytest

from raykv.core import Request, Sequence
from raykv.core.kv_cache_manager import (
    KVCacheManager,
    PoolStats,
    RankStats,
    flatten,
    token_targets,
)


def sequences(count):
    return [Sequence([1] * (index + 1), seq_id=index) for index in range(count)]


def test_flatten_keeps_the_order_of_sequences_and_requests():
    a, b, c, d = sequences(4)
    assert flatten(a) == [a]
    assert flatten(Request([b, a])) == [b, a]
    assert flatten([c, Request([a, b]), d]) == [c, a, b, d]
    assert flatten(iter([c, d])) == [c, d]
    assert flatten([]) == []
    assert flatten(Request([])) == []


def test_flatten_gives_a_list_of_its_own():
    request = Request(sequences(2))
    flatten(request).clear()
    assert len(request.sequences) == 2


@pytest.mark.parametrize("twice", ["list", "list and request", "two requests", "request"])
def test_a_sequence_listed_twice_is_refused(twice):
    a, b = sequences(2)
    listed = {
        "list": [a, b, a],
        "list and request": [a, Request([b, a])],
        "two requests": [Request([a]), Request([b, a])],
        "request": Request([a, a]),
    }[twice]
    with pytest.raises(ValueError, match="listed twice"):
        flatten(listed)


@pytest.mark.parametrize("wrong", [[1, 2], ["x"], [None], [np.zeros(3)]])
def test_anything_else_is_refused_by_type(wrong):
    with pytest.raises(TypeError, match=type(wrong[0]).__name__):
        flatten(wrong)


def test_token_targets():
    members = sequences(3)
    assert token_targets(members, None) == [1, 2, 3]
    assert token_targets(members, 7) == token_targets(members, np.int64(7)) == [7, 7, 7]
    assert token_targets(members, [4, 5, 6]) == [4, 5, 6]
    assert token_targets(members, iter([4, 5, 6])) == [4, 5, 6]
    assert token_targets([], None) == token_targets([], 3) == token_targets([], []) == []
    with pytest.raises(ValueError, match="2 token counts for 3 sequences"):
        token_targets(members, [4, 5])


def test_rank_stats_derive_the_rest():
    stats = RankStats(
        num_total_blocks=20,
        num_free_blocks=7,
        num_used_blocks=5,
        num_evictable_blocks=6,
        prefix_cache_queries_total=40,
        prefix_cache_hits_total=10,
    )
    assert stats.num_available_blocks == 13
    assert stats.num_pending_blocks == 2
    assert stats.kv_cache_usage_perc == 0.25
    assert stats.hit_rate == 0.25
    assert RankStats().hit_rate == RankStats().kv_cache_usage_perc == 0.0


def test_pool_stats_add_up_over_ranks():
    names = RankStats.__dataclass_fields__
    one = RankStats(**{name: index for index, name in enumerate(names, 1)})
    ten = RankStats(**{name: 10 * index for index, name in enumerate(names, 1)})
    total = PoolStats((one, ten)).total
    assert [getattr(total, name) for name in names] == [11 * i for i in range(1, len(names) + 1)]


def test_the_interface_is_the_seeds():
    wanted = {
        "allocate", "try_allocate", "deallocate", "deallocate_without_cache", "allocate_shared",
        "cache", "num_free_blocks", "num_used_blocks", "num_available_blocks",
        "num_blocks_in_prefix_cache", "kv_cache_utilization", "reset_prefix_cache", "stats",
        "check_integrity", "fork", "get_swap_block_transfer_infos", "ack_swaps", "explain",
        "get_state_transfer_infos", "ack_state_transfers",
    }  # fmt: skip
    assert wanted <= set(dir(KVCacheManager))
    assert KVCacheManager.__abstractmethods__ == wanted - {"try_allocate"}
