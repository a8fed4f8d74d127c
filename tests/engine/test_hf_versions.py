"""A real model across updates: K and V that a hit reads are those of its version, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest

from raykv.config import PoolConfig
from raykv.core import Namespace, Sequence
from raykv.engine import Engine, GenerationRequest, SamplingParams
from raykv.engine.hf_runner import HFModelRunner
from raykv.engine.weights import pack
from raykv.rank import RankKV

from .test_hf_runner import tokens_of
from .test_hf_weights import another, folder


@pytest.fixture(scope="module")
def newer(tiny_llama):
    return another(tiny_llama)


PROMPT = tokens_of(13, 3).tolist()


def make_engine(model, num_blocks=60):
    runner = HFModelRunner(copy.deepcopy(model), 4)
    config = PoolConfig(
        num_blocks=num_blocks,
        block_size=4,
        memory={"device": "cpu", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1},
    )
    kv = RankKV(config, spec=runner.kv_spec)
    runner.bind(kv.buffers)
    kv.buffers.storage[1:].fill(float("nan"))  # a slot read before it was written shows
    return Engine(runner, kv)


def change(engine, version, model, mode="keep"):
    engine.lifecycle.prepare_weights(version, pack(model.state_dict()), mode)
    engine.lifecycle._update.reading._thread.join()
    engine.lifecycle.apply_weights(version)


def submit(engine, name, tokens, max_tokens=12):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.submit([GenerationRequest(name, np.asarray(tokens, np.int32), params)])


def finish(engine):
    outputs = {}
    while engine.has_work:
        for _, delta in engine.step():
            assert delta.error is None, delta.error
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check_integrity()
    return outputs


def found(engine, tokens, version):
    """K and V that a hit under a version reads, and the tokens they stand for."""
    probe = Sequence([*tokens, 1], namespace=Namespace(weights_version=version))
    engine.kv.allocate_shared(probe)
    stop = probe.kv_state.num_computed_tokens
    slots = probe.slot_ids(0, stop)
    values = [
        engine.kv.buffers.read_slots(layer, kind, slots)
        for layer in range(engine.kv.buffers.spec.num_layers)
        for kind in "kv"
    ]
    engine.kv.deallocate_without_cache(probe)
    return np.stack(values), list(tokens[:stop])


def computed_alone(model, tokens):
    """The same values from an engine that has never seen anything else."""
    engine = make_engine(model)
    submit(engine, "alone", [*tokens, 1], 1)
    finish(engine)
    return found(engine, tokens, 0)[0]


def span(engine, newer):
    """A request that begins under the old weights and ends under the new ones."""
    submit(engine, "x", PROMPT)
    assert len(engine.step()) == 1
    change(engine, 1, newer)
    output = finish(engine)["x"]
    assert output.weights_versions == (0,) + (1,) * 11
    return [*PROMPT, *output.token_ids]


def test_a_hit_reads_what_its_version_computes_bit_for_bit(tiny_llama, newer):
    engine = make_engine(tiny_llama)
    whole = span(engine, newer)
    values, tokens = found(engine, whole, 0)
    assert tokens == PROMPT[:12], "the full blocks computed before the update"
    reference = make_engine(tiny_llama)
    submit(reference, "x", PROMPT)
    finish(reference)
    np.testing.assert_array_equal(values, found(reference, PROMPT, 0)[0])
    assert found(engine, whole, 1)[1] == []
    submit(engine, "y", whole, 1)
    assert finish(engine)["y"].num_cached_tokens == 0
    values, tokens = found(engine, whole, 1)
    assert tokens == whole[:24]
    np.testing.assert_array_equal(values, computed_alone(newer, whole[:24]))
    assert found(engine, whole, 0)[1] == PROMPT[:12]
    submit(engine, "z", [*whole[:24], 5], 1)
    assert finish(engine)["z"].num_cached_tokens == 24


def test_without_the_mark_a_hit_reads_what_no_version_computes(tiny_llama, newer, monkeypatch):
    """The negative control: publishing on shows in the comparison above."""
    begin = RankKV.begin_version

    def begin_unmarked(kv, version):
        begin(kv, version)
        kv._rows.stale.clear()

    monkeypatch.setattr(RankKV, "begin_version", begin_unmarked)
    engine = make_engine(tiny_llama)
    monkeypatch.setattr(engine, "check_integrity", lambda: None)
    whole = span(engine, newer)
    values, tokens = found(engine, whole, 0)
    assert len(tokens) > 12
    for model in (tiny_llama, newer):
        difference = np.abs(values - computed_alone(model, tokens)).max()
        assert difference > 0.01


def test_a_preempted_sequence_publishes_what_the_new_version_computes(tiny_llama, newer):
    engine = make_engine(tiny_llama, num_blocks=11)
    submit(engine, "first", tokens_of(9, 1).tolist(), 20)
    submit(engine, "second", PROMPT, 20)
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) == 2
    change(engine, 1, newer)
    outputs = finish(engine)
    assert outputs["second"].num_preempted > 0
    assert outputs["second"].weights_versions == (0,) * 3 + (1,) * 17
    values, tokens = found(engine, [*PROMPT, *outputs["second"].token_ids], 1)
    assert len(tokens) == 32
    np.testing.assert_allclose(values, computed_alone(newer, tokens), atol=1e-4)


def test_sleep_at_both_levels_changes_no_output(tiny_llama, tmp_path):
    folder(tiny_llama, tmp_path / "first")
    runs = []
    for level in (0, 1, 2):
        engine = make_engine(tiny_llama)
        engine.model = HFModelRunner.load(tmp_path / "first", block_size=4)
        engine.model.bind(engine.kv.buffers)
        submit(engine, "x", PROMPT)
        for _ in range(4):
            engine.step()
        if level:
            storage = weakref.ref(engine.kv.buffers.storage)
            engine.lifecycle.sleep(level)
            gc.collect()
            assert storage() is None
            engine.lifecycle.wake_up()
            if level == 2:
                engine.lifecycle._waking._thread.join()
            assert engine.lifecycle.weights_status().asleep == ()
        output = finish(engine)["x"]
        assert output.num_preempted == min(level, 1)
        runs.append(output.token_ids)
    assert runs[0] == runs[1] == runs[2]
