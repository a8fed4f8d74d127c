"""Host tiers as actors: what a rank had computed outlives it, and nothing outlives all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import ray

from raykv import Namespace, PoolConfig, SamplingParams, Sequence
from raykv.actors import attach, end, launch
from raykv.errors import ConfigError, RankUnavailableError

from .conftest import SETTINGS, rank_processes, run_python, session_processes, wait_until

BOUND_S = 60
SPACE = "tiers"
MEMORY = {"device": "cpu", "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
# Large enough that a process can be stopped in the middle of a copy: 4 MiB a block.
BIG = {"device": "cpu", "num_layers": 8, "num_kv_heads": 8, "head_dim": 2048, "dtype": "float32"}
PATIENT = {"silence_s": 120.0, "lease_s": 120.0}


def slabs_of(pid):
    """Names of the slabs that a process has mapped."""
    with contextlib.suppress(OSError):
        maps = (Path("/proc") / str(pid) / "maps").read_text().split()
        return {word for word in maps if word.startswith("/memfd:raykv-slab")}
    return set()


def holders(names):
    """Processes that have one of these slabs mapped."""
    pids = (entry.name for entry in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if slabs_of(pid) & names]


def settle(pool):
    wait_until(lambda: pool.transfer_blocks().is_idle)


def live(pool, tokens, rank):
    """A whole life without engine; how much of it was there."""
    sequence = Sequence(tokens)
    sequence.dp_rank = rank
    assert pool.allocate(sequence)
    pool.transfer_blocks([sequence], wait_s=BOUND_S)
    num_found = sequence.kv_state.num_computed_tokens
    sequence.kv_state.num_computed_tokens = sequence.num_tokens
    pool.deallocate(sequence)
    return num_found


def test_what_one_rank_stored_the_other_loads_and_closing_ends_all(make_pool):
    pool = make_pool(dp_size=2, memory=MEMORY, host={"num_blocks": 100})
    assert live(pool, range(33), 0) == 0
    settle(pool)
    assert pool.num_blocks_in_host_prefix_cache() == [8]
    assert live(pool, range(33), 1) == 32
    os.kill(pool.ranks[0].info.pid, signal.SIGKILL)
    wait_until(lambda: pool.ranks[0].session and pool.ranks[0].lost is None, BOUND_S)
    assert live(pool, range(33), 0) == 32, "a rank that starts again joins its tier"
    pool.reset_prefix_cache()
    assert [live(pool, range(33), rank) for rank in (0, 1)] == [0, 0]
    pool.check_integrity()
    names = set().union(*map(slabs_of, rank_processes()))
    assert names
    pool.close()
    wait_until(lambda: holders(names) == [])


def test_a_conversation_goes_on_after_its_rank_was_killed(make_pool, tiny_model):
    rng = np.random.default_rng(2)
    first, question = rng.integers(0, 128, 400).tolist(), rng.integers(0, 128, 20).tolist()
    pool = make_pool(
        dp_size=2, model={"path": tiny_model}, num_blocks=400, host={"num_blocks": 400}
    )
    turn = SamplingParams(max_tokens=8, ignore_eos=True)
    long = SamplingParams(max_tokens=150, ignore_eos=True, temperature=1.0, seed=3)
    reply = pool.generate(first, turn, dp_rank=1)[0].token_ids
    second = [*first, *reply, *question]
    expected = pool.generate(second, long, dp_rank=1)[0].token_ids
    pool.reset_prefix_cache()
    assert pool.generate(first, turn, dp_rank=0)[0].token_ids == reply
    wait_until(lambda: pool.num_blocks_in_host_prefix_cache()[0] >= 100)
    num_before = pool.ranks[1].stats.host_hits_total
    tokens, output = [], None

    async def stream():
        nonlocal output
        async for delta in pool.aio.stream(second, long, dp_rank=0):
            tokens.extend(delta.token_ids)
            output = delta.output or output
            if len(tokens) == 10:
                os.kill(pool.ranks[0].info.pid, signal.SIGKILL)

    asyncio.run(stream())
    assert tuple(tokens) == expected
    assert output.dp_rank == 1
    stats = pool.ranks[1].stats
    num_loaded = stats.host_hits_total - num_before
    assert num_loaded > 0.75 * len(second), "less than a quarter is computed again"


def begin_copy(pool, rank, name):
    """Until a rank has started copies; its process is stopped at once."""

    def has_started():
        return getattr(pool.transfer_blocks(), name) > 0

    wait_until(has_started)
    os.kill(pool.ranks[rank].info.pid, signal.SIGSTOP)


def test_a_rank_that_stops_while_it_stores_is_fenced(make_pool):
    pool = make_pool(
        dp_size=2, block_size=4, memory=BIG, num_blocks=25, host={"num_blocks": 33, "lease_s": 1.0},
        ray=PATIENT,
    )  # fmt: skip
    sequence = Sequence(range(81))
    sequence.dp_rank = 0
    assert pool.allocate(sequence)
    sequence.kv_state.num_computed_tokens = 81
    pool.deallocate(sequence)
    begin_copy(pool, 0, "num_offload_blocks_started")
    host = pool.tiers[0]
    wait_until(lambda: host.stats().result().quarantined == 20)
    stats = host.stats().result()
    assert (stats.cached, stats.storing, stats.free) == (0, 0, 12)
    os.kill(pool.ranks[0].info.pid, signal.SIGCONT)
    wait_until(lambda: pool.transfer_blocks().is_idle and not host.stats().result().quarantined)
    assert host.stats().result().free == 32
    assert live(pool, range(81), 1) == 0, "nothing of it was ever found"
    settle(pool)
    assert live(pool, range(81), 0) == 80


def test_a_rank_that_stops_while_it_loads_notices_that_its_source_was_given_away(make_pool):
    pool = make_pool(
        dp_size=2, block_size=4, memory=BIG, num_blocks=25, host={"num_blocks": 21, "lease_s": 1.0},
        ray=PATIENT,
    )  # fmt: skip
    live(pool, range(81), 0)
    settle(pool)
    sequence = Sequence(range(81))
    sequence.dp_rank = 1
    assert pool.allocate(sequence)
    begin_copy(pool, 1, "num_load_blocks_started")
    time.sleep(2.0)  # its lease ends
    stopped = pool.ranks.pop(1)  # what is waited for now is rank 0
    live(pool, range(1000, 1081), 0)
    settle(pool)
    pool.ranks.append(stopped)
    assert pool.host_stats()[0].evicted == 20
    os.kill(stopped.info.pid, signal.SIGCONT)
    report = pool.transfer_blocks([sequence], wait_s=BOUND_S)
    assert report.missed == {sequence.seq_id: "host_stale"}
    assert sequence.kv_state.num_computed_tokens == 0
    assert pool.explain(sequence).reason == "host_stale"
    pool.deallocate(sequence)


def test_a_tier_that_is_killed_starts_again_and_ranks_go_on(make_pool):
    pool = make_pool(dp_size=2, memory=MEMORY, host={"num_blocks": 100})
    live(pool, range(33), 0)
    settle(pool)
    ray.kill(pool.tiers[0].actor, no_restart=False)
    assert live(pool, range(33), 1) in {0, 32}, "whether or not it has died by now"
    wait_until(lambda: _stats_of(pool) is not None, BOUND_S)

    starts = itertools.count(500, 100)  # prompts that no device has

    def are_back():
        start = next(starts)
        live(pool, range(start, start + 33), 0)
        pool.wait_for_transfers(BOUND_S)
        return live(pool, range(start, start + 33), 1) == 32

    wait_until(are_back, BOUND_S)


def _stats_of(pool):
    with contextlib.suppress(RankUnavailableError):
        return pool.num_blocks_in_host_prefix_cache()
    return None


def test_drivers_that_attach_share_the_tier_and_ending_a_pool_ends_it(cluster):
    config = PoolConfig(**SETTINGS, dp_size=2, memory=MEMORY, host={"num_blocks": 100})
    pool = launch(config, name="tiered", namespace=SPACE)
    try:
        live(pool, range(33), 0)
        settle(pool)
        with attach("tiered", namespace=SPACE) as other:
            assert live(other, range(33), 1) == 32
            assert other.num_blocks_in_host_prefix_cache() == [8]
            other.reset_prefix_cache()
        assert pool.num_blocks_in_host_prefix_cache() == [0]
        names = set().union(*map(slabs_of, rank_processes()))
        assert names
        end("tiered", namespace=SPACE)
        wait_until(lambda: holders(names) == [])
        with pytest.raises(ValueError, match="tiered-host-0"):
            ray.get_actor("tiered-host-0", SPACE)
    finally:
        pool.close()


def test_nothing_is_left_after_sigkill_of_everything():
    process = run_python(f"""
