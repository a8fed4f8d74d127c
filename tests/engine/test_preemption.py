"""Real transformers models in pools that are too small: the outputs of a large one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers

from raykv.config import PoolConfig
from raykv.engine import Engine, GenerationRequest, SamplingParams
from raykv.engine.hf_runner import HFModelRunner
from raykv.rank import RankKV


def serve(runner, requests, *, num_blocks, block_size=4, budget=512, tamper=None, **config):
    """Run all requests, ``tamper``ed with before each step; their outputs by id, and the engine."""
    kv = RankKV(
        PoolConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            memory={
                "device": "cpu",
                "num_layers": 1,
                "num_kv_heads": 1,
                "head_dim": 1,
            },
            **config,
        ),
        spec=runner.kv_spec,
    )
    runner.bind(kv.buffers)
    kv.buffers.storage[1:].fill(float("nan"))  # a slot read before it was written shows
    engine = Engine(runner, kv, max_num_batched_tokens=budget)
    engine.submit(requests)
    outputs = {}
    for step in range(3000):
        if not engine.has_work:
            break
        if tamper is not None:
            tamper(engine, step)
        for _, delta in engine.step():
            assert delta.error is None, delta.error
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check_integrity()
    assert len(outputs) == len(requests)
    stats = kv.rank_stats()
    assert stats.num_used_blocks == 0
    assert stats.num_available_blocks == stats.num_total_blocks
    return outputs, engine


def request(name, tokens, **params):
    params = SamplingParams(**{"ignore_eos": True, "logprobs": 1, **params})
    return GenerationRequest(name, np.asarray(tokens, np.int32), params)


def continue_plainly(model, tokens, count):
    """Greedy tokens of transformers itself, and the least distance of the two best logits."""
    row, margin = list(tokens), np.inf
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([row])).logits[0, -1]
            best = torch.topk(logits, 2).values
            margin = min(margin, float(best[0] - best[1]))
            row.append(int(logits.argmax()))
    return tuple(row[len(tokens) :]), margin


def assert_same_outputs(some, others):
    for name, output in some.items():
        assert output.token_ids == others[name].token_ids, name
        assert output.stop_reason == others[name].stop_reason
        np.testing.assert_allclose(output.log_probs, others[name].log_probs, atol=1e-4)


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(1)
    head = rng.integers(0, 128, 14)
    return [
        request(
            f"r{i}",
            np.concatenate([head[: rng.integers(0, 15)], rng.integers(0, 128, 1 + 3 * (i % 5))]),
            max_tokens=12 + i,
            temperature=1.0 if i % 3 == 2 else 0.0,
            seed=i,
        )
        for i in range(10)
    ]


@pytest.fixture(scope="module")
def large(tiny_llama, requests):
    outputs, engine = serve(HFModelRunner(copy.deepcopy(tiny_llama), 4), requests, num_blocks=400)
    assert engine.stats().num_preemptions == 0
    return outputs


def test_a_large_pool_writes_what_transformers_writes(tiny_llama, requests, large):
    for asked in requests:
        if asked.params.temperature == 0:
            wanted, margin = continue_plainly(
                tiny_llama, asked.token_ids.tolist(), asked.params.max_tokens
            )
            assert margin > 1e-4, "choose another seed: a near tie tells nothing"
            assert large[asked.request_id].token_ids == wanted


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize(("num_blocks", "budget"), [(14, 512), (20, 7), (28, 64)])
def test_a_small_pool_gives_the_outputs_of_a_large_one(
    tiny_llama, requests, large, num_blocks, budget, cache
):
    outputs, engine = serve(
        HFModelRunner(copy.deepcopy(tiny_llama), 4),
        requests,
        num_blocks=num_blocks,
        budget=budget,
        enable_prefix_cache=cache,
    )
    assert_same_outputs(outputs, large)
    count = engine.stats().num_preemptions
    assert count == sum(output.num_preempted for output in outputs.values()) > 0
    assert outputs["r0"].num_preempted == 0


def test_swapped_values_would_show(tiny_llama, requests, large):
    """The negative control: the comparison sees a wrong block."""

    def swap(engine, step):
        if step == 5:
            first, second = engine.scheduler.running[0].sequence.kv_state.block_ids[:2].tolist()
            values = engine.kv.buffers.torch_view(1, "v")
            values[[first, second]] = values[[second, first]]

    runner = HFModelRunner(copy.deepcopy(tiny_llama), 4)
    outputs, _ = serve(runner, requests[:4], num_blocks=400, tamper=swap)
    with pytest.raises(AssertionError):
        assert_same_outputs(outputs, large)


@pytest.mark.model
def test_the_real_model_in_a_pool_too_small(smollm2_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    system = "You are a helpful guide who knows rivers, mountains and cities, and answers briefly."
    questions = [
        "Name three rivers of Europe.",
        "Which mountain is the highest?",
        "What is the capital of Peru, and what is it known for?",
        "Why is the sea salty?",
        "How many moons has Mars?",
    ]
    asked = []
    for i, question in enumerate(questions):
        chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        asked.append(request(f"r{i}", tokens, max_tokens=24))
    runner = HFModelRunner.load(smollm2_path, block_size=16)
    runs = {
        num_blocks: serve(runner, asked, num_blocks=num_blocks, block_size=16, max_model_len=150)
        for num_blocks in (100, 13)
    }
    (large, calm), (small, busy) = runs[100], runs[13]
    assert calm.stats().num_preemptions == 0
    assert busy.stats().num_preemptions > 0
    assert sum(output.num_preempted for output in small.values()) > 0
    assert_same_outputs(small, large)
    assert len({output.token_ids for output in large.values()}) == len(questions)
