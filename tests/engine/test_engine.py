"""The engine over a model that notices every wrong slot.

``HashModel`` keeps one number per slot, mixed from the number before it and the token, and chooses
the next token by a hash of all the numbers that it reads back through the block table. One wrong
slot, table entry or shared block, and the rest of the output is another one. Free blocks are
overwritten between steps, so nothing stale is right by luck. What must come out is computed
sequentially, without blocks, batches or a scheduler.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.config import PoolConfig
from raykv.core import DEFAULT, Namespace
from raykv.core.ledger import FREE
from raykv.core.sequence import Sequence
from raykv.engine import Engine, EngineStats, GenerationRequest, SamplingParams, TokenOutput
from raykv.engine.build import build_rank, load_tokenizer
from raykv.engine.sampler import log_probs, sample, top
from raykv.errors import ConfigError, RaykvError, RequestError
from raykv.memory import KVSpec
from raykv.rank import RankKV

VOCAB = 16
MAX_LEN = 60
EOS = (0,)
GARBAGE = 0xDEAD
MASK = (1 << 64) - 1


def mix(before: int, token: int, salt: int) -> int:
    """The number of one token after all the tokens before it."""
    value = (before * 6364136223846793005 + token + 1 + salt) & MASK
    return (value ^ (value >> 29)) * 0x9E3779B97F4A7C15 & MASK


def logits_of(numbers) -> np.ndarray:
    """The next token's logits, from the numbers of the whole context."""
    odd = np.arange(len(numbers), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    total = (np.asarray(numbers, np.uint64) * odd).sum(dtype=np.uint64)
    words = (total + np.arange(VOCAB, dtype=np.uint64)) * np.uint64(0xD1B54A32D192ED03)
    words = (words ^ (words >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((words >> np.uint64(40)).astype(np.float32)) * np.float32(3 / (1 << 24))


def salt_of(namespace: Namespace) -> int:
    """What a LoRA or other weights would change."""
    return sum(map(ord, namespace.tenant + "|" + namespace.lora)) + 1000 * namespace.weights_version


def text_of(token_ids) -> str:
    return "".join(chr(ord("a") + token) for token in token_ids)


class HashModel:
    """See the module. Checks the batch that it is given, too.

    Attributes:
        slots: uint64 [num_blocks * block_size].
        step: the scheduler's step that is being computed, where ``watch`` was called.
        error: raised by the next forward pass, after half of its work.
    """

    vocab_size = VOCAB
    max_model_len = MAX_LEN

    def __init__(self, num_blocks=64, block_size=4):
        self.block_size = block_size
        self.kv_spec = KVSpec.uniform(1, 1, 1, block_size, "float32")
        self.slots = np.full(num_blocks * block_size, GARBAGE, np.uint64)
        self.step = []
        self.rank_kv = None
        self.error = None
        self.batches = []

    def watch(self, engine):
        """See which tasks a step is for: their namespaces salt the numbers, as LoRAs would."""
        schedule = engine.scheduler.schedule
        self.rank_kv = engine.kv

        def watched():
            self.step = schedule()
            return self.step

        engine.scheduler.schedule = watched

    def salt(self, task):
        version = self.rank_kv.weights_version
        return salt_of(replace(task.request.namespace, weights_version=version))

    def copy_blocks(self, sources, targets):
        slots = self.slots.reshape(-1, self.block_size)
        slots[list(targets)] = slots[list(sources)]

    def forward(self, batch):
        self.batches.append(batch)
        ends = np.cumsum(batch.query_lens)
        tables = [
            row[: -(-int(context) // self.block_size)]
            for row, context in zip(batch.block_tables, batch.context_lens, strict=True)
        ]
        assert len(batch.token_ids) == len(batch.positions) == len(batch.slot_ids) == ends[-1]
        written = batch.slot_ids // self.block_size
        assert len(set(batch.slot_ids.tolist())) == len(batch.slot_ids)
        logits = []
        for i, (table, stop) in enumerate(zip(tables, ends.tolist(), strict=True)):
            assert (table > 0).all()
            assert len(set(table.tolist())) == len(table)
            count, context = int(batch.query_lens[i]), int(batch.context_lens[i])
            mine = slice(stop - count, stop)
            positions = np.arange(context - count, context)
            assert batch.positions[mine].tolist() == positions.tolist()
            slots = self.slots_of(table, np.arange(context))
            assert batch.slot_ids[mine].tolist() == slots[positions].tolist()
            others = np.concatenate([written[: mine.start], written[mine.stop :]])
            assert not np.isin(table, others).any(), "a step writes into a block another reads"
            salt = self.salt(self.step[i][0]) if self.step else 0
            number = int(self.slots[slots[context - count - 1]]) if context > count else 0
            for token, slot in zip(batch.token_ids[mine].tolist(), slots[positions], strict=True):
                number = mix(number, token, salt)
                self.slots[slot] = number if self.error is None else GARBAGE
            if stop - 1 in batch.logit_rows:
                logits.append(logits_of(self.slots[slots]))
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        assert len(logits) == len(batch.logit_rows)
        return np.array(logits, np.float32).reshape(-1, VOCAB)

    def slots_of(self, table, positions):
        return table[positions // self.block_size].astype(np.int64) * self.block_size + (
            positions % self.block_size
        )


def make_engine(model=None, *, budget=512, detokenize=text_of, eos=EOS, **config):
    """An engine, and its model, which watches it."""
    settings = {"num_blocks": 64, "block_size": 4, **config}
    model = model or HashModel(settings["num_blocks"], settings["block_size"])
    engine = Engine(
        model,
        RankKV(PoolConfig(**settings)),
        max_num_batched_tokens=budget,
        eos_token_ids=eos,
        detokenize=detokenize,
    )
    if isinstance(model, HashModel):
        model.watch(engine)
    return engine


def ask(name, tokens, namespace=DEFAULT, index=0, **params) -> GenerationRequest:
    return GenerationRequest(
        name, np.asarray(tokens, np.int32), SamplingParams(**params), namespace, index
    )


def expected(request, max_len=MAX_LEN, eos=EOS) -> TokenOutput:
    """The output, computed one token after the other."""
    params, salt = request.params, salt_of(request.namespace)
    numbers, produced, values, likeliest = [], [], [], []
    number = 0
    for token in request.token_ids.tolist():
        number = mix(number, token, salt)
        numbers.append(number)
    while True:
        logits = logits_of(numbers)
        position = len(numbers)
        token = sample(logits, params, params.seed or 0, request.sample_index, position)
        produced.append(token)
        all_values = log_probs(logits)
        values.append(float(all_values[token]))
        likeliest.append(top(all_values, params.logprobs))
        number = mix(number, token, salt)
        numbers.append(number)
        is_end = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
        if is_end or any(stop in text_of(produced) for stop in params.stop):
            reason = "stop"
        elif len(produced) == params.max_tokens or len(numbers) == max_len:
            reason = "length"
        else:
            continue
        return TokenOutput(
            request.request_id,
            tuple(produced),
            tuple(values) if params.logprobs else (),
            reason,
            top_log_probs=tuple(likeliest) if params.logprobs > 1 else (),
            sample_index=request.sample_index,
            weights_versions=(0,) * len(produced),
        )


def same(output: TokenOutput, wanted: TokenOutput) -> bool:
    """Equal but for what depends on the schedule."""
    return wanted == replace(
        output,
        num_cached_tokens=0,
        num_preempted=0,
        miss=None,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )


def run(engine, requests=(), max_steps=2000) -> dict[str, TokenOutput]:
    """Submit, step until nothing is left; the streamed tokens must be those of the outputs."""
    engine.submit(requests)
    outputs, streamed = {}, {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for _, delta in engine.step():
            assert delta.error is None, delta.error
            streamed[delta.request_id] = streamed.get(delta.request_id, ()) + delta.token_ids
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check_integrity()
    assert not engine.has_work, "the engine does not come to an end"
    for name, output in outputs.items():  # some may have come in steps before
        assert output.token_ids[len(output.token_ids) - len(streamed[name]) :] == streamed[name]
    return outputs


def assert_drained(engine):
    stats = engine.kv.rank_stats()
    assert stats.num_used_blocks == stats.num_pending_blocks == 0
    assert stats.num_available_blocks == stats.num_total_blocks
    assert engine.kv.single_block_manager.num_used_blocks == 0
    assert engine.scheduler.waiting == engine.scheduler.running == []
    engine.check_integrity()


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def mixed_load(count=12, seed=0, max_prompt=30):
    """Requests over a few shared prefixes, greedy and sampled."""
    rng = np.random.default_rng(seed)
    heads = [prompt(int(length), 100 + i) for i, length in enumerate(rng.integers(5, 20, 3))]
    return [
        ask(
            f"r{i}",
            (heads[rng.integers(3)] + prompt(int(rng.integers(1, 14)), 200 + i))[:max_prompt],
            max_tokens=int(rng.integers(1, 25)),
            temperature=float(rng.choice([0.0, 1.0])),
            seed=i,
            logprobs=int(rng.integers(0, 4)),
            ignore_eos=bool(rng.integers(2)),
        )
        for i in range(count)
    ]


# -- any schedule gives the sequential outputs -----------------------------------------------------


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("budget", [1, 3, 16, 512])
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(17, 8), (24, 3), (200, 64), (16, 1)])
def test_outputs_are_those_of_a_sequential_run(cache, budget, num_blocks, max_num_seqs):
    engine = make_engine(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        enable_prefix_cache=cache,
        budget=budget,
    )
    requests = mixed_load()
    outputs = run(engine, requests)
    for request in requests:
        assert same(outputs[request.request_id], expected(request)), request
    assert_drained(engine)
    again = run(engine, [replace(r, request_id=f"again-{r.request_id}") for r in requests])
    for request in requests:
        name = f"again-{request.request_id}"
        assert same(again[name], replace(expected(request), request_id=name))
    assert any(output.num_cached_tokens for output in again.values()) == cache
    assert_drained(engine)


def test_a_small_pool_preempts_and_changes_nothing():
    requests = [ask(f"r{i}", prompt(9, i), max_tokens=30, ignore_eos=True) for i in range(6)]
    small = make_engine(num_blocks=21)
    outputs = run(small, requests)
    assert small.stats().num_preemptions > 0
    assert sum(o.num_preempted for o in outputs.values()) == small.stats().num_preemptions
    assert outputs["r0"].num_preempted == 0, "the oldest is never preempted"
    for request in requests:
        assert same(outputs[request.request_id], expected(request))
    large = make_engine(num_blocks=200)
    assert all(not o.num_preempted for o in run(large, requests).values())
    assert small.stats().num_generated_tokens == large.stats().num_generated_tokens == 180
    assert_drained(small)


@pytest.mark.parametrize("victim", ["a number in the context", "a number in a cached block"])
def test_a_corrupt_slot_shows(victim):
    """The negative control of all the tests here."""
    engine = make_engine()
    request = ask("x", prompt(10), max_tokens=12, ignore_eos=True)
    if victim == "a number in a cached block":
        run(engine, [request])
        again = run(engine, [request])["x"]
        assert again.num_cached_tokens == 8
        assert same(again, expected(request))
        engine.model.slots[engine.model.block_size * 2 + 1] += np.uint64(1)
        assert not same(run(engine, [request])["x"], expected(request))
        return
    engine.submit([request])
    for _ in range(3):
        engine.step()
    table = engine.scheduler.running[0].sequence.kv_state.block_ids
    engine.model.slots[int(table[0]) * 4 + 2] ^= np.uint64(1)
    assert not same(run(engine)["x"], expected(request))


def test_two_swapped_blocks_show():
    engine = make_engine()
    request = ask("x", prompt(12), max_tokens=12, ignore_eos=True)
    engine.submit([request])
    engine.step()
    row = engine.scheduler.running[0].sequence.single_block_id
    table = engine.kv.tables.table
    table[row, [0, 1]] = table[row, [1, 0]]
    engine.scheduler.running[0].sequence.kv_state.block_ids = engine.kv.tables.ids(row)
    assert not same(run(engine)["x"], expected(request))


def test_a_wrong_salt_would_show():
    request = ask("x", prompt(9), max_tokens=10, ignore_eos=True)
    other = replace(request, namespace=Namespace(lora="l"))
    assert expected(request).token_ids != expected(other).token_ids


# -- sharing ---------------------------------------------------------------------------------------


def test_namespaces_never_mix():
    spaces = [
        DEFAULT,
        Namespace(tenant="a"),
        Namespace(lora="a"),
        Namespace(tenant="a", lora="a"),
    ]
    requests = [
        ask(f"r{i}-{round_}", prompt(21), namespace, max_tokens=8, ignore_eos=True)
        for round_ in range(2)
        for i, namespace in enumerate(spaces)
    ]
    engine = make_engine(max_num_seqs=1)
    outputs = run(engine, requests)
    for request in requests:
        output = outputs[request.request_id]
        assert same(output, expected(request))
        assert output.num_cached_tokens == (20 if request.request_id.endswith("-1") else 0)


def test_a_whole_prompt_hit_leaves_a_token_to_compute():
    engine = make_engine()
    for length, hit in ((16, 12), (17, 16), (4, 0), (5, 4), (1, 0)):
        request = ask("x", prompt(length, length), max_tokens=1)
        run(engine, [request])
        output = run(engine, [request])["x"]
        assert output.num_cached_tokens == hit
        assert same(output, expected(request))


def test_produced_tokens_are_found_in_the_next_turn():
    engine = make_engine()
    first = ask("1", prompt(9), max_tokens=12, ignore_eos=True)
    answer = run(engine, [first])["1"].token_ids
    second = ask("2", [*prompt(9), *answer, 3, 4, 5], max_tokens=5, ignore_eos=True)
    output = run(engine, [second])["2"]
    assert same(output, expected(second))
    assert output.num_cached_tokens == 20  # 9 + 12 - 1: the last token was never computed


def test_a_prefill_in_chunks_is_shared_while_it_runs():
    engine = make_engine(budget=8)
    long = prompt(33)
    engine.submit([ask("a", long, max_tokens=4, ignore_eos=True)])
    engine.step()
    engine.step()
    late = ask("b", [*long[:16], 1, 2], max_tokens=4, ignore_eos=True)
    outputs = run(engine, [late])
    assert outputs["b"].num_cached_tokens == 16
    assert same(outputs["b"], expected(late))


@pytest.mark.parametrize("budget", [6, 512])
def test_equal_prompts_that_arrive_together_are_prefilled_once(budget):
    requests = [ask(f"r{i}", prompt(19), max_tokens=3, ignore_eos=True) for i in range(5)]
    engine = make_engine(budget=budget)
    outputs = run(engine, requests)
    assert engine.stats().num_computed_tokens == 19 + 4 * 3 + 5 * 2
    assert [outputs[f"r{i}"].num_cached_tokens for i in range(5)] == [0, 16, 16, 16, 16]
    for request in requests:
        assert same(outputs[request.request_id], expected(request))
    engine = make_engine(budget=budget, enable_prefix_cache=False)
    run(engine, requests)
    assert engine.stats().num_computed_tokens == 5 * (19 + 2)
    assert engine.stats().num_steps == (3 if budget == 512 else engine.stats().num_steps)


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_followers_take_over_from_a_leader_that_goes(how):
    requests = [ask(f"r{i}", prompt(19), max_tokens=3, ignore_eos=True) for i in range(3)]
    engine = make_engine(budget=6)
    engine.submit(requests)
    engine.step()
    assert [task.arrival for task in engine.scheduler.running] == [0]
    if how == "abort":
        engine.abort(["r0"])
    else:
        engine.model.error = ValueError("gone")
        engine.step()
    outputs = run(engine)
    assert outputs["r1"].num_cached_tokens == 4
    assert outputs["r2"].num_cached_tokens == 16
    for request in requests[1:]:
        assert same(outputs[request.request_id], expected(request))


def test_a_shared_head_is_waited_for_and_other_requests_pass():
    engine = make_engine(budget=8)
    long = prompt(30)
    engine.submit(
        [
            ask("leader", long, max_tokens=2, ignore_eos=True),
            ask("follower", [*long[:20], 1, 2, 3], max_tokens=2, ignore_eos=True),
            ask("lora", long, Namespace(lora="l"), max_tokens=2, ignore_eos=True),
        ]
    )
    outputs = run(engine)
    assert outputs["follower"].num_cached_tokens == 20
    assert outputs["lora"].num_cached_tokens == 0


def test_samples_of_one_prompt_differ_and_repeat():
    params = {"max_tokens": 10, "temperature": 1.0, "seed": 5, "n": 4, "ignore_eos": True}
    requests = [ask(f"x/{i}", prompt(9), index=i, **params) for i in range(4)]
    outputs = run(make_engine(num_blocks=20), requests)
    for request in requests:
        assert same(outputs[request.request_id], expected(request))
    assert len({output.token_ids for output in outputs.values()}) == 4
    assert [outputs[f"x/{i}"].sample_index for i in range(4)] == [0, 1, 2, 3]


def test_without_a_seed_two_runs_differ():
    params = {"max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
    outputs = run(make_engine(), [ask(str(i), prompt(9), **params) for i in range(2)])
    assert outputs["0"].token_ids != outputs["1"].token_ids


# -- where outputs end -----------------------------------------------------------------------------


def free_run(length=9, count=40):
    """A prompt, and the greedy tokens after it."""
    request = ask("free", prompt(length), max_tokens=count, ignore_eos=True)
    return prompt(length), list(expected(request, eos=()).token_ids)


def test_eos_ends_and_is_part_of_the_output():
    start, tokens = free_run()
    token = tokens[5]
    first = tokens.index(token)
    engine = make_engine(eos=(token,))
    output = run(engine, [ask("x", start, max_tokens=40)])["x"]
    assert output.token_ids == tuple(tokens[: first + 1])
    assert output.stop_reason == "stop"
    output = run(engine, [ask("x", start, max_tokens=40, ignore_eos=True)])["x"]
    assert output.token_ids == tuple(tokens)
    assert output.stop_reason == "length"


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_token_ids_end_even_when_eos_is_ignored(ignore_eos):
    start, tokens = free_run()
    token = tokens[7]
    output = run(
        make_engine(eos=()),
        [ask("x", start, max_tokens=40, stop_token_ids=(token,), ignore_eos=ignore_eos)],
    )["x"]
    assert output.token_ids == tuple(tokens[: tokens.index(token) + 1])
    assert output.stop_reason == "stop"


@pytest.mark.parametrize("stops", [(4, 6), (9, 10), (30, 33)])
def test_a_stop_string_ends_with_the_token_that_completes_it(stops):
    start, tokens = free_run()
    text = text_of(tokens)
    stop = text[slice(*stops)]
    output = run(make_engine(), [ask("x", start, max_tokens=40, stop=("?", stop), ignore_eos=True)])
    end = text.index(stop) + len(stop)
    assert output["x"].token_ids == tuple(tokens[:end])
    assert output["x"].stop_reason == "stop"


def test_max_tokens_and_the_models_length_end():
    start, tokens = free_run(50, 10)
    outputs = run(
        make_engine(num_blocks=80),
        [
            ask("one", start, max_tokens=1, ignore_eos=True),
            ask("all", start, max_tokens=999, ignore_eos=True),
            ask("last", prompt(MAX_LEN - 1), max_tokens=9, ignore_eos=True),
        ],
    )
    assert outputs["one"].token_ids == tuple(tokens[:1])
    assert outputs["all"].token_ids == tuple(tokens)
    assert len(outputs["last"].token_ids) == 1
    assert {output.stop_reason for output in outputs.values()} == {"length"}


def test_a_sequence_may_fill_the_whole_pool():
    engine = make_engine(num_blocks=6)
    assert engine.limits.max_model_len == 20
    request = ask("x", prompt(11), max_tokens=99, ignore_eos=True)
    output = run(engine, [request])["x"]
    assert len(output.token_ids) == 9
    assert same(output, expected(request, max_len=20))
    assert output.num_preempted == 0


@pytest.mark.parametrize("logprobs", [0, 1, 5, VOCAB + 3])
def test_log_probs_are_those_of_the_tokens_chosen(logprobs):
    request = ask("x", prompt(9), max_tokens=9, logprobs=logprobs, ignore_eos=True)
    output = run(make_engine(), [request])["x"]
    assert same(output, expected(request))
    assert len(output.log_probs) == (9 if logprobs else 0)
    assert {len(row) for row in output.top_log_probs} == (
        {min(logprobs, VOCAB)} if logprobs > 1 else set()
    )
    for token, value, row in zip(
        output.token_ids, output.log_probs, output.top_log_probs, strict=False
    ):
        assert row[0] == (token, value)  # greedy


def test_log_probs_survive_preemption():
    requests = [
        ask(f"r{i}", prompt(9, i), max_tokens=30, logprobs=2, ignore_eos=True) for i in range(5)
    ]
    engine = make_engine(num_blocks=21)
    outputs = run(engine, requests)
    assert engine.stats().num_preemptions > 0
    for request in requests:
        assert same(outputs[request.request_id], expected(request))


# -- requests that are refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (ask("bad", []), "empty"),
        (ask("bad", prompt(MAX_LEN)), "60 tokens"),
        (ask("bad", [1, VOCAB]), "16 is outside the vocabulary"),
        (ask("bad", [-1, 1]), "-1 is outside the vocabulary"),
        (replace(ask("bad", [1]), token_ids=np.array([1.5])), "integers"),
        (replace(ask("bad", [1]), token_ids=np.array([[1]])), "one row"),
        (ask("good", [1]), "exists already"),
        (ask("running", [1]), "exists already"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_submit_is_all_or_none(bad, words):
    engine = make_engine()
    running = ask("running", prompt(9), max_tokens=9, ignore_eos=True)
    engine.submit([running])
    engine.step()
    with pytest.raises(RequestError, match=words):
        engine.submit([ask("good", prompt(5)), bad])
    assert engine.stats().num_waiting == 0
    outputs = run(engine)
    assert list(outputs) == ["running"]
    assert same(outputs["running"], expected(running))
    assert_drained(engine)


def test_drivers_may_use_the_same_ids():
    engine = make_engine()
    requests = {"one": ask("x", prompt(9)), "two": ask("x", prompt(7, 1))}
    for driver_id, request in requests.items():
        engine.submit([request], driver_id)
    engine.abort(["x"], "three")
    got = {}
    while engine.has_work:
        for driver_id, delta in engine.step():
            if delta.output is not None:
                got[driver_id] = delta.output
    assert all(same(got[driver_id], expected(requests[driver_id])) for driver_id in requests)


def test_stop_strings_need_a_detokenizer():
    with pytest.raises(RequestError, match="tokenizer"):
        make_engine(detokenize=None).submit([ask("x", [1], stop=("a",))])


# -- aborts and errors -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_returns_everything_in_any_state(num_steps):
    engine = make_engine(budget=7, num_blocks=21, max_num_seqs=2)
    requests = [ask(f"r{i}", prompt(20, i), max_tokens=25, ignore_eos=True) for i in range(4)]
    engine.submit(requests)
    for _ in range(num_steps):
        engine.step()
    engine.abort(["r0", "r3", "unknown"])
    engine.abort(["r0"])
    engine.check_integrity()
    outputs = run(engine)
    for name in ("r0", "r3"):
        assert outputs[name].stop_reason == "abort"
    for request in requests:
        output, wanted = outputs[request.request_id], expected(request)
        if output.stop_reason == "abort":
            assert output.token_ids == wanted.token_ids[: len(output.token_ids)]
        else:
            assert same(output, wanted)
    assert_drained(engine)
    later = [replace(request, request_id="l" + request.request_id) for request in requests]
    for name, output in run(engine, later).items():  # nothing half-computed was published
        assert output.token_ids == expected(requests[int(name[2])]).token_ids


def test_an_id_is_free_again_once_its_request_is_over():
    engine = make_engine()
    request = ask("x", prompt(9))
    run(engine, [request])
    engine.submit([request])
    engine.abort(["x"])
    engine.submit([request])
    outputs = [delta.output for _, delta in engine.step() if delta.output]
    assert outputs[0].stop_reason == "abort"
    assert same(run(engine)["x"], expected(request))


def test_an_error_of_the_model_fails_its_batch_only():
    engine = make_engine(max_num_seqs=2)
    requests = [ask(f"r{i}", prompt(18, i), max_tokens=9, ignore_eos=True) for i in range(4)]
    engine.submit(requests)
    engine.step()
    engine.model.error = ValueError("out of luck")
    deltas = [delta for _, delta in engine.step()]
    assert sorted(delta.request_id for delta in deltas) == ["r0", "r1"]
    for delta in deltas:
        assert delta.is_last
        assert delta.output is None
        assert type(delta.error) is RaykvError
        for word in (delta.request_id, "ValueError", "out of luck"):
            assert word in str(delta.error)
    engine.check_integrity()
    assert engine.kv.block_manager.num_used_blocks == 0
    outputs = run(
        engine, [replace(request, request_id="l" + request.request_id) for request in requests]
    )
    for request in requests[2:]:
        assert same(outputs[request.request_id], expected(request))
    for request in requests:
        assert outputs["l" + request.request_id].token_ids == expected(request).token_ids
    assert_drained(engine)


def test_a_failed_prefill_publishes_nothing_of_its_step():
    engine = make_engine(budget=8)
    request = ask("x", prompt(30), max_tokens=9, ignore_eos=True)
    engine.submit([request])
    engine.step()
    engine.model.error = MemoryError()
    [(_, delta)] = engine.step()
    assert delta.error is not None
    output = run(engine, [request])["x"]
    assert output.num_cached_tokens == 8
    assert same(output, expected(request))


def test_errors_of_raykv_reach_the_caller_as_they_are():
    engine = make_engine()
    engine.submit([ask("x", [1, 2])])
    error = engine.model.error = RequestError("this very one")
    [(_, delta)] = engine.step()
    assert delta.error is error


def test_an_error_of_the_tokenizer_fails_its_request_only():
    def fails_at_three(tokens):
        if len(tokens) == 3:
            raise UnicodeError("no such text")
        return ""

    engine = make_engine(detokenize=fails_at_three)
    other = ask("other", prompt(9), max_tokens=9, ignore_eos=True)
    engine.submit([ask("x", prompt(6, 1), max_tokens=9, stop=("a",), ignore_eos=True), other])
    deltas = [delta for _ in range(9) for _, delta in engine.step()]
    [failed] = [delta for delta in deltas if delta.error]
    assert failed.request_id == "x"
    assert "tokenizer" in str(failed.error)
    assert "UnicodeError" in str(failed.error)
    [output] = [delta.output for delta in deltas if delta.output]
    assert same(output, expected(other))
    assert_drained(engine)


# -- books -----------------------------------------------------------------------------------------


def test_hits_are_counted_once_per_request_however_often_it_is_admitted():
    engine = make_engine(num_blocks=21)
    requests = [ask(f"r{i}", prompt(9, i), max_tokens=30, ignore_eos=True) for i in range(6)]
    outputs = run(engine, requests)
    assert engine.stats().num_preemptions > 0
    stats = engine.kv.rank_stats()
    assert stats.num_admissions_total == 6
    assert stats.prefix_cache_queries_total == 6 * 9
    assert stats.prefix_cache_hits_total == 0
    assert all(output.num_cached_tokens == 0 for output in outputs.values())


def test_a_reset_in_the_middle_disturbs_nothing_and_forgets_everything():
    engine = make_engine()
    first = ask("a", prompt(17), max_tokens=20, ignore_eos=True)
    engine.submit([first])
    for _ in range(5):
        engine.step()
    engine.kv.reset_prefix_cache()
    output = run(engine)["a"]
    assert same(output, expected(first))
    engine.model.slots[:] = GARBAGE  # as a change of weights would
    output = run(engine, [replace(first, request_id="b")])["b"]
    assert output.num_cached_tokens == 0
    assert output.token_ids == expected(first).token_ids


def test_stats_and_times_add_up():
    ticks = itertools.count()
    model = HashModel()
    engine = Engine(
        model,
        RankKV(PoolConfig(num_blocks=64, block_size=4)),
        eos_token_ids=EOS,
        clock=lambda: float(next(ticks)),
    )
    assert engine.stats() == EngineStats()
    requests = [ask(f"r{i}", prompt(9, i), max_tokens=5, ignore_eos=True) for i in range(2)]
    engine.submit(requests)
    assert engine.stats().num_waiting == 2
    assert engine.has_work
    first = engine.step()
    assert engine.stats().num_running == 2
    assert all(delta.output is None for _, delta in first)
    outputs = run(engine)
    stats = engine.stats()
    assert stats.num_steps == 5
    assert stats.num_computed_tokens == 2 * (9 + 4)
    assert stats.num_generated_tokens == 10
    assert 0 < stats.model_s < stats.step_s
    for output in outputs.values():
        assert output.queue_s > 0
        assert output.prefill_s > 0
        assert output.decode_s > 0


# -- random histories ------------------------------------------------------------------------------

PREFIXES = [prompt(length, 50 + length) for length in (4, 9, 13)]

prompts = st.builds(
    lambda head, tail: (head + tail)[:19] or [1],
    st.sampled_from([[], *PREFIXES]),
    st.lists(st.integers(0, VOCAB - 1), max_size=8),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 2.0]),
    top_p=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 3),
    stop=st.sampled_from([(), (), ("ab", "c")]),
    stop_token_ids=st.sampled_from([(), (3,), (1, 2)]),
    logprobs=st.integers(0, 3),
    ignore_eos=st.booleans(),
)
namespaces = st.sampled_from([DEFAULT, DEFAULT, DEFAULT, Namespace(lora="l")])


@dataclass
class Submitted:
    request: GenerationRequest
    tokens: list[int]
    max_len: int


class Histories(RuleBasedStateMachine):
    """Requests come, are aborted and fail at any moment; what is left is always right."""

    def __init__(self):
        super().__init__()
        self.live: dict[str, Submitted] = {}
        self.names = itertools.count()
        self.admitted: dict[str, tuple[int, int]] = {}  # prompt and hit tokens

    @initialize(
        num_blocks=st.integers(6, 20),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        cache=st.sampled_from([True, True, False]),
        disagg_pd=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, cache, disagg_pd):
        self.engine = make_engine(
            num_blocks=num_blocks + 20 // block_size,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            enable_prefix_cache=cache,
            disagg_pd=disagg_pd,
            budget=budget,
        )

    @rule(tokens=prompts, params=params, namespace=namespaces)
    def submit(self, tokens, params, namespace):
        request = GenerationRequest(
            str(next(self.names)), np.array(tokens, np.int32), params, namespace
        )
        self.engine.submit([request])
        tokens[:] = [5] * len(tokens)
        self.live[request.request_id] = Submitted(request, [], self.engine.limits.max_model_len)

    @rule(tokens=prompts, params=params, namespace=namespaces, n=st.integers(2, 4))
    def submit_samples(self, tokens, params, namespace, n):
        name, row = str(next(self.names)), np.array(tokens, np.int32)
        params = replace(params, n=n)
        requests = [
            GenerationRequest(f"{name}/{i}", row, params, namespace, i, prompt_id=name)
            for i in range(n)
        ]
        self.engine.submit(requests)
        for request in requests:
            entry = Submitted(request, [], self.engine.limits.max_model_len)
            self.live[request.request_id] = entry

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.take(self.engine.step())

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def abort(self, index):
        name = list(self.live)[index % len(self.live)]
        self.engine.abort([name])
        entry = self.live[name]
        deltas = self.engine.step()
        [output] = [d.output for _, d in deltas if d.request_id == name]
        assert output.stop_reason == "abort"
        assert list(output.token_ids) == entry.tokens
        del self.live[name]
        self.take([(who, delta) for who, delta in deltas if delta.request_id != name])

    @precondition(lambda self: self.live)
    @rule()
    def fail(self):
        self.engine.model.error = ValueError("as asked")
        deltas = self.engine.step()
        assert self.engine.model.error is None, "nothing was computed though there is work"
        failed = {task.request.request_id for task, _ in self.engine.model.step}
        self.note_admissions()
        assert {delta.request_id for _, delta in deltas} == failed
        for _, delta in deltas:
            assert "as asked" in str(delta.error)
            del self.live[delta.request_id]

    @rule()
    def reset(self):
        self.engine.kv.reset_prefix_cache()

    def note_admissions(self):
        for task, _ in self.engine.model.step:
            if task.miss is not None:  # a sample that was forked was not admitted
                self.admitted.setdefault(
                    task.request.request_id, (len(task.request.token_ids), task.num_cached_tokens)
                )

    def take(self, deltas):
        self.note_admissions()
        for _, delta in deltas:
            assert delta.error is None
            entry = self.live[delta.request_id]
            entry.tokens += delta.token_ids
            if delta.output is not None:
                assert same(delta.output, expected(entry.request, entry.max_len))
                assert list(delta.output.token_ids) == entry.tokens
                del self.live[delta.request_id]

    @invariant()
    def books_balance(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        manager, model = self.engine.kv.block_manager, self.engine.model
        free = np.flatnonzero(manager._ledger.counts == FREE)
        model.slots.reshape(-1, model.block_size)[free] = GARBAGE
        stats = self.engine.kv.rank_stats()
        assert stats.num_admissions_total == len(self.admitted)
        assert stats.prefix_cache_queries_total == sum(n for n, _ in self.admitted.values())
        assert stats.prefix_cache_hits_total == sum(hit for _, hit in self.admitted.values())
        engine_stats = self.engine.stats()
        assert engine_stats.num_waiting + engine_stats.num_running == len(self.live)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self.take(self.engine.step())
            self.books_balance()
        assert not self.live, "a request starves"
        assert_drained(self.engine)
        assert not self.engine.step()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, params, namespaces), min_size=1, max_size=10),
    num_blocks=st.integers(14, 40),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 8),
)
def test_random_loads_end_as_alone(requests, num_blocks, budget, max_num_seqs):
    engine = make_engine(num_blocks=num_blocks, budget=budget, max_num_seqs=max_num_seqs)
    asked = [
        GenerationRequest(str(i), np.array(tokens, np.int32), params, namespace)
        for i, (tokens, params, namespace) in enumerate(requests)
    ]
    outputs = run(engine, asked)
    for request in asked:
        wanted = expected(request, engine.limits.max_model_len)
        assert same(outputs[request.request_id], wanted)
    assert_drained(engine)


