"""Several continuations of one prompt: computed once, shared, and as if each had been alone."""

from __future__ import annotations

import copy
import queue
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv import BlockManagerPool
from raykv.config import PoolConfig
from raykv.core import DEFAULT, Namespace, Sequence
from raykv.engine import Engine, GenerationRequest, SamplingParams
from raykv.engine.hf_runner import HFModelRunner
from raykv.rank import RankKV
from raykv.testing import loopback_pool

from .test_engine import (
    GARBAGE,
    HashModel,
    ask,
    assert_drained,
    expected,
    make_engine,
    prompt,
    run,
    same,
)

SIZE = 4


def samples(name, tokens, n, namespace=DEFAULT, **params):
    """The requests that ``pool.generate`` makes of one prompt."""
    values = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "max_tokens": 10, **params}
    return [
        GenerationRequest(
            f"{name}/{i}",
            np.asarray(tokens, np.int32),
            SamplingParams(n=n, **values),
            namespace,
            i,
            prompt_id=name,
        )
        for i in range(n)
    ]


def overwrite_free(engine):
    """Nothing that is free may be right by luck."""
    counts = engine.kv.block_manager._ledger.counts
    engine.model.slots.reshape(-1, engine.model.block_size)[counts < 0] = GARBAGE


def assert_as_alone(outputs, requests, max_len=60):
    for request in requests:
        assert same(outputs[request.request_id], expected(request, max_len)), request.request_id


