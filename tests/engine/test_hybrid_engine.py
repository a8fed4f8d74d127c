"""The engine over hybrid models: batches, hits, preemption and forks change no logit.

Every row of logits that a token was chosen from is compared with the plain model of transformers,
run over the sequence in one piece.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from raykv.config import PoolConfig
from raykv.engine import random_models
from raykv.engine.engine import Engine
from raykv.engine.hf_runner import HFModelRunner
from raykv.engine.params import GenerationRequest, SamplingParams
from raykv.errors import ConfigError
from raykv.rank import RankKV

BLOCK = 8
ROUNDING, CLEAR = 1e-5, 1e-2


@pytest.fixture(scope="module", params=["qwen3_5-tiny", "qwen3_next-tiny"])
def model(request):
    return random_models.build(request.param)


class Recording(Engine):
    """Keeps the logits of each token that was chosen, by request, sample and position."""

    def _advance(self, task, logits, now):
        key = task.request.request_id, task.request.sample_index, task.sequence.num_tokens
        self.seen[key] = logits.copy()
        return super()._advance(task, logits, now)


class Serving:
    def __init__(self, model, *, num_blocks=200, num_slots=64, **states):
        self.model = model
        runner = HFModelRunner(copy.deepcopy(model), block_size=BLOCK)
        values = {"match": "deepest", "stride_tokens": 32, "num_slots": num_slots, **states}
        config = PoolConfig(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_num_seqs=8,
            memory={"device": "cpu"},
            model={"path": "x"},
            linear_state=values,
        )
        self.kv = RankKV(config, 0, runner.kv_spec, runner.state_spec)
        # Whatever was not written is all NaN, and would show.
        self.kv.state_buffers.slots[1:] = self.kv.state_buffers.live[1:] = 0xFF
        runner.bind(self.kv.buffers, self.kv.state_buffers)
        self.engine = Recording(runner, self.kv, max_num_batched_tokens=48)
        self.engine.seen = {}
        self.outputs = {}

    def submit(self, prompts, prefix="", **params):
        params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params})
        self.engine.submit(
            [
                GenerationRequest(f"{prefix}{name}", np.array(prompt, np.int32), params)
                for name, prompt in prompts.items()
            ]
        )

    def run(self, steps=None):
        """Step until all is answered, or some steps; books must balance after each."""
        while self.engine.has_work and steps != 0:
            for _, delta in self.engine.step():
                if delta.error is not None:
                    raise delta.error
                if delta.output is not None:
                    key = delta.output.request_id, delta.output.sample_index
                    self.outputs[key] = delta.output
            self.engine.check_integrity()
            steps = None if steps is None else steps - 1

    def worst(self, prompts):
        """The largest difference of any logits from the plain model's, and how many rows it saw."""
        worst = num_rows = 0
        for (name, _sample), output in self.outputs.items():
            prompt = prompts[name]
            tokens = np.concatenate((prompt, output.token_ids)).astype(np.int64)
            with torch.inference_mode():
                plain = self.model(torch.from_numpy(tokens)[None]).logits[0].numpy()
            for position in range(len(prompt), len(tokens)):
                found = self.engine.seen[name, output.sample_index, position]
                worst = max(worst, float(np.abs(found - plain[position - 1]).max()))
                num_rows += 1
        return worst, num_rows


def draw(seed, count):
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def ragged():
    """Eight prompts of all lengths: three share a beginning, two are equal, the others are new."""
    shared = draw(1, 61)
    return {
        "a": shared + draw(2, 30),
        "b": shared + draw(3, 7),
        "c": shared[:40] + draw(4, 90),
        "d": draw(5, 1),
        "e": draw(6, 8),
        "f": draw(7, 150),
        "g": draw(8, 33),
        "h": draw(8, 33),
    }


