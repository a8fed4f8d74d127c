"""A real model with few device blocks and a host tier that fails: the outputs of a large pool."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

from raykv import BlockManagerPool, PoolConfig, SamplingParams
from raykv.engine import Engine
from raykv.engine.hf_runner import HFModelRunner
from raykv.engine.worker import RankWorker
from raykv.hierarchy import HierarchyBlockManagerPool
from raykv.local_rank import LocalRank
from raykv.rank import RankKV
from raykv.testing_tiers import FaultyTier, RandomCopyFaults, TierFaults

SIZE = 4
WAIT_S = 60
COPY_FAULTS = {"fail": 0.1, "short": 0.1, "late": 0.1, "corrupt": 0.1}


def make_prompts():
    """Chats: three openings, each with several questions that go on over three turns."""
    rng = np.random.default_rng(4)
    heads = [rng.integers(0, 128, 30) for _ in range(3)]
    prompts = []
    for index in range(9):
        turns = [rng.integers(0, 128, 7) for _ in range(3)]
        prompts += [np.concatenate([heads[index % 3], *turns[: turn + 1]]) for turn in range(3)]
    return [prompts[at].tolist() for at in rng.permutation(len(prompts))]


PROMPTS = make_prompts()
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=5, n=3, logprobs=1)


def make_pool(model, *, num_blocks, host=None, copy_faults=None, word_faults=None):
    """One rank with an engine, and its tier."""
    settings = {} if host is None else {"host": host}
    config = PoolConfig(
        num_blocks=num_blocks,
        block_size=SIZE,
        max_num_seqs=6,
        memory={"device": "cpu", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1},
        **settings,
    ).with_seed()
    runner = HFModelRunner(copy.deepcopy(model), SIZE)
    kv = RankKV(config, spec=runner.kv_spec)
    runner.bind(kv.buffers)
    kv.buffers.storage[1:].fill(float("nan"))  # a slot read before it was written shows
    ranks = [LocalRank(kv, RankWorker(Engine(runner, kv)))]
    if host is None:
        return BlockManagerPool(config, ranks), None
    pool = HierarchyBlockManagerPool(config, ranks)
    tier = FaultyTier(config, word_faults)
    tier.copy_faults = copy_faults
    pool.use_tiers([tier], [0])
    return pool, tier


@contextlib.contextmanager
def serving(model, **settings):
    """A pool that is empty again in the end."""
    pool, tier = make_pool(model, **settings)
    with pool:
        yield pool, tier
        if tier is not None:
            assert pool.wait_for_transfers(WAIT_S), "something is still on its way"
        pool.check_integrity()
        total = pool.stats().total
        assert total.num_used_blocks == 0
        assert total.num_available_blocks == total.num_total_blocks


def serve(pool, times=2):
    """All prompts, several times, plainly and with several samples."""
    outputs = []
    for _ in range(times):
        outputs += pool.generate(PROMPTS, GREEDY)
        outputs += pool.generate(PROMPTS[:4], SAMPLED)
    return outputs


def assert_same(outputs, expected):
    assert len(outputs) == len(expected)
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_ids == other.token_ids
        np.testing.assert_allclose(output.log_probs, other.log_probs, atol=1e-4)


@pytest.fixture(scope="module")
def large(tiny_llama):
    with serving(tiny_llama, num_blocks=2000) as (pool, _):
        return serve(pool)


def test_few_blocks_and_a_host_tier_give_the_outputs_of_many_blocks(tiny_llama, large):
    with serving(tiny_llama, num_blocks=70, host={"num_blocks": 1000}) as (pool, _):
        assert_same(serve(pool), large)
        total = pool.stats().total
        assert total.num_evicted_blocks_total > 100
        assert total.host_hits_total > 0
        assert total.num_tier_faults_total == 0


@pytest.mark.parametrize("seed", range(3))
def test_whatever_goes_wrong_with_the_tier(tiny_llama, large, seed):
    rng = random.Random(seed)
    copy_faults = RandomCopyFaults(rng, **COPY_FAULTS)
    word_faults = TierFaults(rng, lost_call=0.01, lost_reply=0.01)
    settings = {"copy_faults": copy_faults, "word_faults": word_faults}
    host = {"num_blocks": 200, "timeout_s": 0.1}
    with serving(tiny_llama, num_blocks=70, host=host, **settings) as (pool, _):
        assert_same(serve(pool), large)
        total = pool.stats().total
        assert total.host_hits_total > 0
        assert total.num_tier_faults_total > 0
        assert set(copy_faults.counts) == set(COPY_FAULTS)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_ten_minutes_of_random_faults(tiny_llama, large):
    """Every round another seed: copies and words go wrong, and the tier freezes and dies."""
    counts, seed, until = Counter(), 100, time.monotonic() + 600
    while time.monotonic() < until:
        seed += 1
        rng = random.Random(seed)
        copy_faults = RandomCopyFaults(rng, **COPY_FAULTS)
        word_faults = TierFaults(rng, lost_call=0.01, lost_reply=0.01)
        host = {"num_blocks": rng.randrange(40, 400), "timeout_s": 0.1}
        settings = {"num_blocks": rng.randrange(60, 120), "copy_faults": copy_faults}
        with serving(tiny_llama, host=host, **settings) as (pool, tier):
            tier.faults = word_faults  # not before the rank has joined
            deeds = [tier.freeze, tier.thaw, lambda: (tier.kill(), tier.restart()), lambda: None]
            timers = [threading.Timer(rng.random() * 3, rng.choice(deeds)) for _ in range(3)]
            for timer in timers:
                timer.start()
            assert_same(serve(pool), large)
            for timer in timers:
                timer.join()
            tier.thaw()
            tier.faults = None
            total = pool.stats().total
            counts.update(copy_faults.counts)
            counts.update(word_faults.counts)
            counts["noticed"] += total.num_tier_faults_total
            counts["host_hits"] += total.host_hits_total
    sys.stdout.write(f"{seed - 100} rounds: {dict(counts)}\n")
    assert min(counts[kind] for kind in COPY_FAULTS) > 100
    assert counts["noticed"] > 100
    assert counts["host_hits"] > 1000


def test_without_checksums_damage_shows(tiny_llama, large):
    """The negative control: the comparison sees what checksums keep away."""
    faults, host = Blatant(), {"num_blocks": 1000, "checksum_rate": 0.0}
    with serving(tiny_llama, num_blocks=70, host=host, copy_faults=faults) as (pool, tier):
        faults.tier = tier
        with pytest.raises(AssertionError):
            assert_same(serve(pool), large)
        assert faults.num_damaged


class Blatant:
    """Damages all numbers that are loaded: one bit of one of them may pass for rounding."""

    num_damaged = 0

    def on_copy(self, batch):
        if batch.direction == "load":
            slab = self.tier.host._books.slab
            slab.blocks.reshape(slab.num_blocks, -1, 4)[batch.slab_ids, :, 2] ^= 0x40
            self.num_damaged += len(batch)


def test_a_tier_that_freezes_and_dies_meanwhile(tiny_llama, large):
    host = {"num_blocks": 500, "timeout_s": 0.05}
    with serving(tiny_llama, num_blocks=70, host=host) as (pool, tier):
        half = len(large) // 2
        assert_same(serve(pool, times=1), large[:half])
        tier.freeze()
        assert_same(serve(pool, times=1), large[:half])
        tier.thaw()
        tier.kill()
        assert_same(serve(pool, times=1), large[:half])
        tier.restart()
        assert_same(serve(pool), large)
        assert pool.stats().total.host_hits_total > 0


def test_an_idle_rank_joins_a_tier_that_started_again(tiny_llama):
    with serving(tiny_llama, num_blocks=70, host={"num_blocks": 500, "lease_s": 0.2}) as (
        pool,
        tier,
    ):
        pool.generate(PROMPTS[:4], GREEDY)
        assert pool.wait_for_transfers(WAIT_S)
        tier.restart()
        link = pool.ranks[0].kv.tier.link
        deadline = time.monotonic() + WAIT_S
        while not (link.num_lost and link.is_up):
            assert time.monotonic() < deadline, link.last_error
            time.sleep(0.01)
        assert pool.num_blocks_in_host_prefix_cache() == [0]


def test_aborted_requests_give_everything_back(tiny_llama, large):
    host = {"num_blocks": 500}
    with serving(tiny_llama, num_blocks=70, host=host) as (pool, _):
        serve(pool, times=1)

        async def give_up(prompt, after):
            stream = pool.aio.stream(prompt, GREEDY)
            count = 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02 * after):
                    async for _ in stream:
                        count += 1
                        if count > after:
                            break
            await stream.aclose()

        async def all_of_them():
            await asyncio.gather(*(give_up(p, i % 4) for i, p in enumerate(PROMPTS)))

        asyncio.run(all_of_them())
        assert_same(serve(pool, times=1), large[: len(large) // 2])
