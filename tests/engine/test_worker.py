"""The thread that owns a rank. No test sleeps for a result: what is awaited has a timeout."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from raykv.core.sequence import Sequence
from raykv.engine.worker import RankWorker
from raykv.errors import IntegrityError, RankUnavailableError, RequestError

from .test_engine import HashModel, ask, assert_drained, expected, make_engine, prompt, same

SOON_S = 20


class SlowModel(HashModel):
    """Waits within each forward pass until it is let go on, if ``hold`` was called."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()
        self.entered = threading.Event()
        self.go_on.set()

    def hold(self):
        self.go_on.clear()
        self.entered.clear()

    def copy_blocks(self, sources, targets):
        raise AssertionError("nothing forks here")

    def forward(self, batch):
        self.entered.set()
        assert self.go_on.wait(SOON_S)
        return super().forward(batch)


@pytest.fixture
def workers():
    """Makes workers; none of their threads may outlive its test."""
    made = []

    def make(engine=None, **config):
        made.append(RankWorker(engine or make_engine(SlowModel(), **config)))
        return made[-1]

    yield make
    for worker in made:
        worker.engine.model.go_on.set()
        worker.close()
        assert not worker._thread.is_alive()


def poll(worker, driver_id, wait_s):
    """What came since the last time, as a driver that counts what it has seen."""
    seen = worker.__dict__.setdefault("seen", {})
    first, deltas = worker.poll(driver_id, wait_s, seen.get(driver_id, 0))
    assert first == seen.get(driver_id, 0)
    seen[driver_id] = first + len(deltas)
    return deltas


def outputs_of(worker, count, driver_id=""):
    """Poll until so many requests are over: {request id: output or error}."""
    over, stop = {}, time.monotonic() + SOON_S
    while len(over) < count:
        assert time.monotonic() < stop, f"only {over} came"
        for delta in poll(worker, driver_id, 0.5):
            if delta.is_last:
                over[delta.request_id] = delta.output or delta.error
    return over


def submit(worker, *requests, driver_id=""):
    return worker.call(lambda: worker.engine.submit(requests, driver_id)).result(SOON_S)


def test_outputs_come_to_the_driver_that_asked(workers):
    worker = workers()
    requests = {"a": ask("x", prompt(9), max_tokens=9), "b": ask("x", prompt(7), max_tokens=9)}
    for driver_id, request in requests.items():
        submit(worker, request, driver_id=driver_id)
    for driver_id, request in requests.items():
        assert same(outputs_of(worker, 1, driver_id)["x"], expected(request))
    assert poll(worker, "c", 0) == []
    worker.call(lambda: assert_drained(worker.engine)).result(SOON_S)


def test_calls_run_on_the_owning_thread_between_steps(workers):
    worker = workers()
    model = worker.engine.model
    model.hold()
    submit(worker, ask("x", prompt(9), max_tokens=40, ignore_eos=True))
    assert model.entered.wait(SOON_S)  # within a step now
    seen = []
    future = worker.call(lambda: seen.append(threading.current_thread().name))
    second = worker.call(lambda: seen.append(len(model.batches)))
    assert not future.done()
    steps = len(model.batches)
    model.go_on.set()
    future.result(SOON_S)
    second.result(SOON_S)
    assert seen == ["raykv-rank-0", steps + 1]


def test_an_answer_does_not_wait_for_the_next_step(workers):
    worker = workers()
    model = worker.engine.model
    model.hold()
    request = ask("x", prompt(9), max_tokens=2)
    worker.call(lambda: worker.engine.submit([request])).result(SOON_S)
    assert model.entered.wait(SOON_S)
    assert not model.go_on.is_set()


def test_calls_that_never_cease_do_not_hold_up_the_engine(workers):
    worker = workers()
    calls = [0]

    def again():
        calls[0] += 1
        worker.call(again)

    worker.call(again)
    request = ask("x", prompt(9), max_tokens=9)
    submit(worker, request)
    assert same(outputs_of(worker, 1)["x"], expected(request))
    assert calls[0] > 5


@pytest.mark.parametrize("error", [ValueError("as asked"), RequestError("no"), SystemExit(3)])
def test_the_error_of_a_call_goes_to_its_caller(workers, error):
    worker = workers()

    def fail():
        raise error

    failing, fine = worker.call(fail), worker.call(lambda: 5)
    assert failing.exception(SOON_S) is error
    assert fine.result(SOON_S) == 5
    request = ask("x", prompt(9))
    submit(worker, request)
    assert same(outputs_of(worker, 1)["x"], expected(request))