# -- sharing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("budget", [1, 3, 8, 512])
@pytest.mark.parametrize("length", [1, 3, 4, 9, 19, 20])
def test_a_prompt_is_computed_once(length, budget, cache):
    requests = samples("x", prompt(length), 4)
    engine = make_engine(budget=budget, enable_prefix_cache=cache)
    outputs = run(engine, requests)
    assert_as_alone(outputs, requests)
    assert engine.stats().num_computed_tokens == length + 4 * 9
    assert engine.stats().num_generated_tokens == 40
    assert len({output.token_ids for output in outputs.values()}) == 4
    assert [outputs[f"x/{i}"].num_cached_tokens for i in range(4)] == [0] + 3 * [length]
    assert engine.kv.rank_stats().num_admissions_total == 1
    assert_drained(engine)


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("length", [8, 9, 11])
def test_the_prompts_blocks_are_shared_and_only_the_tails_are_copied(length, cache):
    engine = make_engine(enable_prefix_cache=cache)
    engine.submit(samples("x", prompt(length), 5))
    engine.step()
    tables = [task.sequence.kv_state.block_ids.tolist() for task in engine.scheduler.running]
    assert tables == 5 * [tables[0]]
    assert engine.kv.num_used_blocks() == [-(-length // SIZE)]
    engine.step()
    full = length // SIZE
    assert engine.kv.num_used_blocks() == [full + 5]
    tables = [task.sequence.kv_state.block_ids.tolist() for task in engine.scheduler.running]
    assert {tuple(table[:full]) for table in tables} == {tuple(tables[0][:full])}
    assert len({table[full] for table in tables}) == 5
    assert engine.kv.rank_stats().num_pending_blocks == 0, "copies are acknowledged"
    run(engine)
    assert_drained(engine)


def test_several_prompts_with_samples_and_without():
    requests = [
        *samples("a", prompt(9), 3, max_tokens=7),
        ask("b", prompt(9), max_tokens=5),
        *samples("c", [*prompt(9), 1, 2], 2),
        *samples("d", prompt(9), 3, Namespace(lora="l")),
    ]
    engine = make_engine(budget=11)
    assert_as_alone(run(engine, requests), requests)
    assert_drained(engine)


def test_samples_end_each_for_itself():
    requests = samples("x", prompt(9), 6, ignore_eos=False, stop=("ab", "c"), max_tokens=20)
    engine = make_engine()
    outputs = run(engine, requests)
    assert_as_alone(outputs, requests)
    assert len({len(output.token_ids) for output in outputs.values()}) > 1
    one = [replace(r, request_id="1" + r.request_id) for r in samples("y", prompt(9), 4)]
    one = [replace(r, params=replace(r.params, max_tokens=1)) for r in one]
    assert_as_alone(run(engine, one), one)
    assert_drained(engine)


def test_log_probs_of_samples():
    requests = samples("x", prompt(10), 3, logprobs=3)
    assert_as_alone(run(make_engine(), requests), requests)


def test_greedy_samples_are_all_alike():
    requests = samples("x", prompt(10), 3, temperature=0.0)
    outputs = run(make_engine(), requests)
    assert_as_alone(outputs, requests)
    assert len({output.token_ids for output in outputs.values()}) == 1


def test_only_the_first_sample_says_why_its_hit_ended():
    engine = make_engine()
    outputs = run(engine, samples("x", prompt(10), 3))
    assert outputs["x/0"].miss.reason == "never_seen"
    assert outputs["x/1"].miss is outputs["x/2"].miss is None
    outputs = run(engine, [ask("again", prompt(10)), ask("other", [*prompt(5), 0, 1, 2, 3])])
    assert outputs["again"].miss.reason == "complete"
    assert outputs["again"].miss.num_hit_tokens == outputs["again"].num_cached_tokens == 8
    assert outputs["other"].miss.reason == "diverged"
    assert outputs["other"].miss.num_hit_tokens == 4
    engine = make_engine(enable_prefix_cache=False)
    assert run(engine, [ask("x", prompt(10))])["x"].miss.reason == "cache_off"


def test_times_of_samples_are_in_order():
    ticks = iter(range(10_000))
    model = HashModel()
    kv = RankKV(PoolConfig(num_blocks=64, block_size=SIZE))
    engine = Engine(model, kv, clock=lambda: float(next(ticks)))
    for output in run(engine, samples("x", prompt(9), 3)).values():
        assert output.queue_s > 0
        assert output.prefill_s > 0
        assert output.decode_s > 0


# -- short of room ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
@pytest.mark.parametrize("budget", [3, 512])
def test_fewer_places_than_samples(max_num_seqs, budget, cache):
    requests = samples("x", prompt(10), 5)
    engine = make_engine(
        max_num_seqs=max_num_seqs, num_single_blocks=9, budget=budget, enable_prefix_cache=cache
    )
    schedule, seen = engine.scheduler.schedule, []

    def count():
        step = schedule()
        seen.append(len(engine.scheduler.running))
        return step

    engine.scheduler.schedule = count
    outputs = run(engine, requests)
    assert max(seen) == max_num_seqs
    assert_as_alone(outputs, requests)
    assert_drained(engine)
    forked = [name for name, output in outputs.items() if output.miss is None]
    assert len(forked) >= max_num_seqs - 1
    if max_num_seqs == 1:
        assert forked == []


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("num_blocks", [7, 9, 12])
@pytest.mark.parametrize("budget", [2, 512])
def test_a_tiny_pool_preempts_samples_and_changes_nothing(num_blocks, budget, cache):
    requests = [*samples("x", prompt(9), 4, max_tokens=12), *samples("y", prompt(6, 1), 3)]
    engine = make_engine(num_blocks=num_blocks, budget=budget, enable_prefix_cache=cache)
    engine.submit(requests)
    outputs = {}
    for _ in range(3000):
        if not engine.has_work:
            break
        for _, delta in engine.step():
            assert delta.error is None
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check_integrity()
        overwrite_free(engine)
    assert_as_alone(outputs, requests, engine.limits.max_model_len)
    assert engine.stats().num_preemptions > 0
    assert_drained(engine)


def test_rows_taken_by_others_leave_samples_in_line():
    engine = make_engine(num_single_blocks=4, max_num_seqs=3)
    foreign = Sequence(prompt(5, 1))
    assert engine.kv.allocate(foreign)
    requests = samples("x", prompt(9), 4)
    engine.submit(requests)
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 2)
    assert_as_alone(run(engine), requests)
    engine.kv.deallocate(foreign)
    assert_drained(engine)


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "victims", [["x/0"], ["x/1"], ["x/3"], ["x/0", "x/2"], ["x/1", "x/2", "x/3"]]
)
@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_at_any_time_harms_no_other_sample(num_steps, victims):
    requests = samples("x", prompt(10), 4)
    engine = make_engine(budget=4, num_blocks=16)
    engine.submit(requests)
    for _ in range(num_steps):
        engine.step()
    engine.abort(victims)
    engine.check_integrity()
    overwrite_free(engine)
    outputs = run(engine)
    for request in requests:
        output, wanted = outputs[request.request_id], expected(request)
        if request.request_id in victims:
            assert output.stop_reason == "abort"
            assert output.token_ids == wanted.token_ids[: len(output.token_ids)]
        else:
            assert same(output, wanted)
    assert_drained(engine)