from raykv import PoolConfig, Sequence
from raykv.actors import launch
config = PoolConfig(num_blocks=40, block_size=4, max_num_seqs=8, dp_size=2, memory={MEMORY!r},
                    host={{"num_blocks": 100}})
with launch(config) as pool:
    sequence = Sequence(range(33))
    pool.allocate(sequence)
    sequence.kv_state.num_computed_tokens = 33
    pool.deallocate(sequence)
    while pool.num_blocks_in_host_prefix_cache() != [8]:
        pool.transfer_blocks(wait_s=0.1)
    print("ready", flush=True)
    input()
""")
    assert process.stdout.readline() == "ready\n", process.communicate(timeout=BOUND_S)[1]
    names = set().union(*(slabs_of(pid) for pid, _ in session_processes(process.pid)))
    assert len(names) == 1
    deadline = time.monotonic() + BOUND_S
    while found := session_processes(process.pid):
        assert time.monotonic() < deadline
        for pid, _ in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
    assert holders(names) == []
    process.communicate(timeout=BOUND_S)


class Holder:
    """Holds a name."""


def test_a_name_that_a_host_tier_cannot_have_is_told(cluster):
    other = ray.remote(num_cpus=0)(Holder).options(name="taken-host-0", namespace=SPACE).remote()
    config = PoolConfig(**SETTINGS, memory=MEMORY, host={"num_blocks": 100})
    try:
        with pytest.raises(ConfigError, match="taken-host-0"):
            launch(config, name="taken", namespace=SPACE)
    finally:
        ray.kill(other)


def test_with_a_stopped_tier_ranks_start_again_and_serve_and_closing_ends_it(make_pool):
    host = {"num_blocks": 100, "timeout_s": 0.2}
    pool = make_pool(dp_size=2, memory=MEMORY, host=host)
    live(pool, range(33), 0)
    settle(pool)
    tier_pid = pool.tiers[0].call("ready").result(BOUND_S)
    os.kill(tier_pid, signal.SIGSTOP)
    sequence = Sequence(range(33))
    pool.prefetch_from_storage(sequence)
    assert not pool.update_prefetch_result(sequence, 0.1)
    os.kill(pool.ranks[0].info.pid, signal.SIGKILL)
    wait_until(lambda: pool.ranks[0].session and pool.ranks[0].lost is None, BOUND_S)
    assert live(pool, range(33), 0) == 0
    assert live(pool, range(33), 0) == 32
    pool.close()
    wait_until(lambda: not (Path("/proc") / str(tier_pid)).exists())


def test_ranks_do_not_wait_behind_those_who_wait_for_a_store(make_pool):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        store = {"type": "redis", "url": url, "weights_id": "w", "timeout_s": BOUND_S}
        pool = make_pool(memory=MEMORY, host={"num_blocks": 100}, store=store)
        tier, tokens = pool.tiers[0], np.arange(33, dtype=np.int32)
        assert tier.prefetch(tokens, Namespace()).result(BOUND_S)
        waiting = [tier.wait_prefetch(tokens, Namespace(), BOUND_S) for _ in range(12)]
        tier.stats().result(BOUND_S / 4)
        assert not any(one.done() for one in waiting)
