"""Reading weights beside serving, and sleep, through the engine; the runner is a stub."""

from __future__ import annotations

import threading
import time

import pytest

from raykv.core import Sequence
from raykv.errors import NotSupportedError, RequestError

from .test_engine import assert_drained, make_engine, prompt, run
from .test_versions import VersionedModel, finish, long_ask, make, steps, update

SOON_S = 20

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
    engine.lifecycle.prepare_weights(1, 11, "keep")
    assert len(steps(engine, 3)) == 3
    status = engine.lifecycle.weights_status()
    assert (status.version, status.pending, status.is_staged) == (0, 1, False)
    with pytest.raises(RequestError, match="not prepared"):
        engine.lifecycle.apply_weights(1)
    model.go_on.set()
    until(engine, lambda status: status.is_staged)
    assert model.weights == 0, "read, not used"
    engine.lifecycle.apply_weights(1)
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
        engine.lifecycle.apply_weights(1)
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
    with pytest.raises(RequestError, match="'keep' or 'abort'"):
        engine.lifecycle.prepare_weights(1, 11, "wait")
    engine.lifecycle.prepare_weights(1, 11, "keep")
    until(engine, lambda status: status.is_staged)
    engine.lifecycle.apply_weights(1)
    assert model.weights == 11
    assert engine.lifecycle.weights_status().asleep == ()
    output = finish(engine)["x"].output
    assert output.weights_versions == (0,) * 2 + (1,) * 10
    assert set(model.versions_of("x")) == {1}, "it was computed anew"


def test_an_update_wins_over_the_old_weights_that_are_being_read(numbered):
    engine, model = numbered, numbered.model
    engine.lifecycle.sleep(2)
    engine.lifecycle.prepare_weights(1, 11)
    until(engine, lambda status: status.is_staged)
    model.go_on.clear()
    engine.lifecycle.wake_up()
    waking = engine.lifecycle._waking
    engine.lifecycle.apply_weights(1)
    assert engine.lifecycle.weights_status().asleep == ()
    model.go_on.set()
    waking._thread.join(SOON_S)
    assert waking.staged is not None
    assert engine.lifecycle.weights_status().error is None
    assert model.weights == 11


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
