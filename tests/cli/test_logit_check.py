import copy

import numpy as np
import pytest

from raykv.cli.logit_check import MAX_LOGIT_DIFF, LogitCheck, check_logits
from raykv.config import PoolConfig
from raykv.engine import random_models
from raykv.engine.engine import Engine
from raykv.engine.hf_runner import HFModelRunner
from raykv.rank import RankKV


@pytest.fixture
def engine(tiny_model):
    runner = HFModelRunner(copy.deepcopy(tiny_model), block_size=4)
    config = PoolConfig(num_blocks=64, block_size=4, memory={"device": "cpu"}, model={"path": "x"})
    kv = RankKV(config, 0, runner.kv_spec)
    runner.bind(kv.buffers)
    return Engine(runner, kv, max_num_batched_tokens=16)


@pytest.fixture
def prompt():
    return np.random.default_rng(0).integers(1, 128, 50).tolist()


def test_warm_is_cold_and_a_bad_block_shows(engine, prompt):
    model = engine.model
    check = check_logits(engine, prompt)
    assert check.num_shared_tokens == 48
    assert check.is_equal
    assert check.can_tell
    assert check.max_diff <= MAX_LOGIT_DIFF < check.corrupted_diff
    assert engine.model is model
    assert engine.kv.num_free_blocks() == [63]
    engine.check_integrity()


def test_a_prompt_without_a_full_block_proves_nothing(engine, prompt):
    check = check_logits(engine, prompt[:4])
    assert check.num_shared_tokens == 0
    assert not check.is_equal
    assert not check.can_tell


def test_the_worst_of_several():
    worst = LogitCheck.worst([LogitCheck(10, 8, 1e-5, 2.0), LogitCheck(20, 16, 2e-4, 1e-5)])
    assert worst == LogitCheck(30, 24, 2e-4, 1e-5)
    assert not worst.is_equal
    assert not worst.can_tell
    of_hybrids = [LogitCheck(1, 1, 0, 1, 2.0), LogitCheck(1, 1, 0, 1, 3.0)]
    assert LogitCheck.worst(of_hybrids).lost_state_diff == 2.0


def test_a_lost_state_shows(prompt):
    runner = HFModelRunner(random_models.build("qwen3_5-tiny"), block_size=4)
    config = PoolConfig(
        num_blocks=64,
        block_size=4,
        max_num_seqs=2,
        memory={"device": "cpu"},
        model={"path": "x"},
        linear_state={"num_slots": 8, "match": "deepest", "stride_tokens": 16},
    )
    kv = RankKV(config, 0, runner.kv_spec, runner.state_spec)
    runner.bind(kv.buffers, kv.state_buffers)
    check = check_logits(Engine(runner, kv, max_num_batched_tokens=16), prompt)
    assert check.num_shared_tokens == 48
    assert check.is_equal
    assert check.can_tell
    assert check.lost_state_diff > 100 * MAX_LOGIT_DIFF
    assert kv.linear_state.num_free_slots == 7


def test_the_bad_block_is_one_that_is_reused(prompt):
    """With few slots the state is kept at the prompt's beginning only, and K and V are for all."""
    runner = HFModelRunner(random_models.build("qwen3_5-tiny"), block_size=4)
    config = PoolConfig(
        num_blocks=64,
        block_size=4,
        max_num_seqs=2,
        memory={"device": "cpu"},
        model={"path": "x"},
        linear_state={"num_slots": 4, "stride_tokens": 4},
    )
    kv = RankKV(config, 0, runner.kv_spec, runner.state_spec)
    runner.bind(kv.buffers, kv.state_buffers)
    check = check_logits(Engine(runner, kv, max_num_batched_tokens=16), prompt)
    assert 0 < check.num_shared_tokens < 20
    assert check.is_equal
    assert check.can_tell


def test_a_cache_that_returns_other_blocks_is_found(engine, prompt):
    """The block that holds tokens 8..12 changes between the cold and the warm prefill."""
    publish, storage = engine.kv.cache, engine.kv.buffers.storage

    def publish_and_spoil(sequence, num_tokens=None):
        publish(sequence, num_tokens)
        if sequence.num_tokens == len(prompt) and sequence.kv_state.num_computed_tokens == 50:
            storage[sequence.kv_state.block_ids[2]] += 0.5

    engine.kv.cache = publish_and_spoil
    check = check_logits(engine, prompt)
    assert not check.is_equal


def test_a_cache_that_shares_nothing_proves_nothing(engine, prompt):
    class Deaf:
        """Storage that the noise does not reach."""

        shape = engine.kv.buffers.storage.shape
        __getitem__ = engine.kv.buffers.storage.__getitem__

        def __setitem__(self, index, value):
            pass

    engine.kv.buffers.storage = Deaf()
    check = check_logits(engine, prompt)
    assert check.is_equal
    assert not check.can_tell
