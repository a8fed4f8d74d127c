"""A rank that dies or freezes costs its users a recomputation, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest

from raykv import SamplingParams, Sequence
from raykv.actors.process import RankProcess

from .conftest import rank_processes, wait_until

BOUND_S = 30


def make_sequence(num_tokens, first=0):
    return Sequence(np.arange(first, first + num_tokens))


def on_rank(rank, num_tokens=8, first=0):
    sequence = make_sequence(num_tokens, first)
    sequence.dp_rank = rank
    return sequence


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sequence_of_a_lost_rank_begins_anew_and_the_rank_comes_back(make_pool, how):
    pool = make_pool(dp_size=2)
    lost, kept = on_rank(0), on_rank(1)
    assert pool.allocate([lost, kept])
    pid = pool.ranks[0].info.pid
    start = time.monotonic()
    os.kill(pid, how)
    wait_until(lambda: pool.ranks[0].session == 1)
    assert time.monotonic() - start < BOUND_S
    lost.append(1)
    kept.append(1)
    assert pool.allocate([lost, kept])
    assert (lost.dp_rank, kept.dp_rank) == (1, 1)
    assert pool.num_lost_sequences == 1
    assert pool.num_used_blocks() == [0, 6]
    if how == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: pool.ranks[0].lost is None, BOUND_S)
    assert (pool.ranks[0].info.pid == pid) == (how == signal.SIGSTOP)
    assert pool.num_used_blocks() == [0, 6], "it gave back what was served elsewhere"
    back = on_rank(0, first=50)
    assert pool.allocate(back)
    assert back.dp_rank == 0
    pool.deallocate([lost, kept, back])
    pool.check_integrity()
    pool.close()
    assert rank_processes() == []


def test_allocating_while_a_rank_freezes_waits_no_longer_than_it_takes_to_notice(make_pool):
    pool = make_pool(dp_size=2)
    os.kill(pool.ranks[0].info.pid, signal.SIGSTOP)
    start = time.monotonic()
    both = [on_rank(0), on_rank(1)]
    assert pool.allocate(both)
    assert time.monotonic() - start < BOUND_S
    assert [sequence.dp_rank for sequence in both] == [1, 1]
    os.kill(pool.ranks[0].info.pid, signal.SIGCONT)


def test_generation_and_streams_go_on_with_the_tokens_they_have(make_pool, tiny_model):
    settings = {"model": {"path": tiny_model}, "dp_size": 2, "num_blocks": 2000, "max_num_seqs": 8}
    pool = make_pool(**settings)
    params = SamplingParams(max_tokens=400, temperature=1.0, seed=11, ignore_eos=True)
    prompts = [[1, 2, 3, i] for i in range(4)]
    expected = [output.token_ids for output in pool.generate(prompts, params, dp_rank=1)]
    streamed = {}

    async def stream(index):
        tokens = []
        async for delta in pool.aio.stream(prompts[index], params, dp_rank=0):
            tokens += delta.token_ids
            if len(tokens) == 20 and index == 0:
                os.kill(pool.ranks[0].info.pid, signal.SIGKILL)
        streamed[index] = tuple(tokens)

    async def both():
        await asyncio.gather(stream(0), stream(1))

    found = []
    thread = threading.Thread(
        target=lambda: found.extend(pool.generate(prompts[2:], params, dp_rank=0))
    )
    thread.start()
    asyncio.run(both())
    thread.join(60)
    assert not thread.is_alive()
    assert streamed == {0: expected[0], 1: expected[1]}
    assert [output.token_ids for output in found] == expected[2:]
    wait_until(lambda: pool.ranks[0].lost is None, BOUND_S)
    assert pool.generate(prompts[0], params, dp_rank=0)[0].token_ids == expected[0]
    assert pool.num_used_blocks() == [0, 0]
    pool.check_integrity()


def test_a_process_is_seen_to_run_to_be_stopped_and_to_end(make_pool):
    pool = make_pool(ray={"max_restarts": 0})
    pid = pool.ranks[0].info.pid
    process = RankProcess.find(pid)
    assert process.runs()
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: not process.runs())
    os.kill(pid, signal.SIGCONT)
    wait_until(process.runs)
    os.kill(pid, signal.SIGKILL)
    assert process.wait(BOUND_S)
    assert not process.runs()


def test_a_rank_that_runs_is_given_more_time_than_a_stopped_one(make_pool, monkeypatch):
    pool = make_pool(dp_size=2, ray={"silence_s": 1, "heartbeat_s": 0.1})
    pool.monitor.stop()
    rank, other = pool.ranks
    monkeypatch.setattr("raykv.actors.ray_rank.ray.wait", lambda refs, **_: ([], refs))
    monkeypatch.setattr(other._process, "runs", lambda: False)
    for _ in range(12):
        pool.monitor.beat()
    assert rank.lost is None
    assert "silent for 1 s" in other.lost
    for _ in range(30):
        pool.monitor.beat()
    assert "silent for 4 s" in rank.lost
