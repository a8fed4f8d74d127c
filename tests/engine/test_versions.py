"""Weights versions and sleep through the engine, over the model that notices every wrong slot.

``VersionedModel`` salts each token's number with the version that computed it, and notes which
versions each sequence went through. So what must come out of a sequence that spans an update is
known token by token, and a cached block of any other history than the one it is found under shows.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.core import Namespace, Sequence
from raykv.core.ledger import FREE
from raykv.engine import GenerationRequest
from raykv.engine.sampler import sample
from raykv.errors import IntegrityError, NotSupportedError, RequestError

from .test_engine import (
    GARBAGE,
    HashModel,
    ask,
    assert_drained,
    logits_of,
    make_engine,
    mix,
    namespaces,
    params,
    prompt,
    prompts,
    run,
    salt_of,
)
from .test_samples import samples

SOON_S = 20


class VersionedModel(HashModel):
    """See the module.

    Attributes:
        lives: per task the admission that it lives by, and the version of each computed token.
    """

    def __init__(self, num_blocks=64, block_size=4):
        super().__init__(num_blocks, block_size)
        self.lives = {}

    def forward(self, batch):
        version = self.rank_kv.weights_version
        for (task, count), stop in zip(self.step, batch.context_lens.tolist(), strict=True):
            admission = task.sequence.kv_state.admission
            if self.lives.get(task, (None,))[0] != admission:  # what it found is of this version
                self.lives[task] = (admission, [version] * (stop - count))
            versions = self.lives[task][1]
            versions += [version] * count
            assert len(versions) == stop
        return super().forward(batch)

    def versions_of(self, request_id):
        return next(
            v for task, (_, v) in self.lives.items() if task.request.request_id == request_id
        )

    def next_token(self, request, tokens):
        """What must follow the tokens, from the versions that they were computed by."""
        numbers, number = [], 0
        for token, version in zip(tokens, self.versions_of(request.request_id), strict=True):
            namespace = replace(request.namespace, weights_version=version)
            number = mix(number, token, salt_of(namespace))
            numbers.append(number)
        seed = request.params.seed or 0
        return sample(logits_of(numbers), request.params, seed, request.sample_index, len(tokens))


def make(num_blocks=64, block_size=4, **config):
    model = VersionedModel(num_blocks, block_size)
    return make_engine(model, num_blocks=num_blocks, block_size=block_size, eos=(), **config)


def update(engine, version, mode="keep"):
    engine.lifecycle.prepare_weights(version, None)
    engine.lifecycle.apply_weights(version, mode)


def long_ask(name, tokens=None, namespace=Namespace(), max_tokens=12, **more):  # noqa: B008
    tokens = prompt(9) if tokens is None else tokens
    return ask(name, tokens, namespace, max_tokens=max_tokens, ignore_eos=True, **more)


def steps(engine, count):
    """So many steps: all their deltas."""
    deltas = [delta for _ in range(count) for _, delta in engine.step()]
    engine.check_integrity()
    return deltas


def finish(engine):
    """{request id: its last delta}, once nothing is left."""
    last = {}
    for _ in range(1000):
        if not engine.has_work:
            break
        last |= {delta.request_id: delta for delta in steps(engine, 1) if delta.is_last}
    assert not engine.has_work
    return last


def num_found(engine, tokens, version):
    """Tokens of a prompt that are cached under a version."""
    probe = Sequence([*tokens, 1], namespace=Namespace(weights_version=version))
    engine.kv.allocate_shared(probe)
    count = probe.kv_state.num_computed_tokens
    engine.kv.deallocate_without_cache(probe)
    return count


# -- keep ------------------------------------------------------------------------------------------


def test_a_sequence_goes_on_and_each_token_says_its_version():
    engine = make()
    request = long_ask("x")
    engine.submit([request])
    deltas = steps(engine, 5)
    update(engine, 3)
    output = finish(engine)["x"].output
    assert output.weights_versions == (0,) * 5 + (3,) * 7
    assert output.weights_version == 3
    assert [delta.weights_version for delta in deltas] == [0] * 5
    tokens = prompt(9)
    # The fifth token was produced under the old weights, and its KV is computed under the new.
    assert engine.model.versions_of("x") == [0] * 13 + [3] * 7
    assert output.token_ids != tuple(run(make(), [request])["x"].token_ids)
    whole = [*tokens, *output.token_ids]
    assert num_found(engine, whole, 0) == 12
    assert num_found(engine, whole, 3) == 0
    assert_drained(engine)


def test_what_follows_finds_only_what_its_own_version_computed():
    engine = make()
    engine.submit([long_ask("x")])
    steps(engine, 5)
    update(engine, 1)
    output = finish(engine)["x"].output
    again = run(engine, [long_ask("y", [*prompt(9), *output.token_ids, 5])])["y"]
    assert again.num_cached_tokens == 0
    assert again.weights_versions == (1,) * 12
    third = run(engine, [long_ask("z", [*prompt(9), *output.token_ids, 5])])["z"]
    assert third.num_cached_tokens == 20
    assert third.token_ids == again.token_ids


def test_a_preempted_sequence_is_wholly_one_of_the_new_version():
    engine = make(num_blocks=14)
    engine.submit([long_ask(f"r{i}", prompt(9, i), max_tokens=20) for i in range(3)])
    steps(engine, 3)
    assert len(engine.scheduler.running) == 3
    update(engine, 1)
    outputs = {name: delta.output for name, delta in finish(engine).items()}
    preempted = [output for output in outputs.values() if output.num_preempted]
    assert preempted
    assert outputs["r0"].num_preempted == 0
    for output in outputs.values():
        assert output.weights_versions == (0,) * 3 + (1,) * 17
    # The last one to end is one of those that were admitted anew.
    name = next(n for n in ("r2", "r1") if outputs[n].num_preempted)
    tokens = [*prompt(9, int(name[1])), *outputs[name].token_ids]
    assert set(engine.model.versions_of(name)) == {1}
    assert num_found(engine, tokens, 1) == 28
    assert num_found(engine, [*prompt(9), *outputs["r0"].token_ids], 1) == 0
    assert_drained(engine)


def test_a_follower_does_not_wait_for_a_leader_of_the_old_version():
    engine = make(budget=4)
    engine.submit([long_ask("leader", prompt(20), max_tokens=2)])
    steps(engine, 1)
    engine.submit([long_ask("follower", prompt(20), max_tokens=2)])
    steps(engine, 1)
    assert [task.request.request_id for task in engine.scheduler.running] == ["leader"]
    update(engine, 1)
    outputs = {name: delta.output for name, delta in finish(engine).items()}
    assert outputs["follower"].num_cached_tokens == 0
    assert set(engine.model.versions_of("follower")) == {1}
    assert engine.model.versions_of("leader") == [0] * 8 + [1] * 13


@pytest.mark.parametrize("when", ["in the prompt", "after it"])
def test_samples_of_one_prompt(when):
    """Who forked before the update spans it as its leader does; who did not, starts anew."""
    engine = make(budget=4)
    engine.submit(samples("x", prompt(10), 3))
    steps(engine, 2 if when == "in the prompt" else 4)
    update(engine, 1)
    outputs = {name: delta.output for name, delta in finish(engine).items()}
    if when == "after it":
        assert {o.weights_versions for o in outputs.values()} == {(0,) * 2 + (1,) * 8}
    else:
        assert {o.weights_versions for o in outputs.values()} == {(1,) * 10}
        assert engine.model.versions_of("x/0") == [0] * 8 + [1] * 11
        assert set(engine.model.versions_of("x/1")) == {1}
    for output in outputs.values():
        tokens = [*prompt(10), *output.token_ids]
        if when == "after it":
            assert num_found(engine, tokens, 1) == 0
        assert num_found(engine, tokens, 0) == 8
    assert_drained(engine)


def test_the_audit_sees_a_sequence_that_would_publish_under_another_version():
    engine = make()
    engine.submit([long_ask("x")])
    steps(engine, 2)
    update(engine, 1)
    engine.kv._stale_rows.clear()
    with pytest.raises(IntegrityError, match="version 0"):
        engine.check_integrity()


# -- wait and abort --------------------------------------------------------------------------------


def test_wait_lets_who_runs_end_first_and_admits_nobody_meanwhile():
    engine = make(max_num_seqs=2)
    engine.submit([long_ask(f"r{i}", prompt(9, i), max_tokens=5 + 4 * i) for i in range(4)])
    steps(engine, 2)
    update(engine, 1, "wait")
    late = long_ask("late", prompt(5, 9))
    engine.submit([late])
    deltas = steps(engine, 6)
    assert {delta.request_id for delta in deltas} == {"r0", "r1"}
    assert engine.kv.weights_version == 0
    assert engine.lifecycle.weights_status().pending == 1
    outputs = {d.request_id: d.output for d in deltas if d.output} | {
        name: delta.output for name, delta in finish(engine).items()
    }
    assert engine.kv.weights_version == 1
    versions = {name: set(output.weights_versions) for name, output in outputs.items()}
    assert versions == {"r0": {0}, "r1": {0}, "r2": {1}, "r3": {1}, "late": {1}}
    assert_drained(engine)


def test_who_was_preempted_ends_under_the_old_weights_too():
    engine = make(num_blocks=14)
    engine.submit([long_ask(f"r{i}", prompt(9, i), max_tokens=20) for i in range(3)])
    for _ in range(40):
        steps(engine, 1)
        if engine.scheduler.waiting:
            break
    assert engine.scheduler.waiting
    update(engine, 1, "wait")
    engine.submit([long_ask("late", [3])])
    outputs = {name: delta.output for name, delta in finish(engine).items()}
    assert {name: set(o.weights_versions) for name, o in outputs.items()} == {
        "r0": {0}, "r1": {0}, "r2": {0}, "late": {1},
    }  # fmt: skip


def test_wait_with_nothing_under_way_happens_at_once():
    engine = make()
    update(engine, 1, "wait")
    assert engine.kv.weights_version == 1
    assert not engine.has_work
    engine.submit([long_ask("x")])
    update(engine, 2, "wait")
    assert set(finish(engine)["x"].output.weights_versions) == {2}, "it had not started"


def test_an_update_given_up_while_it_waits_admits_again():
    engine = make(max_num_seqs=1)
    engine.submit([long_ask(f"r{i}", prompt(9, i)) for i in range(2)])
    steps(engine, 2)
    update(engine, 1, "wait")
    engine.lifecycle.cancel_weights(1)
    last = finish(engine)
    assert {name: set(d.output.weights_versions) for name, d in last.items()} == {
        "r0": {0}, "r1": {0},
    }  # fmt: skip


def test_samples_wait_with_the_rest_of_their_prompt():
    engine = make(budget=4)
    engine.submit(samples("x", prompt(10), 3))
    steps(engine, 2)
    update(engine, 1, "wait")
    last = finish(engine)
    versions = {name: set(delta.output.weights_versions) for name, delta in last.items()}
    assert versions == {"x/0": {0}, "x/1": {1}, "x/2": {1}}


def test_abort_ends_everybody_with_the_tokens_so_far():
    engine = make(max_num_seqs=2)
    for driver_id in ("a", "b"):
        engine.submit([long_ask(f"r{i}", prompt(9, i)) for i in range(2)], driver_id)
    steps(engine, 4)
    update(engine, 1, "abort")
    assert engine.kv.weights_version == 1
    deltas = engine.step()
    assert sorted((who, delta.request_id) for who, delta in deltas) == sorted(
        itertools.product("ab", ["r0", "r1"])
    )
    for who, delta in deltas:
        output = delta.output
        assert output.stop_reason == "abort"
        assert output.weights_versions == ((0,) * 4 if who == "a" else ())
    first = next(delta.output for who, delta in deltas if (who, delta.request_id) == ("a", "r0"))
    assert num_found(engine, [*prompt(9), *first.token_ids], 0) == 12
    assert num_found(engine, [*prompt(9), *first.token_ids], 1) == 0
    assert_drained(engine)


# -- who asks for a version ------------------------------------------------------------------------


def test_a_version_is_served_only_while_it_is_the_current_one():
    engine = make()
    with pytest.raises(RequestError, match=r"asks for weights version 2, but rank 0 serves 0"):
        engine.submit([long_ask("x", namespace=Namespace(weights_version=2))])
    update(engine, 2)
    asked = [
        long_ask("any", prompt(9)),
        long_ask("two", prompt(9), Namespace(weights_version=2)),
        long_ask("lora", prompt(9), Namespace(lora="l", weights_version=2)),
    ]
    outputs = run(engine, asked)
    assert outputs["any"].token_ids == outputs["two"].token_ids != outputs["lora"].token_ids
    assert outputs["two"].num_cached_tokens == 8
    with pytest.raises(RequestError, match=r"version 1, but rank 0 serves 2"):
        engine.submit([long_ask("ok"), long_ask("x", namespace=Namespace(weights_version=1))])
    assert not engine.has_work


def test_who_insists_on_a_version_and_has_not_started_fails_at_the_update():
    engine = make(max_num_seqs=1)
    update(engine, 1)
    first = Namespace(weights_version=1)
    engine.submit([long_ask("runs", prompt(9), first), long_ask("waits", prompt(7), first)])
    engine.submit([long_ask("any", prompt(5))])
    steps(engine, 2)
    update(engine, 2)
    last = finish(engine)
    assert type(last["waits"].error) is RequestError
    assert "version 1, but rank 0 serves 2" in str(last["waits"].error)
    assert last["runs"].output.weights_versions == (1,) * 2 + (2,) * 10
    assert set(last["any"].output.weights_versions) == {2}
    assert_drained(engine)


# -- weights that a runner reads -------------------------------------------------------------------


class StagedNumber:
    def __init__(self, model, number):
        self.model, self.number = model, number

    def apply(self):
        self.model.weights = self.number


class NumberModel(VersionedModel):
    """Its weights are one number, or an error; it reads them when it is let go on."""

    def __init__(self):
        super().__init__()
        self.weights, self.bound, self.source = 0, None, "first"
        self.go_on = threading.Event()
        self.go_on.set()

    def stage(self, weights):
        assert self.go_on.wait(SOON_S)
        if isinstance(weights, Exception):
            raise weights
        return StagedNumber(self, weights)

    @property
    def can_reload(self):
        return self.source is not None

    def reload(self):
        return self.stage(self.source)

    def drop(self):
        self.weights = None

    def bind(self, buffers):
        self.bound = buffers

    def unbind(self):
        self.bound = None

    def forward(self, batch):
        assert self.weights is not None, "it ran without weights"
        return super().forward(batch)


def until(engine, is_done):
    stop = time.monotonic() + SOON_S
    while not is_done(engine.lifecycle.weights_status()):
        assert time.monotonic() < stop
        time.sleep(0.001)
    return engine.lifecycle.weights_status()


@pytest.fixture
def numbered():
    engine = make_engine(NumberModel(), eos=())
    yield engine
    engine.model.go_on.set()
    assert_drained(engine)


def test_requests_go_on_while_weights_are_read(numbered):
    engine, model = numbered, numbered.model
    model.go_on.clear()
    engine.submit([long_ask("x")])
    engine.lifecycle.prepare_weights(1, 11)
    assert len(steps(engine, 3)) == 3
    status = engine.lifecycle.weights_status()
    assert (status.version, status.pending, status.is_staged) == (0, 1, False)
    with pytest.raises(RequestError, match="not prepared"):
        engine.lifecycle.apply_weights(1, "keep")
    model.go_on.set()
    until(engine, lambda status: status.is_staged)
    assert model.weights == 0, "read, not used"
    engine.lifecycle.apply_weights(1, "keep")
    assert model.weights == 11
    assert finish(engine)["x"].output.weights_versions == (0,) * 3 + (1,) * 9


@pytest.mark.parametrize("error", [RequestError("no such file"), OSError("no such file")])
def test_weights_that_cannot_be_read_change_nothing(numbered, error):
    engine = numbered
    engine.submit([long_ask("x")])
    steps(engine, 2)
    engine.lifecycle.prepare_weights(1, error)
    status = until(engine, lambda status: status.error is not None)
    assert type(status.error) is RequestError
    assert "no such file" in str(status.error)
    with pytest.raises(RequestError, match="not prepared"):
        engine.lifecycle.apply_weights(1, "keep")
    engine.lifecycle.prepare_weights(1, 11)  # a failed one is in nobody's way
    until(engine, lambda status: status.is_staged)
    engine.lifecycle.cancel_weights(1)
    assert engine.model.weights == 0
    assert finish(engine)["x"].output.weights_versions == (0,) * 12


def test_a_runner_without_weights_changes_its_version_only():
    engine = make()
    for call in (
        lambda: engine.lifecycle.prepare_weights(1, {}),
        lambda: engine.lifecycle.sleep(2),
    ):
        with pytest.raises(NotSupportedError, match="VersionedModel"):
            call()
    update(engine, 1)
    assert engine.kv.weights_version == 1


# -- sleep -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("rounds", [1, 3])
def test_requests_go_on_after_waking_as_if_nothing_had_been(numbered, level, rounds):
    engine = numbered
    asked = [long_ask(f"r{i}", prompt(9, i), temperature=1.0, seed=i) for i in range(3)]
    wanted = run(make(), asked)
    engine.submit(asked[:2])
    for _ in range(rounds):
        steps(engine, 2)
        engine.lifecycle.sleep(level)
        assert engine.kv.rank_stats().num_free_blocks == 63
        assert not engine.has_work
        assert engine.step() == []
        engine.lifecycle.wake_up()
        until(engine, lambda status: not status.asleep)
        assert engine.has_work
    engine.lifecycle.sleep(level)
    engine.submit(asked[2:])  # it waits
    assert not engine.has_work
    engine.lifecycle.wake_up()
    until(engine, lambda status: not status.asleep)
    for name, delta in finish(engine).items():
        assert delta.output.token_ids == wanted[name].token_ids
        assert delta.output.num_preempted == (0 if name == "r2" else rounds)


def test_an_abort_is_reported_while_asleep(numbered):
    engine = numbered
    engine.submit([long_ask("x"), long_ask("y")])
    steps(engine, 3)
    engine.lifecycle.sleep(1)
    engine.abort(["x"])
    assert engine.has_work
    [(_, delta)] = engine.step()
    assert (delta.request_id, delta.output.stop_reason) == ("x", "abort")
    assert not engine.has_work
    engine.lifecycle.wake_up()
    assert set(finish(engine)) == {"y"}


def test_sequences_of_another_scheduler_keep_it_awake(numbered):
    engine = numbered
    foreign = Sequence(prompt(10, 9))
    assert engine.kv.allocate(foreign)
    engine.submit([long_ask("x")])
    steps(engine, 3)
    before = engine.kv.rank_stats()
    for check_only in (True, False):
        with pytest.raises(RequestError, match="1 sequences of your scheduler hold 3 blocks"):
            engine.lifecycle.sleep(2, check_only=check_only)
    assert engine.kv.rank_stats() == before
    assert engine.lifecycle.weights_status().asleep == ()
    engine.kv.deallocate(foreign)
    engine.lifecycle.sleep(2, check_only=True)
    assert len(engine.scheduler.running) == 1
    assert finish(engine)["x"].output.num_preempted == 0


def test_levels_and_tags_add_up(numbered):
    cycle, model = numbered.lifecycle, numbered.model
    cycle.sleep(1)
    cycle.sleep(1)
    assert model.weights == 0
    cycle.sleep(2)
    cycle.sleep(1)
    assert cycle.weights_status().asleep == ("kv_cache", "weights")
    assert model.weights is None
    cycle.wake_up(["kv_cache"])
    assert cycle.weights_status().asleep == ("weights",)
    cycle.sleep(1)
    cycle.wake_up(["weights"])
    until(numbered, lambda status: status.asleep == ("kv_cache",))
    assert model.weights == "first"
    cycle.wake_up()
    cycle.wake_up()
    assert cycle.weights_status().asleep == ()


def test_weights_that_came_as_arrays_are_brought_again_by_an_update(numbered):
    engine, model = numbered, numbered.model
    engine.submit([long_ask("x")])
    steps(engine, 2)
    engine.lifecycle.sleep(2)
    model.source = None
    for tags in (None, ["weights"]):
        with pytest.raises(RequestError, match=r"tags=\['kv_cache'\].*update_weights"):
            engine.lifecycle.wake_up(tags)
    assert engine.lifecycle.weights_status().asleep == ("kv_cache", "weights")
    engine.lifecycle.wake_up(["kv_cache"])
    engine.lifecycle.prepare_weights(1, 11)
    until(engine, lambda status: status.is_staged)
    with pytest.raises(RequestError, match="'keep' or 'abort'"):
        engine.lifecycle.apply_weights(1, "wait")
    engine.lifecycle.apply_weights(1, "keep")
    assert model.weights == 11
    assert engine.lifecycle.weights_status().asleep == ()
    output = finish(engine)["x"].output
    assert output.weights_versions == (0,) * 2 + (1,) * 10
    assert set(model.versions_of("x")) == {1}, "it was computed anew"


def test_a_failed_waking_says_why_and_can_be_tried_again(numbered):
    engine, model = numbered, numbered.model
    engine.lifecycle.sleep(2)
    model.source = OSError("unmounted")
    engine.lifecycle.wake_up()
    status = until(engine, lambda status: status.error is not None)
    assert "unmounted" in str(status.error)
    assert status.asleep == ("weights",)
    model.source = "again"
    model.go_on.clear()
    engine.lifecycle.wake_up()
    for call in (
        lambda: engine.lifecycle.sleep(1),
        lambda: engine.lifecycle.prepare_weights(1, 11),
    ):
        with pytest.raises(RequestError, match="waking up"):
            call()
    model.go_on.set()
    status = until(engine, lambda status: not status.asleep)
    assert status.error is None
    assert model.weights == "again"


# -- random histories ------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Requests come and go while weights change and the engine sleeps; every token is known."""

    def __init__(self):
        super().__init__()
        self.live: dict[str, tuple[GenerationRequest, list[int], list[int]]] = {}
        self.names = itertools.count()
        self.pending = None

    @initialize(
        num_blocks=st.integers(6, 20),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, cache):
        self.engine = make(
            num_blocks + 20 // block_size,
            block_size,
            max_num_seqs=max_num_seqs,
            enable_prefix_cache=cache,
            budget=budget,
        )

    @rule(tokens=prompts, params=params, namespace=namespaces, insists=st.integers(0, 5))
    def submit(self, tokens, params, namespace, insists):
        if not insists:
            version = self.engine.kv.weights_version
            namespace = replace(namespace, weights_version=version)
        name = str(next(self.names))
        request = GenerationRequest(name, np.array(tokens, np.int32), params, namespace)
        self.engine.submit([request])
        self.live[name] = (request, [], [])

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.take(self.engine.step())

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def abort(self, index):
        self.engine.abort([list(self.live)[index % len(self.live)]])

    @rule(mode=st.sampled_from(["wait", "abort", "keep", "keep"]))
    def update(self, mode):
        if self.pending is not None:
            return
        version = self.engine.kv.weights_version + 1
        before = self.engine.scheduler.has_started
        update(self.engine, version, mode)
        if mode == "wait" and before:
            assert self.engine.kv.weights_version == version - 1
            self.pending = version
        else:
            assert self.engine.kv.weights_version == version

    @rule()
    def give_up_the_update(self):
        if self.pending is not None:
            self.engine.lifecycle.cancel_weights(self.pending)
            self.pending = None

    @rule(submits=st.booleans())
    def sleep(self, submits):
        if self.pending is not None:
            with pytest.raises(RequestError):
                self.engine.lifecycle.sleep(1)
            return
        self.engine.lifecycle.sleep(1)
        stats = self.engine.kv.rank_stats()
        assert stats.num_free_blocks == stats.num_total_blocks
        self.take(self.engine.step())
        self.engine.lifecycle.wake_up()

    @rule(back=st.integers(0, 2))
    def retire(self, back):
        self.engine.lifecycle.retire(max(0, self.engine.kv.weights_version - back))

    def take(self, deltas):
        engine, version = self.engine, self.engine.kv.weights_version
        for _, delta in deltas:
            request, tokens, versions = self.live[delta.request_id]
            if delta.error is not None:
                asked = request.namespace.weights_version
                assert asked not in {0, version}
                assert f"asks for weights version {asked}" in str(delta.error)
                assert tokens == []
            for token in delta.token_ids:
                whole = [*request.token_ids.tolist(), *tokens]
                assert token == engine.model.next_token(request, whole)
                assert delta.weights_version == version
                tokens.append(token)
                versions.append(version)
            if delta.output is not None:
                assert list(delta.output.token_ids) == tokens
                assert list(delta.output.weights_versions) == versions
                assert delta.output.weights_version == (versions[-1] if versions else 0)
            if delta.is_last:
                del self.live[delta.request_id]

    @invariant()
    def books_balance(self):
        if not hasattr(self, "engine"):
            return
        if self.pending == self.engine.kv.weights_version:
            self.pending = None
        self.engine.check_integrity()
        manager, model = self.engine.kv.block_manager, self.engine.model
        free = np.flatnonzero(manager._ledger.counts == FREE)
        model.slots.reshape(-1, model.block_size)[free] = GARBAGE

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


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.nightly
class TestLongHistories(Histories.TestCase):
    settings = settings(TestHistories.settings, max_examples=2000, stateful_step_count=80)