def test_a_ragged_batch_gives_the_logits_of_one_by_one(model):
    serving, prompts = Serving(model), ragged()
    serving.submit(prompts)
    serving.run()
    again = {f"again {name}": prompt for name, prompt in prompts.items()}
    serving.submit(again)
    serving.run()
    worst, num_rows = serving.worst(prompts | again)
    assert num_rows == 2 * 8 * 12
    assert worst < ROUNDING
    hits = {name: output.num_cached_tokens for (name, _), output in serving.outputs.items()}
    assert hits["a"] == hits["f"] == 0, "misses"
    assert hits["h"] == 32, "its equal was computed first"
    for name, prompt in prompts.items():
        assert hits[f"again {name}"] == (len(prompt) - 1) // BLOCK * BLOCK
    stats = serving.kv.rank_stats()
    assert stats.state_hits_total >= 8
    assert stats.num_live_state_slots == 0


def test_preemption_changes_no_logit(model):
    serving, prompts = Serving(model, num_blocks=40), ragged()
    serving.submit(prompts, max_tokens=24)
    serving.run()
    assert sum(output.num_preempted for output in serving.outputs.values()) > 0
    worst, num_rows = serving.worst(prompts)
    assert num_rows == 8 * 24
    assert worst < ROUNDING


@pytest.mark.parametrize("num_slots", [9, 12])
def test_few_slots_cost_hits_and_nothing_else(model, num_slots):
    serving, prompts = Serving(model, num_slots=num_slots), ragged()
    for turn in range(2):
        serving.submit(prompts, prefix=f"{turn} ")
        serving.run()
    named = {f"{turn} {name}": prompt for turn in range(2) for name, prompt in prompts.items()}
    worst, num_rows = serving.worst(named)
    assert num_rows == 2 * 8 * 12
    assert worst < ROUNDING
    assert serving.kv.rank_stats().state_skipped_total > 0


def test_forks_go_on_from_a_copy_of_their_parents_state(model):
    serving = Serving(model)
    prompt = draw(9, 75)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=3, ignore_eos=True)
    tokens = np.array(prompt, np.int32)
    serving.engine.submit(
        [
            GenerationRequest(f"{index}", tokens, params, sample_index=index, prompt_id="p")
            for index in range(3)
        ]
    )
    serving.run()
    texts = {output.token_ids for output in serving.outputs.values()}
    assert len(texts) == 3
    assert serving.engine.stats().num_computed_tokens < 75 + 3 * 20, "the prompt once"
    worst, num_rows = serving.worst(dict.fromkeys("012", prompt))
    assert num_rows == 60
    assert worst < ROUNDING


def test_an_abort_at_any_step_leaves_nothing(model):
    prompts = ragged()
    for num_steps in (0, 2, 5):
        serving = Serving(model, num_blocks=60)
        serving.submit(prompts)
        serving.run(num_steps)
        serving.engine.abort(["a", "c", "f", "h"])
        serving.run()
        stats = serving.kv.rank_stats()
        assert stats.num_live_state_slots == stats.num_used_blocks == stats.num_pending_blocks == 0
        slots = serving.kv.linear_state
        assert slots.num_free_slots + slots.num_reclaimable == slots.num_total_slots
        kept = {key: out for key, out in serving.outputs.items() if out.stop_reason != "abort"}
        serving.outputs = kept
        assert len(kept) == 4
        assert serving.worst(prompts)[0] < ROUNDING


@pytest.mark.parametrize("rule", ["at_stride", "at_prompt_end", "at_generation_end", "at_branch"])
def test_each_rule_can_be_switched_off(model, rule):
    serving, prompts = Serving(model, **{rule: False}), ragged()
    serving.submit(prompts)
    serving.run()
    assert serving.worst(prompts)[0] < ROUNDING


def test_a_conversation_goes_on_from_its_last_block(model):
    """What was generated is resumed from, however the end lies to the blocks."""
    for max_tokens in (8, 9, 10):
        serving = Serving(model, at_stride=False, at_prompt_end=False, at_branch=False)
        prompt = draw(11, 40)
        serving.submit({"first": prompt}, max_tokens=max_tokens)
        serving.run()
        [answer] = serving.outputs.values()
        longer = [*prompt, *answer.token_ids, *draw(12, 9)]
        serving.outputs.clear()
        serving.submit({"second": longer})
        serving.run()
        [output] = serving.outputs.values()
        num_computed = len(prompt) + max_tokens - 1  # the last token was never computed
        assert output.num_cached_tokens == num_computed // BLOCK * BLOCK
        assert serving.worst({"second": longer})[0] < ROUNDING


