"""Hybrid models and their recurrent state over Ray: hits, a rank that dies, your own scheduler."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np

from raykv import BlockManagerPool, PoolConfig, SamplingParams, Sequence

from .conftest import SETTINGS, wait_until

STATES = {"num_slots": 64, "match": "deepest", "stride_tokens": 32}
SHARED = np.random.default_rng(1).integers(0, 256, 70).tolist()
PROMPTS = [[*SHARED, seed, 7, *range(seed)] for seed in range(6)]


def hybrid(**settings):
    return {
        "dp_size": 2,
        "num_blocks": 400,
        "block_size": 8,
        "model": {"path": "qwen3_5-tiny"},
        "linear_state": STATES,
        "hash_seed": b"seed",
        **settings,
    }


def test_a_hybrid_on_ray_gives_what_one_without_cache_gives_though_a_rank_dies(make_pool):
    plain = PoolConfig(**SETTINGS | hybrid(dp_size=1, enable_prefix_cache=False))
    with BlockManagerPool.local(plain) as local:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        wanted = [output.token_ids for output in local.generate(PROMPTS, params)]
    pool = make_pool(**hybrid())
    for dp_rank in range(2):
        outputs = pool.generate(PROMPTS, params, dp_rank=dp_rank)
        assert [output.token_ids for output in outputs] == wanted
        outputs = pool.generate(PROMPTS, params, dp_rank=dp_rank)
        assert [output.token_ids for output in outputs] == wanted
        assert min(output.num_cached_tokens for output in outputs) >= 64
    stats = pool.stats()
    assert all(rank.state_hits_total >= 6 for rank in stats.ranks)
    assert stats.total.num_live_state_slots == 0
    assert stats.total.state_bytes > 0
    pid = pool.ranks[0].info.pid
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    outputs = pool.generate([[*prompt, 5] for prompt in PROMPTS], params, dp_rank=0)
    killer.join()
    with BlockManagerPool.local(plain) as local:
        others = local.generate([[*prompt, 5] for prompt in PROMPTS], params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in others]
    assert any(output.num_failed_over for output in outputs)
    wait_until(lambda: pool.ranks[0].lost is None, 60)
    pool.check_integrity()


def test_your_own_scheduler_over_ray_hears_of_slots_stops_and_copies(make_pool):
    states = {**STATES, "stride_tokens": 8}
    pool = make_pool(dp_size=1, linear_state=states)
    first = Sequence(range(22))
    assert pool.allocate(first)
    assert first.linear_state_slot
    stops = []
    while first.kv_state.num_computed_tokens < 22:
        stop = pool.next_checkpoint(first) or 22
        first.kv_state.num_computed_tokens = stop
        pool.cache(first)
        stops.append((stop, pool.get_state_transfer_infos()[0]))
        pool.ack_state_transfers()
    live = first.linear_state_slot
    assert [stop for stop, _ in stops] == [8, 16, 20, 22]
    assert [[source for source, _ in copies] for _, copies in stops] == [[live]] * 3 + [[]]
    kept = [copies[0][1] for _, copies in stops[:3]]
    pool.deallocate(first)
    second = Sequence([*range(20), 90, 91])
    assert pool.allocate(second)
    assert second.kv_state.num_computed_tokens == 20
    assert pool.get_state_transfer_infos() == [[(kept[2], second.linear_state_slot)]]
    pool.ack_state_transfers()
    assert pool.stats().total.state_hits_total == 1
    pool.deallocate(second)
    assert pool.stats().total.num_live_state_slots == 0
    pool.check_integrity()
