"""Weights versions and sleep through the engine, over the model that notices every wrong slot.

``VersionedModel`` salts each token's number with the version that computed it, and notes which
versions each sequence went through. So what must come out of a sequence that spans an update is
known token by token, and a cached block of any other history than the one it is found under shows.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from raykv.core import Namespace, Sequence
from raykv.engine.sampler import sample
from raykv.errors import IntegrityError, RequestError

from .test_engine import (
    HashModel,
    ask,
    assert_drained,
    logits_of,
    make_engine,
    mix,
    prompt,
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
    engine.lifecycle.prepare_weights(version, None, mode)
    engine.lifecycle.apply_weights(version)


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
    engine.kv._rows.stale.clear()
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
        assert output.weights_version == 0
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
