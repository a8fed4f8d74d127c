"""Weights versions and sleep of pools that serve a model, in process and over messages."""

from __future__ import annotations

import functools
import gc
import shutil
import threading
import time
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raykv import BlockManagerPool, Namespace, PoolConfig, SamplingParams
from raykv.errors import ConfigError, RankUnavailableError, RequestError
from raykv.testing import loopback_pool

V1 = Namespace(weights_version=1)
SOON_S = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of two models that differ in their weights only."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=512, initializer_range=0.15,
    )  # fmt: skip
    folders = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            folders.append(tmp_path_factory.mktemp("model"))
            LlamaForCausalLM(config).save_pretrained(folders[-1])
    return folders


PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(i, i + 14)) for i in range(4)]
MAKERS = {"local": BlockManagerPool.local, "loopback": loopback_pool}


def model_pool(maker, path, **more):
    settings = {"dp_size": 2, "num_blocks": 200, "block_size": 4, "memory": {"device": "cpu"}}
    return MAKERS[maker](PoolConfig(model={"path": str(path)}, **settings | more))


def token_ids(outputs):
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def wanted(models):
    """What each model says."""
    answers = []
    for path in models:
        with model_pool("local", path) as pool:
            answers.append(token_ids(pool.generate(PROMPTS, PARAMS)))
    assert answers[0] != answers[1]
    return answers


@pytest.fixture(params=MAKERS)
def pool(request, models):
    with model_pool(request.param, models[0]) as pool:
        yield pool
        pool.check_integrity()
        stats = pool.stats().total
        assert stats.num_used_blocks == 0
        assert stats.num_available_blocks == stats.num_total_blocks


def state_of(path):
    return dict(LlamaForCausalLM.from_pretrained(path).state_dict())


def engine_of(rank):
    return rank.worker.engine if hasattr(rank, "worker") else rank.host._worker.engine


@pytest.mark.parametrize("how", ["path", "str", "tensors", "arrays"])
def test_new_weights_serve_on_all_ranks(pool, models, wanted, how):
    assert token_ids(pool.generate(PROMPTS, PARAMS)) == wanted[0]
    new = {
        "path": lambda: models[1],
        "str": lambda: str(models[1] / "model.safetensors"),
        "tensors": lambda: state_of(models[1]),
        "arrays": lambda: {name: t.numpy() for name, t in state_of(models[1]).items()},
    }[how]()
    pool.update_weights(1, new)
    outputs = pool.generate(PROMPTS, PARAMS)
    assert token_ids(outputs) == wanted[1]
    assert {output.dp_rank for output in outputs} == {0, 1}
    for output in outputs:
        assert output.weights_versions == (1,) * 12
        assert output.num_cached_tokens == 0
    again = pool.generate(PROMPTS, PARAMS, namespace=V1)
    assert token_ids(again) == wanted[1]
    pool.update_weights(2, models[0])
    assert token_ids(pool.generate(PROMPTS, PARAMS)) == wanted[0]
    with pytest.raises(RequestError, match=r"asks for weights version 1, but rank . serves 2"):
        pool.generate(PROMPTS[0], PARAMS, namespace=V1)


def test_wrong_weights_change_nothing(pool, models, wanted):
    state = state_of(models[1])
    del state["model.norm.weight"]
    bad = [state, str(models[1] / "config.json"), "no/such/folder", {}]
    for weights in bad:
        with pytest.raises(RequestError):
            pool.update_weights(1, weights)
    assert pool.weights_version() == [0, 0]
    assert [rank.weights_status().result().pending for rank in pool.ranks] == [None, None]
    assert token_ids(pool.generate(PROMPTS, PARAMS)) == wanted[0]


def test_weights_that_one_rank_cannot_read_change_no_rank(pool, models, wanted, monkeypatch):
    def fail(weights):
        raise OSError("not mounted here")

    with monkeypatch.context() as patch:
        patch.setattr(engine_of(pool.ranks[1]).model, "stage", fail)
        with pytest.raises(RequestError, match="not mounted here"):
            pool.update_weights(1, models[1])
    assert pool.weights_version() == [0, 0]
    assert token_ids(pool.generate(PROMPTS, PARAMS)) == wanted[0]
    pool.update_weights(1, models[1])
    assert token_ids(pool.generate(PROMPTS, PARAMS)) == wanted[1]


class Listener:
    """Hears of one request; ``started`` is set with its first token."""

    def __init__(self):
        self.deltas, self.started, self.ended = [], threading.Event(), threading.Event()

    def __call__(self, delta):
        self.deltas.append(delta)
        self.started.set()
        if delta.is_last:
            self.ended.set()

    def output(self):
        assert self.ended.wait(SOON_S)
        return self.deltas[-1].output


def start(pool, prompt, max_tokens=300, rank=0):
    """A long request under way."""
    listener = Listener()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    [request] = pool.make_requests(prompt, params)
    pool.start([request], [listener], rank)
    assert listener.started.wait(SOON_S)
    return listener