def test_when_the_first_sample_goes_the_next_computes_the_prompt():
    requests = samples("x", prompt(19), 3)
    engine = make_engine(budget=6, enable_prefix_cache=False)
    engine.submit(requests)
    engine.step()
    assert [task.request.request_id for task in engine.scheduler.running] == ["x/0"]
    engine.abort(["x/0"])
    outputs = run(engine)
    assert_as_alone(outputs, requests[1:])
    assert outputs["x/1"].miss is not None
    assert outputs["x/2"].miss is None, "forked from the one that took over"
    assert engine.stats().num_computed_tokens == 6 + 19 + 2 * 9


def test_an_error_of_the_model_fails_the_samples_of_its_step():
    requests = samples("x", prompt(10), 3)
    engine = make_engine()
    engine.submit(requests)
    engine.step()
    engine.model.error = ValueError("out of luck")
    deltas = [delta for _, delta in engine.step()]
    assert sorted(delta.request_id for delta in deltas) == ["x/0", "x/1", "x/2"]
    assert all("out of luck" in str(delta.error) for delta in deltas)
    assert_drained(engine)
    again = samples("y", prompt(10), 3)
    assert_as_alone(run(engine, again), again)


def test_a_copy_that_fails_leaves_nothing_behind():
    engine = make_engine()
    engine.submit(samples("x", prompt(10), 3))
    engine.step()
    copy_blocks = engine.model.copy_blocks

    def fail(sources, targets):
        raise MemoryError("no copy today")

    engine.model.copy_blocks = fail
    deltas = [delta for _, delta in engine.step()]
    assert len(deltas) == 3
    assert all("no copy today" in str(delta.error) for delta in deltas)
    assert_drained(engine)
    engine.model.copy_blocks = copy_blocks
    again = samples("y", prompt(10), 3)
    assert_as_alone(run(engine, again), again)


# -- who is a sample of what -----------------------------------------------------------------------


@pytest.mark.parametrize("other", ["tokens", "namespace", "driver", "no name"])
def test_equal_names_alone_make_nobody_a_sample(other):
    """Prompt ids are the callers' to choose, and are used again."""
    tokens, namespace, name = prompt(9), DEFAULT, "x"
    if other == "tokens":
        tokens = prompt(9, 1)
    elif other == "namespace":
        namespace = Namespace(lora="l")
    elif other == "no name":
        name = ""
    first = samples(name, prompt(9), 2)[:1]
    stranger = [
        replace(samples("x", tokens, 2, namespace)[1], request_id="stranger", prompt_id=name)
    ]
    engine = make_engine(enable_prefix_cache=False, budget=4)
    engine.submit(first)
    engine.submit(stranger, "elsewhere" if other == "driver" else "")
    outputs = {}
    while engine.has_work:
        for _, delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
    assert_as_alone(outputs, [*first, *stranger])
    assert outputs["stranger"].miss is not None, "not forked"
    assert engine.stats().num_computed_tokens == 2 * (9 + 9)


# -- negative controls -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["no copies", "swapped", "one too few"])
def test_a_copy_that_is_not_done_shows(wrong):
    class Model(HashModel):
        def copy_blocks(self, sources, targets):
            if wrong == "swapped":
                super().copy_blocks(targets, sources)
            elif wrong == "one too few":
                super().copy_blocks(sources[1:], targets[1:])

    requests = samples("x", prompt(10), 3)
    outputs = run(make_engine(Model()), requests)
    assert not all(same(outputs[r.request_id], expected(r)) for r in requests)


# -- random loads ----------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    loads=st.lists(
        st.tuples(st.integers(1, 18), st.integers(0, 2), st.integers(1, 5), st.integers(1, 12)),
        min_size=1,
        max_size=4,
    ),
    block_size=st.integers(1, 5),
    spare=st.integers(1, 20),
    budget=st.integers(1, 30),
    max_num_seqs=st.integers(1, 8),
    cache=st.booleans(),
)
def test_random_samples_end_as_alone(loads, block_size, spare, budget, max_num_seqs, cache):
    engine = make_engine(
        num_blocks=30 // block_size + 2 + spare,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        budget=budget,
        enable_prefix_cache=cache,
    )
    requests = [
        request
        for i, (length, seed, n, max_tokens) in enumerate(loads)
        for request in samples(f"r{i}", prompt(length, seed), n, max_tokens=max_tokens)
    ]
    assert_as_alone(run(engine, requests), requests, engine.limits.max_model_len)
    assert_drained(engine)


# -- a transformers model --------------------------------------------------------------------------


def plain_kv(model, tokens):
    """Keys and values per layer, [tokens, heads, dim], by transformers itself."""
    with torch.inference_mode():
        cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    return [
        {
            "k": layer.keys[0].transpose(0, 1).numpy(),
            "v": layer.values[0].transpose(0, 1).numpy(),
        }
        for layer in cache.layers
    ]


