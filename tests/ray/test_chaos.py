"""Ranks are killed and stopped at random moments under continuous load."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field

import pytest

from raykv import SamplingParams, Sequence

from .conftest import wait_until

BOUND_S = 120
PROMPTS = [[1 + i, 2, 3, 4 + i % 3, 5] * 6 for i in range(8)]
PARAMS = {
    "greedy": SamplingParams(max_tokens=80, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=120, temperature=1.0, seed=5, n=2, ignore_eos=True),
    "long": SamplingParams(max_tokens=300, temperature=0.8, seed=9, ignore_eos=True),
}


@dataclass
class Blow:
    """One signal to a rank, and how it was taken; seconds on ``time.monotonic``.

    Attributes:
        sent: when it was sent.
        noticed: when the driver knew.
        back: when the rank was taken back.
    """

    rank: int
    how: signal.Signals
    sent: float
    noticed: float = 0.0
    back: float = 0.0

    def overlap(self, start, end):
        """The part of an interval in which the rank was down."""
        return max(start, self.sent), min(end, self.back)


@dataclass
class Load:
    """Threads that generate without a pause and compare what comes."""

    pool: object
    expected: dict
    wrong: list = field(default_factory=list)
    calls: list = field(default_factory=list)  # when each began and ended
    num_failed_over: int = 0

    def __post_init__(self):
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name,), daemon=True) for name in PARAMS
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, name):
        rng = random.Random(name)
        while not self._stopped.is_set():
            index = rng.randrange(len(PROMPTS))
            start = time.monotonic()
            try:
                outputs = self.pool.generate(PROMPTS[index], PARAMS[name])
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self.wrong.append(error)
                continue
            self.calls.append((start, time.monotonic()))
            self.num_failed_over += sum(output.num_failed_over for output in outputs)
            found = [output.token_ids for output in outputs]
            if found != self.expected[name, index]:
                self.wrong.append((name, index, found))

    def stop(self):
        self._stopped.set()
        for thread in self._threads:
            thread.join(BOUND_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request did not end"


def strike(pool, rank, how, watchers):
    """Signal a rank, wait until the driver knows, and watch from a thread until it is back."""
    handle = pool.ranks[rank]
    session, pid = handle.session, handle.info.pid
    blow = Blow(rank, how, time.monotonic())
    os.kill(pid, how)
    wait_until(lambda: handle.session != session, BOUND_S)
    blow.noticed = time.monotonic()

    def watch():
        if how == signal.SIGSTOP:
            time.sleep(0.5)
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: handle.lost is None, BOUND_S)
        blow.back = time.monotonic()

    watchers.append(threading.Thread(target=watch, daemon=True))
    watchers[-1].start()
    return blow


def run_chaos(make_pool, tiny_model, plan, rng):
    pool = make_pool(dp_size=2, model={"path": tiny_model}, num_blocks=400, max_num_seqs=8)
    expected = {
        (name, index): [output.token_ids for output in pool.generate(prompt, params)]
        for name, params in PARAMS.items()
        for index, prompt in enumerate(PROMPTS)
    }
    load = Load(pool, expected)
    time.sleep(3)
    calm, load.calls = load.calls, []
    blows, watchers = [], []
    for how in plan:
        time.sleep(rng.random() * 2)
        rank = rng.randrange(2)
        # Half of the blows hit a whole pool, the others often the only rank that is left.
        enough = all if rng.random() < 0.5 else any
        wait_until(lambda enough=enough: enough(h.lost is None for h in pool.ranks), BOUND_S)
        if pool.ranks[rank].lost is not None:
            rank = 1 - rank  # the other one is on its way back: now none is left
        blows.append(strike(pool, rank, how, watchers))
    for thread in watchers:
        thread.join()
    wait_until(lambda: all(handle.lost is None for handle in pool.ranks), BOUND_S)
    time.sleep(1)
    load.stop()
    assert load.wrong == []
    # Nothing is left of what was given up, there or here.
    assert not any(pool.generations._pending)
    assert pool._router.debits == [0, 0]
    wait_until(lambda: pool.num_used_blocks() == [0, 0], BOUND_S)
    pool.check_integrity()
    for name, index in rng.sample(sorted(expected), 6):
        again = pool.generate(PROMPTS[index], PARAMS[name], dp_rank=rng.randrange(2))
        assert [output.token_ids for output in again] == expected[name, index], "a stale block"
    report(load, calm, blows)
    return load, blows


def without_a_rank_s(blows, start, end):
    """Seconds of an interval in which both ranks were down."""
    total = 0.0
    for one in blows:
        for two in blows:
            if one.rank < two.rank:
                low, high = one.overlap(*two.overlap(start, end))
                total += max(0.0, high - low)
    return total


def report(load, calm, blows):
    """Print how long calls took, and how soon losses were noticed and made good."""
    calls = load.calls
    print(f"\n{len(calls)} calls, {load.num_failed_over} failovers")  # noqa: T201
    waits = {
        "calm": [end - start for start, end in calm],
        "chaos": [end - start for start, end in calls],
        "chaos, less the time without a rank": [
            end - start - without_a_rank_s(blows, start, end) for start, end in calls
        ],
    }
    for name, values in waits.items():
        values.sort()
        marks = [f"p{q} {values[q * len(values) // 100]:.2f}" for q in (50, 90, 99)]
        print(f"{name}: seconds {', '.join(marks)}, slowest {values[-1]:.2f}")  # noqa: T201
    for blow in blows:
        noticed, back = blow.noticed - blow.sent, blow.back - blow.sent
        print(f"{blow.how.name} rank {blow.rank}: noticed {noticed:.2f}, back {back:.2f}")  # noqa: T201


@pytest.mark.parametrize("sees_the_process", [True, False])
def test_a_death_is_noticed_before_the_rank_is_back(make_pool, sees_the_process):
    pool = make_pool(dp_size=2, ray={"heartbeat_s": 0.1, "silence_s": 0.4})
    rank = pool.ranks[0]
    if not sees_the_process:
        rank._process = None  # as of one on another node
    pid = rank.info.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rank.lost is not None)
    assert ("died" if sees_the_process else "silent") in rank.lost
    sequence = Sequence(range(8))
    assert pool.allocate(sequence)
    assert sequence.dp_rank == 1
    wait_until(lambda: rank.lost is None, BOUND_S)
    assert rank.info.pid != pid


def test_outputs_outlive_kills_and_a_stop(make_pool, tiny_model):
    plan = [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL]
    load, blows = run_chaos(make_pool, tiny_model, plan, random.Random(1))
    assert load.num_failed_over > 0
    assert len(blows) == 4


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(2))
def test_outputs_outlive_a_night_of_kills(make_pool, tiny_model, seed):
    rng = random.Random(seed)
    plan = [signal.SIGKILL] * 20 + [signal.SIGSTOP] * 5
    rng.shuffle(plan)
    load, _ = run_chaos(make_pool, tiny_model, plan, rng)
    assert load.num_failed_over >= 20