def test_checkpoints_in_fewer_bits_are_close(model):
    """Measured: bfloat16 some 1e-3, int8 some 1e-2 in logits of order one; never exact."""
    errors = {}
    for dtype in ("bfloat16", "int8"):
        serving, prompts = Serving(model, checkpoint_dtype=dtype), ragged()
        for turn in range(2):
            serving.submit(prompts, prefix=f"{turn} ")
            serving.run()
        named = {f"{turn} {name}": prompt for turn in range(2) for name, prompt in prompts.items()}
        errors[dtype], _ = serving.worst(named)
    assert ROUNDING < errors["bfloat16"] < errors["int8"] < 0.3


# -- negative controls -----------------------------------------------------------------------------


def zeroed(buffers, sources, targets):
    buffers.slots[targets] = 0


def neighbours(buffers, sources, targets):
    """The state of another slot, as if it was the next boundary's or another prefix's."""
    held = buffers.slots.copy()
    others = np.roll(np.flatnonzero(~(held[:, :8] == 0xFF).all(axis=1)), 1)
    for target in targets:
        buffers.slots[target] = held[others[others != target][0]]


@pytest.mark.parametrize("tamper", [zeroed, neighbours])
def test_a_wrong_state_shows(model, tamper, monkeypatch):
    serving, prompts = Serving(model), ragged()
    serving.submit(prompts)
    serving.run()
    serving.outputs.clear()
    buffers = serving.kv.state_buffers
    monkeypatch.setattr(
        serving.engine.model,
        "copy_states",
        lambda sources, targets: tamper(buffers, list(sources), list(targets)),
    )
    serving.submit(prompts, prefix="again ")
    serving.run()
    named = {f"again {name}": prompt for name, prompt in prompts.items()}
    assert serving.worst(named)[0] > CLEAR


def test_a_failed_save_costs_the_checkpoint_alone(model, monkeypatch):
    serving, prompts = Serving(model), ragged()

    def fail(sources, targets):
        raise RuntimeError("no device")

    monkeypatch.setattr(serving.engine.model, "copy_states", fail)
    serving.submit(prompts)
    serving.run()
    assert len(serving.outputs) == 8
    assert serving.worst(prompts)[0] < ROUNDING
    stats = serving.kv.rank_stats()
    assert stats.state_skipped_total > 0
    slots = serving.kv.linear_state
    assert slots.num_free_slots + slots.num_reclaimable == slots.num_total_slots


def test_a_hybrid_needs_slots(model):
    runner = HFModelRunner(copy.deepcopy(model), block_size=BLOCK)
    config = PoolConfig(num_blocks=9, block_size=BLOCK, model={"path": "x"})
    with pytest.raises(ConfigError, match=r"linear_state\.num_slots, at least 257"):
        RankKV(config, 0, runner.kv_spec, runner.state_spec)


def test_kv_and_states_must_fit_together(model, monkeypatch):
    runner = HFModelRunner(copy.deepcopy(model), block_size=BLOCK)
    states = {"num_slots": 64}
    config = PoolConfig(
        num_blocks=200, block_size=BLOCK, max_num_seqs=8, model={"path": "x"}, linear_state=states
    )
    kv = RankKV(config, 0, runner.kv_spec, runner.state_spec)
    room = max(kv.buffers.nbytes, kv.state_buffers.nbytes)
    monkeypatch.setattr("raykv.memory.room.available_bytes", lambda: room)
    monkeypatch.setattr("raykv.rank_build.available_bytes", lambda: room)
    with pytest.raises(ConfigError, match=r"200 blocks .* 64 state slots .* lower num_blocks or"):
        RankKV(config, 0, runner.kv_spec, runner.state_spec)