@pytest.fixture
def llama_engine(tiny_llama):
    runner = HFModelRunner(copy.deepcopy(tiny_llama), SIZE)
    memory = {"device": "cpu", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}
    kv = RankKV(PoolConfig(num_blocks=60, block_size=SIZE, memory=memory), spec=runner.kv_spec)
    runner.bind(kv.buffers)
    kv.buffers.storage[1:].fill(float("nan"))  # a slot read before it was written shows
    return Engine(runner, kv, max_num_batched_tokens=512)


def read(engine, sequence, layer, name, stop=None):
    stop = sequence.kv_state.num_computed_tokens if stop is None else stop
    return engine.kv.buffers.read_slots(layer, name, sequence.slot_ids(0, stop))


@pytest.mark.parametrize("length", [8, 10])
def test_branches_hold_what_a_plain_cache_holds(tiny_llama, llama_engine, length):
    tokens = np.random.default_rng(3).integers(0, 128, length)
    engine = llama_engine
    engine.submit(samples("x", tokens, 3, max_tokens=9))
    engine.step()
    running = [task.sequence for task in engine.scheduler.running]
    before = [read(engine, running[0], layer, name) for layer in range(3) for name in "kv"]
    for _ in range(6):
        engine.step()
    assert len({tuple(sequence.token_ids.tolist()) for sequence in running}) == 3
    for sequence in running:
        computed = sequence.kv_state.num_computed_tokens
        assert computed == length + 6
        plain = plain_kv(tiny_llama, sequence.token_ids[:computed].tolist())
        for layer, name in [(layer, name) for layer in range(3) for name in "kv"]:
            got = read(engine, sequence, layer, name)
            np.testing.assert_allclose(got, plain[layer][name], rtol=1e-4, atol=1e-5)
        after = [read(engine, sequence, layer, name, length) for layer in range(3) for name in "kv"]
        assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_an_abort_leaves_the_other_branch_bit_identical(llama_engine):
    engine = llama_engine
    engine.submit(samples("x", np.arange(10), 3, max_tokens=20))
    for _ in range(3):
        engine.step()
    kept = engine.scheduler.running[1].sequence
    before = read(engine, kept, 2, "v")
    engine.abort(["x/0", "x/2"])
    engine.submit(samples("y", np.arange(50, 90), 4, max_tokens=20))
    for _ in range(4):
        engine.step()
    after = read(engine, kept, 2, "v", len(before))
    assert np.array_equal(before, after)
    assert not np.isnan(after).any()


@pytest.fixture(params=[BlockManagerPool.local, loopback_pool], ids=["local", "loopback"])
def make_llama_pool(request, tiny_llama, tmp_path):
    made = []

    def make(**values):
        tiny_llama.save_pretrained(tmp_path)
        config = PoolConfig(
            block_size=SIZE,
            model={"path": str(tmp_path)},
            memory={"device": "cpu"},
            **values,
        )
        made.append(request.param(config))
        return made[-1]

    yield make
    for pool in made:
        pool.check_integrity()
        pool.close()


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_generate_gives_what_separate_calls_give(make_llama_pool, cache):
    pool = make_llama_pool(num_blocks=60, enable_prefix_cache=cache, dp_size=2)
    prompts = [list(range(10)), list(range(40, 53))]
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=4, n=3)
    outputs = pool.generate(prompts, params)
    assert [output.sample_index for output in outputs] == [0, 1, 2] * 2
    assert len({output.token_ids for output in outputs}) == 6
    assert [output.miss is None for output in outputs] == [False, True, True] * 2
    pool.reset_prefix_cache()
    for row, group in zip(prompts, (outputs[:3], outputs[3:]), strict=True):
        for index, output in enumerate(group):
            alone = alone_output(pool, row, params, index)
            assert alone.token_ids == output.token_ids
            assert alone.stop_reason == output.stop_reason
    assert pool.stats().total.num_used_blocks == 0


def alone_output(pool, row, params, index):
    """One continuation, as a request of its own."""
    request = replace(
        pool.make_requests(row, replace(params, n=1), f"alone-{index}-{len(row)}")[0],
        sample_index=index,
    )
    deltas = queue.SimpleQueue()
    pool.start([request], [deltas.put], 0)
    last = next(delta for delta in iter(lambda: deltas.get(timeout=60), None) if delta.is_last)
    assert last.error is None
    return last.output