def test_a_caller_that_gives_up_harms_nobody(workers):
    """As a cancelled coroutine does through asyncio.wrap_future."""
    worker = workers()
    model = worker.engine.model
    model.hold()
    submit(worker, ask("x", prompt(9), max_tokens=2))
    assert model.entered.wait(SOON_S)
    ran = []
    given_up = worker.call(lambda: ran.append(1))
    kept = worker.call(lambda: 6)
    assert given_up.cancel()
    model.go_on.set()
    assert kept.result(SOON_S) == 6
    with pytest.raises(CancelledError):
        given_up.result(SOON_S)
    assert not ran
    assert len(outputs_of(worker, 1)) == 1


def test_poll_waits_wakes_and_gives_up_in_time(workers):
    worker = workers()
    start = time.monotonic()
    assert poll(worker, "", 0.1) == []
    assert 0.1 <= time.monotonic() - start < 5
    assert poll(worker, "", 0) == []
    got = []
    waiter = threading.Thread(target=lambda: got.extend(poll(worker, "", SOON_S)))
    waiter.start()
    start = time.monotonic()
    submit(worker, ask("x", prompt(9), max_tokens=1))
    waiter.join(SOON_S)
    assert time.monotonic() - start < SOON_S / 2
    assert got[0].request_id == "x"


def test_submit_is_all_or_none(workers):
    worker = workers()
    with pytest.raises(RequestError, match="vocabulary"):
        submit(worker, ask("good", prompt(9)), ask("bad", [999]))
    request = ask("good", prompt(9))
    submit(worker, request)
    assert same(outputs_of(worker, 1)["good"], expected(request))
    assert worker.stats.num_admissions_total == 1


def test_aborts_reach_whoever_polls(workers):
    worker = workers()
    model = worker.engine.model
    model.hold()  # else it may be over before the abort gets there
    submit(worker, ask("x", prompt(9), max_tokens=50, ignore_eos=True))
    assert model.entered.wait(SOON_S)
    aborted = worker.call(lambda: worker.engine.abort(["x", "unknown"]))
    model.go_on.set()
    aborted.result(SOON_S)
    assert outputs_of(worker, 1)["x"].stop_reason == "abort"
    worker.call(lambda: assert_drained(worker.engine)).result(SOON_S)


def test_stats_and_the_heartbeat_follow(workers):
    worker = workers()
    before = worker.last_moved
    sequence = Sequence(prompt(9))
    assert worker.call(lambda: worker.engine.kv.allocate(sequence)).result(SOON_S)
    assert worker.stats.num_used_blocks == 3, "an answer comes with the books after it"
    assert worker.last_moved > before
    worker.engine.model.hold()
    submit(worker, ask("x", prompt(9)))
    assert worker.engine.model.entered.wait(SOON_S)
    stuck = worker.last_moved
    time.sleep(0.05)
    assert worker.last_moved == stuck
    worker.engine.model.go_on.set()
    outputs_of(worker, 1)
    assert worker.last_moved > stuck


def test_memory_of_other_schedulers_neither_blocks_nor_spins(workers):
    worker = workers(num_blocks=64)
    kv = worker.engine.kv
    foreign = Sequence(np.ones(62 * 4, np.int32))
    assert worker.call(lambda: kv.allocate(foreign)).result(SOON_S)
    request = ask("x", prompt(9), max_tokens=9)
    submit(worker, request)
    schedule, turns = worker.engine.scheduler.schedule, []

    def counted():
        turns.append(1)
        return schedule()

    worker.engine.scheduler.schedule = counted
    assert poll(worker, "", 0.3) == []
    assert len(turns) < 60, "it looks again every 10 ms, no more"
    assert len(worker.engine.model.batches) == 0
    start = time.monotonic()
    worker.call(lambda: kv.deallocate(foreign)).result(SOON_S)
    assert time.monotonic() - start < 5
    assert same(outputs_of(worker, 1)["x"], expected(request))


