"""Sleep of a rank: who keeps it awake, and what it gives back."""

from __future__ import annotations

import pytest

from raykv.config import PoolConfig
from raykv.core import Sequence
from raykv.errors import ConfigError, RequestError
from raykv.rank import RankKV

MEMORY = {"device": "cpu", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}


@pytest.fixture(params=[MEMORY, None], ids=["memory", "books only"])
def kv(request):
    made = RankKV(PoolConfig(num_blocks=20, block_size=4, memory=request.param))
    yield made
    made.check_integrity()


def published(kv):
    sequence = Sequence(range(8))
    assert kv.allocate(sequence)
    sequence.kv_state.num_computed_tokens = 8
    kv.deallocate(sequence)
    assert kv.num_blocks_in_prefix_cache() == [2]


def test_cache_and_memory_are_gone_while_it_sleeps_and_blocks_come_afterwards(kv):
    published(kv)
    for _ in range(2):
        kv.sleep()
        assert kv.is_asleep
    assert kv.num_blocks_in_prefix_cache() == [0]
    assert kv.buffers is None or kv.buffers.is_released
    for call in (kv.allocate, kv.allocate_shared):
        sequence = Sequence(range(8))
        with pytest.raises(RequestError, match=r"rank 0 sleeps: call wake_up\(\) first"):
            call(sequence)
        assert sequence.single_block_id is None
    for _ in range(2):
        kv.wake_up()
        assert not kv.is_asleep
    assert kv.buffers is None or not kv.buffers.is_released
    assert kv.allocate(Sequence(range(8)))


def test_who_holds_a_row_or_blocks_keeps_it_awake(kv):
    published(kv)
    long, short, blank = Sequence(range(8)), Sequence(range(100, 104)), Sequence([7])
    assert kv.allocate([long, short])
    kv.allocate_shared(blank)
    with pytest.raises(RequestError, match="3 sequences of your scheduler hold 3 blocks"):
        kv.sleep()
    kv.check_unused({long, short, blank})
    with pytest.raises(RequestError, match="2 sequences of your scheduler hold 1 blocks"):
        kv.check_unused([long])
    kv.deallocate_without_cache([long, short])
    with pytest.raises(RequestError, match="1 sequences of your scheduler hold 0 blocks"):
        kv.sleep()
    assert not kv.is_asleep
    assert kv.num_blocks_in_prefix_cache() == [2], "a refusal costs no cache"
    kv.deallocate(blank)
    kv.sleep()


def test_a_handle_keeps_it_awake(kv):
    published(kv)
    with kv.block_manager.allocate(3):
        with pytest.raises(RequestError, match="handles or copies hold 3 blocks"):
            kv.sleep()
        assert not kv.is_asleep
        assert kv.num_blocks_in_prefix_cache() == [2]
    kv.sleep()


def test_memory_that_does_not_fit_any_more_leaves_it_asleep(monkeypatch):
    kv = RankKV(PoolConfig(num_blocks=20, block_size=4, memory=MEMORY))
    kv.sleep()
    with monkeypatch.context() as patch:
        patch.setattr("raykv.memory.room.available_bytes", lambda: 0)
        with pytest.raises(ConfigError):
            kv.wake_up()
    assert kv.is_asleep
    kv.wake_up()
    assert not kv.is_asleep
