"""Cache-aware routing end to end: what engines compute when prompts are sent to several ranks."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from raykv import BlockManagerPool, Namespace, PoolConfig, SamplingParams, Sequence
from raykv.engine import Engine
from raykv.errors import RankUnavailableError
from raykv.generation import collect
from raykv.rank import RankKV
from raykv.routing_policy import RoutingPolicy
from raykv.testing import loopback_pool

from .test_engine import VOCAB, HashModel
from .test_generations import wait_until

SIZE = 16
AWARE = {"policy": "cache_aware"}


class LongModel(HashModel):
    max_model_len = 2048


class AffinityPolicy(RoutingPolicy):
    """Where most is cached, whatever else waits there."""

    wants_hits = True

    def choose(self, ranks, wanted):
        return max(ranks, key=lambda view: view.num_hit_tokens).rank


AFFINITY = {"policy": f"{__name__}:AffinityPolicy"}


@pytest.fixture(params=["local", "loopback"])
def make_pool(request, monkeypatch):
    """Pools whose ranks run a toy model; they must be empty and at peace in the end."""
    made = []

    def build(config, dp_rank):
        kv = RankKV(config, dp_rank)
        engine = Engine(LongModel(config.num_blocks, config.block_size), kv)
        made[-1][1].append(engine)
        return kv, engine

    monkeypatch.setattr("raykv.pool.build_rank", build)
    monkeypatch.setattr("raykv.rank_host.build_rank", build)

    def make(dp_size, routing, **settings):
        values = {"num_blocks": 1024, "block_size": SIZE, "max_model_len": 2048, **settings}
        make_one = BlockManagerPool.local if request.param == "local" else loopback_pool
        engines = []
        made.append([None, engines])
        made[-1][0] = make_one(PoolConfig(dp_size=dp_size, routing=routing, **values))
        return made[-1][0], engines

    yield make
    for pool, _ in made:
        pool.check_integrity()
        router = pool._router
        assert router.debits == router.work == [0] * len(pool.ranks)
        pool.close()


def tokens_of(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, num_tokens).tolist()


def generate(pool, prompts, max_tokens=16, **params):
    return pool.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))


def num_prefilled(engines, outputs):
    """Prompt tokens that went through the models; a last token is never computed."""
    num_decoded = sum(len(output.token_ids) - 1 for output in outputs)
    return sum(engine.stats().num_computed_tokens for engine in engines) - num_decoded


@pytest.mark.parametrize(("routing", "once"), [(AWARE, True), ({}, False)])
def test_equal_prompts_sent_at_once_are_computed_once(make_pool, routing, once):
    pool, engines = make_pool(2, routing)
    outputs = generate(pool, [tokens_of(1000)] * 8)
    assert len({output.token_ids for output in outputs}) == 1
    assert (num_prefilled(engines, outputs) <= 1.1 * 1000) == once


@pytest.mark.parametrize(
    ("routing", "spreads"), [(AWARE, True), (AFFINITY, False)], ids=["aware", "affinity"]
)
def test_a_shared_prefix_spreads_over_ranks_and_still_hits(make_pool, routing, spreads):
    pool, engines = make_pool(4, routing)
    shared = tokens_of(512)
    prompts = [shared + tokens_of(64, seed) for seed in range(1, 65)]
    outputs = generate(pool, prompts)
    loads = [0] * 4
    for output in outputs:
        loads[output.dp_rank] += 64 + 16 + 512
    assert (max(loads) <= 1.3 * np.mean(loads)) == spreads
    num_hits = sum(output.num_cached_tokens for output in outputs)
    assert num_hits >= 0.9 * 63 * 512
    assert num_prefilled(engines, outputs) == 64 * 576 - num_hits
    if not spreads:
        assert num_hits == 63 * 512, "what affinity alone gets"


def test_a_conversation_returns_to_the_rank_that_holds_its_last_answer(make_pool):
    pool, _ = make_pool(2, AWARE)
    [first] = generate(pool, [tokens_of(40)], max_tokens=41)
    generate(pool, [tokens_of(100, 1)])
    turn = [*tokens_of(40), *first.token_ids, *tokens_of(30, 2)]
    [second] = generate(pool, [turn])
    assert second.dp_rank == first.dp_rank == 0
    assert second.num_cached_tokens == 80
    assert pool._router._digests[0].num_known(pool._router.read(turn, Namespace()).names) == 6


def test_samples_of_a_prompt_stay_together(make_pool):
    pool, engines = make_pool(2, AWARE)
    outputs = generate(pool, [tokens_of(100), tokens_of(100, 1)], n=4, temperature=1.0, seed=3)
    assert [output.dp_rank for output in outputs] == [0] * 4 + [1] * 4
    assert num_prefilled(engines, outputs) == 200


def test_a_reset_is_known_at_once(make_pool):
    pool, _ = make_pool(2, AWARE)
    prompt = tokens_of(100)
    assert [generate(pool, [prompt])[0].dp_rank for _ in range(2)] == [0, 0]
    pool.reset_prefix_cache()
    other = Sequence(tokens_of(50, 1))
    other.dp_rank = 0
    assert pool.allocate(other)
    assert generate(pool, [prompt])[0].dp_rank == 1, "the rank with more blocks to give"
    pool.deallocate(other)


def test_what_a_rank_lost_behind_the_drivers_back_is_noticed(make_pool):
    pool, _ = make_pool(1, AWARE)
    shared = tokens_of(64)
    turns = [shared + tokens_of(64, seed) for seed in (1, 2)]
    generate(pool, turns)
    router = pool._router
    believed = [router._num_hits(0, router.read(turn, Namespace())) for turn in turns]
    assert believed == [7, 7]
    pool.ranks[0].reset_prefix_cache().result()  # another driver's doing
    [output] = generate(pool, turns[:1])
    assert output.num_cached_tokens == 0
    believed = [router._num_hits(0, router.read(turn, Namespace())) for turn in turns]
    assert believed == [7, 4], "what followed the lost prefix must be gone, too"


def test_requests_of_a_lost_rank_are_credited_and_its_cache_is_forgotten(make_pool):
    pool, _ = make_pool(2, AWARE, ray={"on_rank_loss": "report"})
    deltas = queue.SimpleQueue()
    requests = pool.make_requests(
        [tokens_of(100)] * 2, SamplingParams(max_tokens=1900, ignore_eos=True)
    )
    pool.start(requests, [deltas.put] * 2, dp_rank=0)
    assert len(pool._router._digests[0]) == 6
    assert pool._router.work[0] > 0
    pool.ranks[0].close()
    with pytest.raises(RankUnavailableError):
        collect(deltas, 2)
    wait_until(lambda: pool._router.work == pool._router.debits == [0, 0])
    pool._router.check_integrity()
    assert len(pool._router._digests[0]) == 0
    pool.check_integrity = lambda: None  # the fixture's look, which finds a rank closed


def test_an_allocation_goes_where_its_prefix_was_generated(make_pool):
    pool, _ = make_pool(2, AWARE)
    generate(pool, [tokens_of(100, 1), tokens_of(200)])
    sequence = Sequence(tokens_of(200))
    assert pool.select_rank(sequence) == 1
    assert pool.allocate(sequence)
    assert (sequence.dp_rank, sequence.kv_state.num_computed_tokens) == (1, 192)
    pool.deallocate_without_cache(sequence)