def test_memory_of_another_scheduler_is_left_alone():
    """Sequences of the pool's user share the rank: the engine waits for their memory."""
    engine = make_engine(num_blocks=12)
    foreign = Sequence(prompt(40, 9))
    assert engine.kv.allocate(foreign)
    before = foreign.kv_state.block_ids.tolist()
    request = ask("x", prompt(9), max_tokens=3, ignore_eos=True)
    engine.submit([request])
    assert engine.step() == []
    assert engine.has_work
    assert foreign.kv_state.block_ids.tolist() == before
    engine.kv.deallocate(foreign)
    assert same(run(engine)["x"], expected(request))


# -- building one -------------------------------------------------------------------------------


def test_a_model_without_tokenizer_is_served_and_one_that_is_missing_is_an_error(
    tmp_path, tiny_llama
):
    with pytest.raises(ConfigError, match="no Hugging Face model"):
        load_tokenizer(str(tmp_path))
    tiny_llama.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)) is None
    settings = {"num_blocks": 40, "block_size": 4, "memory": {"device": "cpu"}}
    config = PoolConfig(model={"path": str(tmp_path), "max_num_batched_tokens": 7}, **settings)
    kv, engine = build_rank(config, 3)
    assert engine.kv is kv
    assert kv.dp_rank == 3
    assert engine.limits.vocab_size == 128
    assert engine.limits.max_model_len == 39 * 4
    assert not engine.limits.has_detokenizer
    output = run(engine, [ask("x", list(range(20)), max_tokens=5, ignore_eos=True)])["x"]
    assert len(output.token_ids) == 5
    assert engine.stats().num_steps == 3 + 4
    with pytest.raises(ConfigError, match=r"max_model_len is 513.*512 tokens"):
        build_rank(PoolConfig(model={"path": str(tmp_path)}, max_model_len=513, **settings), 0)


def test_without_a_model_there_are_only_books():
    kv, engine = build_rank(PoolConfig(num_blocks=40), 1)
    assert engine is None
    assert kv.buffers is None
    assert kv.dp_rank == 1