@pytest.fixture
def slow(pool, monkeypatch):
    """Lets each step take a while, so that a request is still under way when others happen."""

    def slowed(forward, batch):
        time.sleep(0.005)
        return forward(batch)

    for rank in pool.ranks:
        model = engine_of(rank).model
        monkeypatch.setattr(model, "forward", functools.partial(slowed, model.forward))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_requests_under_way(pool, models, mode):
    running = start(pool, PROMPTS[0])
    pool.update_weights(1, models[1], mode=mode)
    assert pool.weights_version() == [1, 1]
    output = running.output()
    versions = output.weights_versions
    assert len(versions) == len(output.token_ids)
    assert list(versions) == sorted(versions)
    streamed = [delta.weights_version for delta in running.deltas for _ in delta.token_ids]
    assert list(versions) == streamed
    assert set(versions) == ({0, 1} if mode == "keep" else {0})
    assert output.stop_reason == ("abort" if mode == "abort" else "length")
    assert len(versions) < 300 if mode == "abort" else len(versions) == 300


@pytest.mark.usefixtures("slow")
def test_an_update_that_takes_too_long_is_given_up(pool):
    running = start(pool, PROMPTS[0])
    with pytest.raises(RankUnavailableError, match=r"ranks \[0\] did not change weights"):
        pool.update_weights(1, timeout_s=0)
    assert pool.weights_version() == [0, 1], "one had nothing to wait for"
    assert set(running.output().weights_versions) == {0}
    pool.update_weights(1)
    assert pool.weights_version() == [1, 1]


@pytest.mark.parametrize("level", [1, 2])
def test_requests_sleep_and_go_on(pool, models, wanted, level):
    running = start(pool, PROMPTS[0], max_tokens=100)
    alone = pool.generate(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True), dp_rank=1)
    pool.sleep(level)
    assert pool.num_free_blocks() == [199, 199]
    late = Listener()
    [request] = pool.make_requests(PROMPTS[1], PARAMS)
    pool.start([request], [late])
    assert not late.deltas
    pool.wake_up()
    assert running.output().token_ids == alone[0].token_ids
    assert late.output().token_ids == wanted[0][1]
    assert token_ids(pool.generate(PROMPTS, PARAMS)) == wanted[0]


@pytest.mark.usefixtures("slow")
def test_requests_asleep_on_one_rank_put_off_an_update_of_all(pool):
    running = start(pool, PROMPTS[0], max_tokens=200)
    pool.sleep()
    with pytest.raises(RequestError, match="rank 0 sleeps with requests under way"):
        pool.update_weights(1)
    assert pool.weights_version() == [0, 0]
    pool.update_weights(1, mode="keep")
    pool.wake_up()
    assert len(running.output().token_ids) == 200
    assert pool.weights_version() == [1, 1]


def test_weights_that_came_as_arrays_come_again_by_an_update(pool, models, wanted):
    pool.update_weights(1, state_of(models[1]))
    pool.sleep(2)
    with pytest.raises(RequestError, match="kv_cache"):
        pool.wake_up()
    pool.wake_up(["kv_cache"])
    pool.update_weights(2, state_of(models[0]))
    assert token_ids(pool.generate(PROMPTS, PARAMS)) == wanted[0]
    pool.update_weights(3, models[1])
    pool.sleep(2)
    pool.wake_up()
    assert token_ids(pool.generate(PROMPTS, PARAMS)) == wanted[1]


def test_200_rounds_of_sleep_leak_nothing(models, wanted):
    with model_pool("local", models[0], dp_size=1) as pool:
        kv = pool.ranks[0].kv
        seen = []
        for number in range(200):
            [output] = pool.generate(PROMPTS[number % 4], PARAMS)
            assert output.token_ids == wanted[0][number % 4]
            seen.append(weakref.ref(kv.buffers.storage))
            pool.sleep(1 + (number % 50 == 0))
            assert pool.num_free_blocks() == [199]
            pool.wake_up()
        gc.collect()
        assert not any(ref() is not None for ref in seen)
        assert kv.rank_stats().num_free_single_blocks == 256
        pool.check_integrity()
    for thread in threading.enumerate():
        if thread.name == "raykv-weights":  # done, and about to end
            thread.join(SOON_S)
            assert not thread.is_alive()


def test_a_folder_that_is_gone_keeps_the_weights_asleep(models, wanted, tmp_path):
    folder = shutil.copytree(models[0], tmp_path / "model")
    with model_pool("local", folder) as pool:
        pool.sleep(2)
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="cannot load the model"):
            pool.wake_up()
        assert [rank.weights_status().result().asleep for rank in pool.ranks] == [("weights",)] * 2
        (tmp_path / "elsewhere").rename(folder)
        pool.wake_up()
        assert token_ids(pool.generate(PROMPTS, PARAMS)) == wanted[0]
