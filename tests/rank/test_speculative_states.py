"""Checkpoints at strides make room for those that are more likely to be wanted."""

from __future__ import annotations

import pytest

from raykv.config import PoolConfig
from raykv.core.linear_state import LinearStatePrefixCache
from raykv.core.sequence import Sequence
from raykv.rank import RankKV


def serve(kv, token_ids):
    """Compute a prompt, stopping wherever a checkpoint is due; tokens that were reused."""
    sequence = Sequence(token_ids)
    assert kv.allocate(sequence)
    state = sequence.kv_state
    num_reused = state.num_computed_tokens
    kv.take_state_copies("")
    kv.ack_state_transfers()
    while state.num_computed_tokens < sequence.num_tokens:
        state.num_computed_tokens = kv.next_checkpoint(sequence) or sequence.num_tokens
        kv.cache(sequence)
        kv.take_state_copies("")
        kv.ack_state_transfers()
    kv.deallocate(sequence)
    kv.check_integrity()
    return num_reused


def rank(match="deepest"):
    return RankKV(
        PoolConfig(
            num_blocks=200,
            block_size=4,
            max_num_seqs=2,
            linear_state={"num_slots": 12, "match": match, "stride_tokens": 4},
        )
    )


CHAT, LONG = range(10), range(1000, 1100)


def test_a_long_prompt_does_not_push_out_the_end_of_a_conversation():
    kv = rank()
    serve(kv, CHAT)
    serve(kv, LONG)
    assert kv.linear_state.num_reclaimed_total > 10
    assert serve(kv, range(14)) == 8


def test_without_the_difference_it_would(monkeypatch):
    reserve = LinearStatePrefixCache.reserve_checkpoint

    def always_wanted(self, prefix_hash, *, prefix=None, is_speculative=False):
        return reserve(self, prefix_hash, prefix=prefix)

    monkeypatch.setattr(LinearStatePrefixCache, "reserve_checkpoint", always_wanted)
    kv = rank()
    serve(kv, CHAT)
    serve(kv, LONG)
    assert serve(kv, range(14)) == 0


def test_the_checkpoint_at_a_stride_that_was_used_stays():
    kv = rank()
    serve(kv, LONG)  # its latest checkpoints are left
    reused = serve(kv, [*LONG[:90], *range(50)])
    assert reused % 4 == 0
    assert reused > 0
    serve(kv, range(2000, 2100))
    assert serve(kv, [*LONG[:90], *range(500, 550)]) >= reused


@pytest.mark.parametrize("match", ["contiguous", "deepest"])
def test_at_most_the_slots_there_are_and_none_is_lost(match):
    kv = rank(match)
    for start in range(0, 3000, 100):
        serve(kv, range(start, start + 70))
    cache = kv.linear_state
    assert cache.num_live_slots == cache.num_pending == 0
    assert cache.num_checkpoints + cache.num_free_slots == 11
