"""Generation while ranks die, freeze and come back, and messages are lost, doubled and late."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter

import pytest

from raykv import PoolConfig, SamplingParams
from raykv.engine.params import GenerationRequest
from raykv.rank_handle import Failed
from raykv.remote_rank import ReplyLostError
from raykv.testing import CALL_FAULTS, Faults, LoopbackRank, MortalHost, inject, loopback_driver

BOUND_S = 90
PROMPTS = [[1 + i, 2, 3, 4 + i % 3, 5] * 3 for i in range(6)]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
SEEDED = SamplingParams(max_tokens=25, temperature=1.0, seed=7, n=2, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
STREAM = SamplingParams(max_tokens=60, temperature=0.7, top_p=0.9, seed=3, ignore_eos=True)


def wait_until(holds):
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


def make_hosts(model, **settings):
    config = PoolConfig(
        dp_size=2, num_blocks=80, block_size=4, max_num_seqs=6, model={"path": model},
        ray={"heartbeat_s": 0.05, "ramp_s": 0.2}, **settings,
    ).with_seed()  # fmt: skip
    return [MortalHost(config, rank) for rank in range(2)]


def test_what_an_earlier_session_produced_is_not_taken_for_this_ones(model, monkeypatch):
    host = make_hosts(model)[0]
    rank = LoopbackRank(host)
    worker = host.host._worker
    rank.submit([GenerationRequest("x", PROMPTS[0], GREEDY)]).result()
    wait_until(lambda: worker.engine.stats().num_generated_tokens >= 5)
    rank.lose("as if")
    send, faults = rank.send, iter([True])
    monkeypatch.setattr(
        rank, "send", lambda call: Failed(ReplyLostError()) if next(faults, False) else send(call)
    )
    rank.beat()
    assert rank.lost is None, "it is back, and has not heard of the new session"
    assert rank.poll(0.0) == []
    rank.submit([GenerationRequest("x", PROMPTS[1], GREEDY)]).result()
    tokens = []
    while len(tokens) < 40:
        tokens += [token for delta in rank.poll(1.0) for token in delta.token_ids]
    calm = LoopbackRank(make_hosts(model)[1])
    calm.submit([GenerationRequest("y", PROMPTS[1], GREEDY)]).result()
    expected = []
    while len(expected) < 40:
        expected += [token for delta in calm.poll(1.0) for token in delta.token_ids]
    assert tokens == expected
    rank.close()
    calm.close()


def test_what_is_given_up_while_no_rank_is_left_ends(model):
    hosts = make_hosts(model)
    pool = loopback_driver(hosts)
    found = []

    def generate():
        found.extend(pool.generate(PROMPTS[0], LONG, request_id="mine"))

    thread = threading.Thread(target=generate)
    thread.start()
    wait_until(lambda: any(entry.produced for entry in pool.generations._entries()))
    for host in hosts:
        host.kill()
    wait_until(lambda: pool.generations._homeless)
    pool.abort("mine")
    thread.join(pool.config.ray.failover_timeout_s / 2)
    assert not thread.is_alive()
    assert found[0].stop_reason == "abort"
    assert found[0].token_ids
    wait_until(lambda: pool.generations._pumps == [None, None])
    assert pool._router.debits == [0, 0]
    pool.close()


@pytest.mark.parametrize("arrives", [True, False])
def test_an_interrupted_submission_leaves_nothing_behind(model, monkeypatch, arrives):
    pool = loopback_driver(make_hosts(model))
    rank = pool.ranks[0]
    submit = rank.submit

    def interrupted(requests):
        if arrives:
            submit(requests).result()
        raise KeyboardInterrupt

    monkeypatch.setattr(rank, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.generate(PROMPTS[:2], LONG, request_id="mine", dp_rank=0)
    monkeypatch.undo()
    wait_until(lambda: not any(pool.generations._pending))
    assert pool._router.debits == [0, 0]
    wait_until(lambda: pool.num_used_blocks() == [0, 0])
    again = pool.generate(PROMPTS[:2], GREEDY, dp_rank=0)
    assert [len(output.token_ids) for output in again] == [40, 40]
    wait_until(lambda: pool.generations._pumps == [None, None])
    pool.close()


class Load:
    """Requests without end, from three threads, each compared with what an undisturbed run says.

    Attributes:
        counts: requests by kind, and those that went from rank to rank.
        faults: what was not as it should be.
    """

    def __init__(self, pool, expected, seed):
        self.pool, self.expected = pool, expected
        self.counts = Counter()
        self.faults = []
        self.slowest_s = 0.0
        self._rng = random.Random(seed)
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), daemon=True)
            for kind in (self.generate, self.abort, self.stream)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._stopped.set()
        for thread in self._threads:
            thread.join(BOUND_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request did not end"

    def _run(self, kind):
        rng = random.Random(self._rng.random())
        while not self._stopped.is_set():
            start = time.monotonic()
            try:
                kind(rng)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self.faults.append(error)
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)

    def compare(self, name, index, token_ids, *, is_whole=True):
        self.counts[name] += 1
        expected = self.expected[name, index]
        if token_ids != (expected if is_whole else expected[: len(token_ids)]):
            self.faults.append((name, index, token_ids, expected))

    def generate(self, rng):
        """Several prompts of one call; two samples each half of the time."""
        name, params = rng.choice([("greedy", GREEDY), ("seeded", SEEDED)])
        chosen = rng.sample(range(len(PROMPTS)), 3)
        outputs = self.pool.generate([PROMPTS[i] for i in chosen], params)
        for place, output in enumerate(outputs):
            index = (chosen[place // params.n], output.sample_index)
            self.compare(name, index, output.token_ids)
            self.counts["failed over"] += output.num_failed_over

    def abort(self, rng):
        """What is given up ends at once, and what it has is right."""
        index = rng.randrange(len(PROMPTS))
        request_id = f"abort-{self.counts['abort']}"
        timer = threading.Timer(rng.random() / 10, self.pool.abort, [request_id])
        timer.start()
        (output,) = self.pool.generate(PROMPTS[index], GREEDY, request_id=request_id)
        timer.join()
        self.counts["abort"] += 1
        self.compare(
            "greedy", (index, 0), output.token_ids, is_whole=output.stop_reason == "length"
        )

    def stream(self, rng):
        """Streams side by side, one of which is left in its middle now and then."""

        async def one(index, num_wanted):
            tokens = []
            async for delta in self.pool.aio.stream(PROMPTS[index], STREAM):
                tokens += delta.token_ids
                if len(tokens) >= num_wanted:
                    break
            self.compare("stream", (index, 0), tuple(tokens), is_whole=num_wanted > 60)

        async def several():
            chosen = rng.sample(range(len(PROMPTS)), 2)
            await asyncio.gather(one(chosen[0], 100), one(chosen[1], rng.choice([10, 100])))

        asyncio.run(several())


def outputs_of(pool):
    """What an undisturbed pool says, by kind and (prompt, sample)."""
    found = {}
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED), ("stream", STREAM)):
        for place, output in enumerate(pool.generate(PROMPTS, params)):
            found[name, (place // params.n, output.sample_index)] = output.token_ids
    return found


def set_faults(faults, rng, most):
    """Let each fault happen to a share of the messages, of up to ``most``; deaths are rarer."""
    for kind in CALL_FAULTS:
        setattr(faults, kind, most * rng.random() / (50 if kind.startswith("death") else 1))


def disturb(hosts, faults, rng, seconds):
    """Kill, freeze and thaw ranks, and let messages go astray, for a while."""
    deadline = time.monotonic() + seconds
    num_blows = 0
    while time.monotonic() < deadline:
        host = rng.choice(hosts)
        blow = rng.choice(["kill", "freeze", "flicker", "messages", "calm"])
        if blow == "flicker":  # too short to be noticed by a heartbeat, maybe
            host.freeze()
            time.sleep(rng.random() / 20)
            host.thaw()
        elif blow in {"messages", "calm"}:
            set_faults(faults, rng, 0.1 if blow == "messages" else 0.0)
        else:
            getattr(host, blow)()
        num_blows += 1
        time.sleep(rng.random() / 2)
        for each in hosts:
            if each.is_dead:
                each.restart()
            elif rng.random() < 0.7:
                each.thaw()
    set_faults(faults, rng, 0.0)
    for host in hosts:
        host.thaw()
        if host.is_dead:
            host.restart()
    return num_blows


def run_chaos(model, seed, seconds):
    calm = loopback_driver(make_hosts(model))
    expected = outputs_of(calm)
    calm.close()
    rng = random.Random(seed)
    hosts = make_hosts(model)
    pool = loopback_driver(hosts)
    faults = Faults(random.Random(seed))
    for rank, host in zip(pool.ranks, hosts, strict=True):
        inject(rank, faults, host.kill)
    pool.monitor.start()
    load = Load(pool, expected, seed)
    num_blows = disturb(hosts, faults, rng, seconds)
    load.stop()
    assert load.faults == []
    # Everything is over, everywhere.
    wait_until(lambda: not any(pool.generations._pending))
    wait_until(lambda: pool.generations._pumps == [None, None])
    assert not pool.generations._homeless
    assert pool._router.debits == [0, 0]
    wait_until(lambda: [rank.lost for rank in pool.ranks] == [None, None])
    wait_until(lambda: pool.num_used_blocks() == [0, 0])
    pool.check_integrity()
    for host in hosts:
        host.host._service.check_integrity()
        assert not host.host._worker.engine.has_work
    assert outputs_of(pool) == expected, "what the ranks have cached is right, too"
    pool.close()
    return load, num_blows, faults


def test_outputs_are_those_of_an_undisturbed_run(model):
    load, num_blows, faults = run_chaos(model, seed=5, seconds=12)
    assert num_blows > 10
    assert load.counts["failed over"] > 0
    assert faults.counts


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
def test_outputs_are_those_of_an_undisturbed_run_for_minutes(model, seed):
    load, num_blows, faults = run_chaos(model, seed, seconds=60)
    print(load.counts, num_blows, faults.counts, f"slowest {load.slowest_s:.2f} s")  # noqa: T201
    assert load.counts["failed over"] > 0
