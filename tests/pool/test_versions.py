"""Weights versions and sleep of whole pools, whatever carries their ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from raykv import BlockManagerPool, Namespace, PoolConfig, Sequence
from raykv.errors import ConfigError, NotSupportedError, RequestError

V0, V1 = Namespace(), Namespace(weights_version=1)
SOON_S = 60


def admit(pool, num_tokens, first=0, num_computed=None, namespace=V0):
    sequence = Sequence(np.arange(first, first + num_tokens), namespace=namespace)
    assert pool.allocate(sequence)
    sequence.kv_state.num_computed_tokens = num_tokens if num_computed is None else num_computed
    return sequence


def num_found(pool, num_tokens, first=0, namespace=V0, rank=0):
    probe = Sequence([*range(first, first + num_tokens), 99999], namespace=namespace)
    probe.dp_rank = rank
    pool.allocate_shared(probe)
    count = probe.kv_state.num_computed_tokens
    pool.deallocate_without_cache(probe)
    return count


# -- a scheduler of one's own ----------------------------------------------------------------------


def test_all_ranks_change_at_once_and_versions_only_grow(make_pool):
    pool = make_pool(dp_size=2)
    assert pool.weights_version() == [0, 0]
    pool.update_weights(2)
    assert pool.weights_version() == [2, 2]
    for version in (2, 1, 0):
        with pytest.raises(RequestError, match=rf"version {version} .*\[2, 2\].*use 3 or more"):
            pool.update_weights(version)
    for version in (-1, 2.5, "3", None):
        with pytest.raises(RequestError, match="whole number"):
            pool.update_weights(version)
    with pytest.raises(RequestError, match="wait, abort, keep"):
        pool.update_weights(3, mode="now")
    with pytest.raises(RequestError, match="weights is a int"):
        pool.update_weights(3, 7)
    with pytest.raises(NotSupportedError, match="no engine"):
        pool.update_weights(3, {"a": np.zeros(2)})
    assert pool.weights_version() == [2, 2]
    pool.update_weights(3, mode="abort")
    assert pool.weights_version() == [3, 3]


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_a_sequence_publishes_what_it_had_computed_and_nothing_afterwards(make_pool, mode):
    pool = make_pool()
    sequence = admit(pool, 20, num_computed=9)  # the rank has not heard of it
    assert pool.num_blocks_in_prefix_cache() == [0]
    pool.update_weights(1, mode=mode)
    assert num_found(pool, 20) == 8
    sequence.kv_state.num_computed_tokens = 20
    pool.cache(sequence)
    child = sequence.fork()
    pool.deallocate([sequence, child])
    assert num_found(pool, 20) == 8
    assert num_found(pool, 20, namespace=V1) == 0
    pool.deallocate(admit(pool, 20, namespace=V1))
    assert num_found(pool, 20, namespace=V1) == 20


def test_ranks_that_were_left_behind_are_brought_along(make_pool):
    pool = make_pool(dp_size=2)
    pool.ranks[1].prepare_weights(4, None, "keep").result()
    pool.ranks[1].apply_weights(4).result()
    assert pool.weights_version() == [0, 4]
    with pytest.raises(RequestError, match=r"\[0, 4\].*use 5"):
        pool.update_weights(3)
    pool.update_weights(4)
    assert pool.weights_version() == [4, 4]


def test_an_update_of_somebody_else_is_left_alone(make_pool):
    pool = make_pool(dp_size=2)
    pool.ranks[1].prepare_weights(1, None, "keep").result()
    with pytest.raises(RequestError, match="rank 1 is changing to weights version 1"):
        pool.update_weights(1)
    assert [rank.weights_status().result().pending for rank in pool.ranks] == [None, 1]
    pool.ranks[1].apply_weights(1).result()
    pool.update_weights(1)
    assert pool.weights_version() == [1, 1]


def test_retired_versions_go_first(make_pool):
    pool = make_pool(dp_size=2)
    old = [admit(pool, 8, 100 * i) for i in range(2)]
    assert [sequence.dp_rank for sequence in old] == [0, 1]
    pool.update_weights(1)
    pool.deallocate(old)
    for rank in range(2):
        new = Sequence(range(12), namespace=V1)
        new.dp_rank = rank
        assert pool.allocate(new)
        new.kv_state.num_computed_tokens = 12
        pool.deallocate(new)
        assert num_found(pool, 8, 100 * rank, rank=rank) == 8  # used last, and yet
    assert pool.retire(7) == [0, 0]
    assert pool.retire(0) == [2, 2]
    taken = Sequence(range(500, 524))  # 6 of 9 blocks, of which 4 are free
    taken.dp_rank = 0
    assert pool.allocate(taken)
    assert num_found(pool, 8) == 0
    assert num_found(pool, 12, namespace=V1) == 12
    pool.deallocate(taken)
    with pytest.raises(RequestError, match="whole number"):
        pool.retire(-1)


def test_sleep_frees_everything_and_waking_starts_empty(make_pool):
    memory = {"device": "cpu", "num_layers": 1, "num_kv_heads": 1, "head_dim": 2}
    pool = make_pool(dp_size=2, memory=memory)
    pool.deallocate([admit(pool, 12), admit(pool, 12, 100)])
    assert pool.num_blocks_in_prefix_cache() == [3, 3]
    pool.sleep()
    pool.sleep(2)
    assert pool.num_free_blocks() == [9, 9]
    assert pool.num_blocks_in_prefix_cache() == [0, 0]
    with pytest.raises(RequestError, match="wake_up"):
        pool.allocate(Sequence([1]))
    pool.update_weights(1)  # it has none
    for _ in range(2):
        pool.wake_up()
    assert num_found(pool, 12) == 0
    pool.deallocate(admit(pool, 12))
    assert num_found(pool, 12) == 12
    with pytest.raises(RequestError, match="level"):
        pool.sleep(3)
    with pytest.raises(RequestError, match="tags"):
        pool.wake_up(["kv"])


def test_a_sequence_on_one_rank_keeps_all_ranks_awake(make_pool):
    pool = make_pool(dp_size=2)
    pool.deallocate(admit(pool, 12))
    held = Sequence(range(100, 108))
    held.dp_rank = 1
    assert pool.allocate(held)
    before = pool.stats()
    with pytest.raises(RequestError, match=r"rank 1 .* 1 sequences .* hold 2 blocks"):
        pool.sleep()
    assert pool.stats() == before
    assert pool.allocate(Sequence(range(300, 304)))
    assert num_found(pool, 12) == 12


def test_the_coroutines_are_there(make_pool):
    pool = make_pool()

    async def use():
        await pool.aio.update_weights(1)
        await pool.aio.sleep()
        await pool.aio.wake_up(["kv_cache"])
        return await pool.aio.weights_version(), await pool.aio.retire(0)

    assert asyncio.run(use()) == ([1], [0])


def resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_the_memory_goes_back_to_the_system():
    memory = {"device": "cpu", "num_layers": 4, "num_kv_heads": 8, "head_dim": 128}
    with BlockManagerPool.local(PoolConfig(num_blocks=257, memory=memory)) as pool:
        buffers = pool.ranks[0].kv.buffers
        num_bytes = buffers.nbytes
        assert num_bytes > 128 << 20
        buffers.storage[:] = 1
        full = resident_bytes()
        pool.sleep()
        assert full - resident_bytes() > 0.9 * num_bytes
        pool.wake_up()
        assert buffers.nbytes == num_bytes


def test_memory_that_does_not_fit_any_more_leaves_it_asleep(monkeypatch):
    memory = {"device": "cpu", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}
    with BlockManagerPool.local(PoolConfig(num_blocks=20, memory=memory)) as pool:
        pool.sleep()
        monkeypatch.setattr("raykv.memory.room.available_bytes", lambda: 100)
        with pytest.raises(ConfigError, match="blocks"):
            pool.wake_up()
        assert pool.ranks[0].weights_status().result().asleep == ("kv_cache",)
        monkeypatch.undo()
        pool.wake_up()
        assert pool.allocate(Sequence([1, 2]))
