"""A hybrid model whose device keeps little: KV and checkpoints come back from the host."""

from __future__ import annotations

import random
import time

import pytest

from raykv import BlockManagerPool, HierarchyBlockManagerPool, PoolConfig, SamplingParams
from raykv.testing_tiers import FaultyTier, RandomCopyFaults

BLOCK, STRIDE, WAIT_S = 4, 16, 20
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
ROUNDING = 1e-4


def make_config(num_blocks, num_slots, match="deepest", **settings):
    return PoolConfig(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=4,
        model={"path": "qwen3_5-tiny"},
        linear_state={"num_slots": num_slots, "match": match, "stride_tokens": STRIDE},
        **settings,
    )


def converse(pool, num_turns=3):
    """Five conversations in turns; log-probabilities, and tokens that were cached."""
    rng = random.Random(5)
    chats = [[rng.randrange(1, 200) for _ in range(120)] for _ in range(5)]
    log_probs, cached = [], []
    for _ in range(num_turns):
        for chat in chats:
            [output] = pool.generate([chat], PARAMS)
            if isinstance(pool, HierarchyBlockManagerPool):
                # Else the next one may call it off: the device holds two.
                assert pool.wait_for_transfers(WAIT_S)
            chat += [*output.token_ids, 7, 8, 9]
            log_probs.append(output.log_probs)
            cached.append(output.num_cached_tokens)
    return log_probs, cached


@pytest.fixture(scope="module")
def expected():
    with BlockManagerPool.local(make_config(1000, 100)) as pool:
        return converse(pool)[0]


def make_pool(match="deepest", faults=None, **host):
    host = {"num_blocks": 600, "num_state_slots": 80, **host}
    config = make_config(70, 8, match, host=host).with_seed()
    tier = FaultyTier(config)
    tier.copy_faults = faults
    return HierarchyBlockManagerPool.local(config, [tier])


def furthest(log_probs, expected):
    """The largest difference; infinite where tokens cannot even be compared."""
    pairs = zip(log_probs, expected, strict=True)
    return max(abs(x - y) for one, other in pairs for x, y in zip(one, other, strict=True))


def check_drained(pool):
    deadline = time.monotonic() + WAIT_S
    while not pool.ranks[0].kv.tier.is_idle:
        assert time.monotonic() < deadline, pool.stats()
        time.sleep(0.005)
    pool.check_integrity()
    [blocks], [states] = pool.host_stats(), pool.host_state_stats()
    assert (blocks.storing, blocks.pinned, states.storing, states.pinned) == (0, 0, 0, 0)
    total = pool.stats().total
    assert total.num_used_blocks == total.num_live_state_slots == 0
    return blocks, states


@pytest.mark.parametrize("match", ["deepest", "contiguous"])
def test_conversations_go_on_from_checkpoints_of_the_host(match, expected):
    with make_pool(match) as pool:
        log_probs, cached = converse(pool)
        assert furthest(log_probs, expected) < ROUNDING
        assert min(cached[5:]) >= 100, cached  # all that came back, but for a stride at most
        _, states = check_drained(pool)
        assert states.loaded_total >= 8
        assert pool.stats().total.host_hits_total >= 8 * 100


def test_faults_of_copies_cost_hits_and_nothing_else(expected):
    faults = RandomCopyFaults(random.Random(2), fail=0.1, short=0.1, late=0.1, corrupt=0.15)
    with make_pool(faults=faults, timeout_s=0.2) as pool:
        for _ in range(3):
            log_probs, _ = converse(pool)
            assert furthest(log_probs, expected) < ROUNDING
        blocks, states = check_drained(pool)
        assert min(faults.counts.values()) > 0
        assert blocks.corrupt + states.corrupt > 0
        assert pool.stats().total.num_tier_faults_total > 0


@pytest.mark.parametrize("part", ["slab", "states_slab"])
def test_without_checksums_damage_shows(part, expected):
    """The control: the comparison notices wrong KV, and a wrong state, from the host."""
    with make_pool(checksum_rate=0.0) as pool:
        first, _ = converse(pool, 1)
        check_drained(pool)
        getattr(pool.tiers[0].host._books, part).blocks[1:] ^= 0x55
        log_probs, cached = converse(pool, 1)
        assert min(cached) >= 100
        assert furthest(first, expected[:5]) < ROUNDING
        assert furthest(log_probs, expected[:5]) > ROUNDING
