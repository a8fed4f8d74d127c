"""Requests and weights over a rank's loss: outputs do not change, and versions do not mix."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from raykv import SamplingParams
from raykv.testing import MortalHost, loopback_driver

from .test_sessions import config, make_sequence


@pytest.fixture
def hosts():
    made = [MortalHost(config(dp_size=2), rank) for rank in range(2)]
    yield made
    for host in made:
        host.close()


@pytest.fixture
def pool(hosts):
    return loopback_driver(hosts)


# -- generation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_goes_on_elsewhere_with_equal_outputs(model, how, temperature):
    settings = config(dp_size=2, num_blocks=400, model={"path": model})
    prompts = [[1 + i, 2, 3, 4 + i, 5] for i in range(4)]
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=3, logprobs=2, ignore_eos=True
    )
    calm = loopback_driver([MortalHost(settings, rank) for rank in range(2)])
    expected = calm.generate(prompts, params)
    calm.close()
    made = [MortalHost(settings, rank) for rank in range(2)]
    pool = loopback_driver(made)
    found = []
    thread = threading.Thread(target=lambda: found.extend(pool.generate(prompts, params)))
    thread.start()
    deadline = time.monotonic() + 30
    while made[0].host._worker.engine.stats().num_generated_tokens < 20:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    getattr(made[0], how)()
    thread.join(60)
    assert not thread.is_alive()
    assert pool.generations.num_failed_over > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert np.allclose(mine.log_probs, theirs.log_probs, atol=1e-4)
        assert len(mine.top_log_probs) == 60
        assert mine.dp_rank == 1
    assert {output.num_failed_over for output in found} == {0, 1}
    if how == "freeze":
        made[0].thaw()
        pool.monitor.beat()
    else:
        made[0].restart()
        pool.monitor.beat()
    assert pool.num_used_blocks() == [0, 0]
    assert pool.generate(prompts, params, dp_rank=0)[0].token_ids == expected[0].token_ids
    pool.check_integrity()
    pool.close()


# -- weights ---------------------------------------------------------------------------------------


def versions(hosts):
    return [host.host._kv.weights_version for host in hosts]


def test_a_rank_that_is_back_serves_the_weights_of_the_others_before_it_is_used(model):
    settings = config(dp_size=2, num_blocks=100, model={"path": model})
    made = [MortalHost(settings, rank) for rank in range(2)]
    pool = loopback_driver(made)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    before = pool.generate([1, 2, 3], params, dp_rank=1)[0]
    made[0].kill()
    pool.monitor.beat()
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - seconds

    weights = LlamaForCausalLM.from_pretrained(model).state_dict()
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    pool.update_weights(3, weights)
    assert pool.weights_version() == [-1, 3]
    expected = pool.generate([1, 2, 3], params, dp_rank=1)[0]
    assert expected.token_ids != before.token_ids, "the new weights must matter"
    made[0].restart()
    assert versions(made) == [0, 3]
    pool.monitor.beat()
    assert pool.weights_version() == versions(made) == [3, 3]
    again = pool.generate([1, 2, 3], params, dp_rank=0)[0]
    assert (again.token_ids, again.dp_rank) == (expected.token_ids, 0)
    assert set(again.weights_versions) == {3}
    pool.close()


def test_a_rank_that_cannot_be_brought_up_to_date_is_not_used(hosts, pool, monkeypatch):
    hosts[0].kill()
    pool.monitor.beat()
    pool.update_weights(2)
    hosts[0].restart()
    with monkeypatch.context() as patch:

        def fail(rank):
            raise OSError("the folder is gone")

        patch.setattr(pool.ranks[0], "welcome", fail)
        pool.monitor.beat()
        assert pool.ranks[0].lost
        assert pool.select_rank(make_sequence(4)) == 1
    pool.monitor.beat()
    assert pool.ranks[0].lost is None
    assert pool.weights_version() == [2, 2]


def test_a_second_welcome_is_not_answered_with_the_answers_of_the_first(hosts, pool, monkeypatch):
    heard = []

    def welcome(rank):
        if not heard:
            heard.append(rank.weights_status().result())
            raise OSError("not yet")
        heard.append(rank.retire(0).result())

    hosts[0].kill()
    pool.monitor.beat()
    hosts[0].restart()
    monkeypatch.setattr(pool.ranks[0], "welcome", welcome)
    pool.monitor.beat()
    assert pool.ranks[0].lost
    pool.monitor.beat()
    assert pool.ranks[0].lost is None
    assert heard[1] == 0, "how much is evictable, not the status that was asked for before"


def test_an_update_goes_on_without_a_rank_that_is_lost_in_its_midst(hosts, pool, monkeypatch):
    apply = type(pool.ranks[1]).apply_weights

    def die(rank, version):
        hosts[1].kill()
        return apply(rank, version)

    monkeypatch.setattr(pool.ranks[1], "apply_weights", lambda *a: die(pool.ranks[1], *a))
    pool.update_weights(5)
    assert pool.weights_version() == [5, -1]
    monkeypatch.undo()
    hosts[1].restart()
    pool.monitor.beat()
    assert pool.weights_version() == [5, 5]
