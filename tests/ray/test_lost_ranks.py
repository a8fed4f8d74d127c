"""Where losses are reported: a rank that dies or freezes is an error within bounds."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest
import ray

from raykv import SamplingParams, Sequence
from raykv.errors import RankUnavailableError

from .conftest import rank_processes, wait_until

REPORT = {"on_rank_loss": "report", "max_restarts": 0}
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)


def make_sequence(num_tokens, first=0):
    return Sequence(np.arange(first, first + num_tokens))


def on_rank(rank, num_tokens=8, first=0):
    sequence = make_sequence(num_tokens, first)
    sequence.dp_rank = rank
    return sequence


@pytest.mark.parametrize("how", ["ray.kill", "SIGKILL"])
def test_a_dead_rank_is_named_and_the_others_go_on(make_pool, how):
    pool = make_pool(dp_size=2, ray=REPORT)
    lost, kept = on_rank(0), on_rank(1)
    assert pool.allocate([lost, kept])
    rank = pool.ranks[0]
    if how == "ray.kill":
        ray.kill(rank._actor)
    else:
        os.kill(rank.info.pid, signal.SIGKILL)
    wait_until(lambda: len(rank_processes()) == 1)
    lost.append(1)
    start = time.monotonic()
    with pytest.raises(RankUnavailableError, match=f"rank 0 .pid {rank.info.pid}.*launch another"):
        pool.allocate(lost)
    assert time.monotonic() - start < 10
    for call in (pool.stats, pool.check_integrity):
        with pytest.raises(RankUnavailableError, match="rank 0"):
            call()
    pool.deallocate(lost)
    assert pool.num_lost_sequences == 1
    assert lost.dp_rank is None
    assert pool.select_rank(lost) == 1, "a lost rank is not chosen"
    kept.append(1)
    assert pool.allocate(kept)
    spread = [on_rank(0, first=100), on_rank(1, first=200)]
    with pytest.raises(RankUnavailableError):
        pool.allocate(spread)
    assert spread[1].single_block_id is None, "the living rank's part was taken back"
    assert pool.allocate(spread[1])
    pool.ranks[1].check_integrity().result()
    pool.close()
    assert rank_processes() == []


def test_a_frozen_rank_is_given_up_and_ended(make_pool):
    pool = make_pool(ray=REPORT | {"call_timeout_s": 1.0, "silence_s": 60})
    pid = pool.ranks[0].info.pid
    sequence = make_sequence(8)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankUnavailableError, match="within 1 s"):
        pool.allocate(sequence)
    assert sequence.single_block_id is None
    start = time.monotonic()
    with pytest.raises(RankUnavailableError, match="within 1 s"):
        pool.allocate(sequence)
    assert time.monotonic() - start < 0.5, "nobody waits for it twice"
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 15
    assert rank_processes() == []


def test_a_generation_under_way_fails_with_its_rank(make_pool, tiny_model):
    settings = {"model": {"path": tiny_model}, "dp_size": 2, "num_blocks": 2000, "ray": REPORT}
    pool = make_pool(**settings, max_num_seqs=4)
    outcomes = {}

    def generate(rank, params):
        try:
            outcomes[rank] = pool.generate([[1, 2, 3], [4, 5]], params, dp_rank=rank)
        except Exception as error:  # noqa: BLE001 - looked at below
            outcomes[rank] = error

    threads = [
        threading.Thread(target=generate, args=(0, LONG)),
        threading.Thread(target=generate, args=(1, SamplingParams(max_tokens=50))),
    ]
    for thread in threads:
        thread.start()

    async def stream_until_it_dies():
        seen = 0
        async for delta in pool.aio.stream([7, 8], LONG, dp_rank=0):
            seen += len(delta.token_ids)
            if seen >= 3:
                os.kill(pool.ranks[0].info.pid, signal.SIGKILL)

    start = time.monotonic()
    with pytest.raises(RankUnavailableError, match="rank 0"):
        asyncio.run(stream_until_it_dies())
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - start < 30
    assert isinstance(outcomes[0], RankUnavailableError)
    assert [len(output.token_ids) for output in outcomes[1]] == [50, 50]
    with pytest.raises(RankUnavailableError, match="rank 0"):
        pool.generate([1, 2], LONG, dp_rank=0)
    assert pool.generate([1, 2], SamplingParams(max_tokens=2), dp_rank=1)


def test_closing_ends_a_generation_under_way(make_pool, tiny_model):
    pool = make_pool(model={"path": tiny_model}, num_blocks=2000)
    errors = []

    def generate():
        try:
            pool.generate([1, 2, 3], LONG)
        except RankUnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    wait_until(lambda: pool.num_used_blocks() != [0])
    pool.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "closed" in str(errors[0])