def test_an_idle_worker_sleeps(workers):
    worker = workers()
    submit(worker, ask("x", prompt(9), max_tokens=1))
    outputs_of(worker, 1)
    deadline, moved = time.monotonic() + SOON_S, 0.0
    while worker.last_moved != moved:
        assert time.monotonic() < deadline, "it turns and turns"
        moved = worker.last_moved
        time.sleep(0.1)


def test_close_fails_calls_polls_and_is_idempotent(workers):
    worker = workers()
    model = worker.engine.model
    model.hold()
    submit(worker, ask("x", prompt(9), max_tokens=30, ignore_eos=True))
    assert model.entered.wait(SOON_S)
    pending = worker.call(lambda: 1)
    given_up = worker.call(lambda: 2)
    given_up.cancel()
    errors = []

    def wait():
        try:
            while True:
                poll(worker, "", SOON_S)
        except RankUnavailableError as error:
            errors.append(error)

    pollers = [threading.Thread(target=wait) for _ in range(3)]
    closers = [threading.Thread(target=worker.close) for _ in range(2)]
    for thread in pollers + closers:
        thread.start()
    model.go_on.set()
    for thread in pollers + closers:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert len(errors) == 3
    with pytest.raises(RankUnavailableError, match="closed"):
        pending.result(SOON_S)
    with pytest.raises(RankUnavailableError, match="rank 0 was closed: make a new pool"):
        worker.call(lambda: 1)
    worker.close()


def test_a_call_may_close_its_worker(workers):
    worker = workers()
    worker.call(worker.close).result(SOON_S)
    worker._thread.join(SOON_S)
    with pytest.raises(RankUnavailableError):
        worker.call(lambda: 1)


def test_outputs_made_before_the_end_are_still_handed_out(workers):
    worker = workers()
    request = ask("x", prompt(9), max_tokens=1)
    assert poll(worker, "", 0) == []
    submit(worker, request)
    deadline = time.monotonic() + SOON_S
    while "" not in worker._channels:  # made by the first delta
        assert time.monotonic() < deadline
        time.sleep(0.001)
    worker.close()
    [delta] = poll(worker, "", 1)
    assert same(delta.output, expected(request))
    with pytest.raises(RankUnavailableError):
        poll(worker, "", 1)


def test_a_bug_in_a_step_ends_the_worker_and_everybody_hears_of_it(workers):
    worker = workers()
    model = worker.engine.model
    got = []

    def wait():
        try:
            poll(worker, "other", SOON_S)
        except RankUnavailableError as error:
            got.append(error)

    poller = threading.Thread(target=wait)
    poller.start()
    model.hold()
    submit(worker, ask("x", prompt(9)))
    assert model.entered.wait(SOON_S)

    def broken():
        raise IntegrityError("the books are wet")

    worker.engine.scheduler.schedule = broken
    pending = worker.call(lambda: worker.call(lambda: 1))
    model.go_on.set()
    nested = pending.result(SOON_S)  # it ran before the step that failed
    poller.join(SOON_S)
    assert not poller.is_alive()
    with pytest.raises(RankUnavailableError, match="wet"):
        nested.result(SOON_S)
    worker._channels.clear()
    for use in (
        lambda: poll(worker, "", SOON_S),
        lambda: worker.call(lambda: 1),
        lambda: poll(worker, "other", 0),
    ):
        with pytest.raises(RankUnavailableError, match=r"rank 0 stopped on IntegrityError.*wet"):
            use()
    assert "IntegrityError" in str(got[0])
    worker.close()


def test_many_threads_get_their_own_answers(workers):
    worker = workers(num_blocks=30, max_num_seqs=4)
    wrong = []

    def drive(driver_id):
        rng = np.random.default_rng(int(driver_id))
        for round_ in range(5):
            request = ask(
                "same-id", prompt(int(rng.integers(1, 30)), round_), max_tokens=9, ignore_eos=True
            )
            submit(worker, request, driver_id=driver_id)
            if worker.call(lambda: driver_id).result(SOON_S) != driver_id:
                wrong.append(driver_id)
            output = outputs_of(worker, 1, driver_id)["same-id"]
            if not same(output, expected(request)):
                wrong.append(output)

    threads = [threading.Thread(target=drive, args=(str(i),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON_S)
        assert not thread.is_alive()
    assert not wrong
    worker.call(lambda: assert_drained(worker.engine)).result(SOON_S)
