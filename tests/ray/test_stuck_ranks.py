"""A rank whose process lives while its engine does not ends itself, and comes back (Ray 60088)."""

from __future__ import annotations

import os
import signal

import pytest

from raykv import SamplingParams, Sequence

from .conftest import wait_until

BOUND_S = 90
FILLING = SamplingParams(max_tokens=100, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
SETTINGS = {
    "dp_size": 2,
    "eviction": "faulty_policy:FaultyPolicy",
    # Time enough for any step on a busy machine.
    "ray": {"stuck_timeout_s": 6.0},
}


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_an_engine_that_fails_or_hangs_ends_its_process_and_comes_back(
    make_pool, tiny_model, faults, fault
):
    pool = make_pool(**SETTINGS, model={"path": tiny_model}, num_blocks=64)
    expected = pool.generate(PROMPT, LONG, dp_rank=1)[0].token_ids
    pid = pool.ranks[0].info.pid
    # A full cache, so that the policy is asked while the next request grows.
    for first in (20, 30):
        pool.generate([first, *PROMPT], FILLING, dp_rank=0)
    (faults / fault).touch()
    output = pool.generate(PROMPT, LONG, dp_rank=0)[0]
    assert output.token_ids == expected
    assert (output.dp_rank, output.num_failed_over) == (1, 1)
    assert not (faults / fault).exists()
    wait_until(lambda: pool.ranks[0].info.pid != pid and pool.ranks[0].lost is None, BOUND_S)
    assert pool.ranks[1].session == 0, "the other rank was well all the time"
    again = pool.generate(PROMPT, LONG, dp_rank=0)[0]
    assert (again.dp_rank, again.token_ids) == (0, expected)
    assert pool.num_used_blocks() == [0, 0]
    pool.check_integrity()


def test_a_rank_without_engine_that_hangs_ends_its_process_too(make_pool, faults):
    pool = make_pool(**SETTINGS | {"ray": {"stuck_timeout_s": 2.0}})
    pid = pool.ranks[0].info.pid
    first, second = Sequence(range(100)), Sequence(range(200, 300))
    first.dp_rank = second.dp_rank = 0
    assert pool.allocate(first)
    first.kv_state.num_computed_tokens = 100
    pool.deallocate(first)
    (faults / "hang").touch()
    assert pool.allocate(second), "which has to evict for it there, and does not return"
    assert not (faults / "hang").exists()
    assert second.dp_rank == 1
    wait_until(lambda: pool.ranks[0].info.pid != pid and pool.ranks[0].lost is None, BOUND_S)
    first.dp_rank = 0
    assert pool.allocate(first)
    assert first.dp_rank == 0


def test_a_rank_that_cannot_start_again_tries_until_it_can(make_pool, faults):
    pool = make_pool(**SETTINGS)
    (faults / "refuse").touch()
    os.kill(pool.ranks[0].info.pid, signal.SIGKILL)
    refusals = faults / "refusals"
    wait_until(lambda: refusals.exists() and len(refusals.read_text()) >= 2, BOUND_S)
    assert pool.ranks[0].lost is not None
    (faults / "refuse").unlink()
    wait_until(lambda: pool.ranks[0].lost is None, BOUND_S)
    sequence = Sequence(range(8))
    sequence.dp_rank = 0
    assert pool.allocate(sequence)
    assert sequence.dp_rank == 0
