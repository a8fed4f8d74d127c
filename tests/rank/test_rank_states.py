"""RankKV with recurrent state: what a sequence resumes from, and what its admission costs.

Each test runs with live states in slots, and with live states apart from compressed checkpoints.
"""

from __future__ import annotations

import numpy as np
import pytest

from raykv.config import PoolConfig
from raykv.core import Namespace, Sequence
from raykv.core.prefix_hash import PrefixHasher
from raykv.errors import ConfigError
from raykv.memory.state_spec import StateSpec, StateTensor
from raykv.pool import BlockManagerPool
from raykv.rank import RankKV

from .state_world import (
    SIZE,
    books,
    checkpoints,
    fill,
    forget_checkpoint,
    is_blank,
    make_rank,
    only,
    text,
)

# -- construction ---------------------------------------------------------------------------------


def test_without_the_section_or_switched_off_there_are_no_slots():
    for states in (None, {"enable": False, "num_slots": 9}):
        kv = RankKV(PoolConfig(num_blocks=9, block_size=4, max_num_seqs=3, linear_state=states))
        assert kv.states is kv.linear_state is None
        sequence = Sequence(text(6))
        assert kv.allocate(sequence)
        assert sequence.linear_state_slot is None
        assert kv.next_checkpoint(sequence) is None
        assert kv.get_state_transfer_infos() == [[]]
        kv.ack_state_transfers()
        kv.deallocate(sequence)


def test_with_it_the_rank_has_slots_of_its_own():
    kv = make_rank(num_slots=7)
    assert kv.linear_state.num_total_slots == kv.linear_state.num_free_slots == 6
    assert kv.state_buffers is None, "books only"
    stats = kv.rank_stats()
    assert (stats.num_free_state_slots, stats.num_live_state_slots, stats.num_checkpoints) == (
        6, 0, 0,
    )  # fmt: skip


def test_a_model_with_state_needs_the_section():
    spec = StateSpec(((StateTensor("s", (4, 4), "float32"),),))
    with pytest.raises(ConfigError, match="linear_state is not configured"):
        RankKV(PoolConfig(num_blocks=9, block_size=4), 0, None, spec)


# -- hits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("match", "num_blocks"), [("contiguous", 2), ("deepest", 4)])
def test_the_seeds_example(make_world, match, num_blocks):
    """KV hit block0..3, checkpoints at blocks 0, 1 and 3; what was trimmed is not held."""
    world = make_world(match=match, **only("at_stride"))
    world.serve(text(4 * SIZE))
    assert checkpoints(world) == [4, 8, 12, 16]
    forget_checkpoint(world, 12)
    sequence = world.admit(text(6 * SIZE))
    state = sequence.kv_state
    assert state.num_computed_tokens == num_blocks * SIZE
    assert state.num_shared_blocks == num_blocks
    manager = world.kv.block_manager
    assert manager.num_matching_blocks(np.array(text(4 * SIZE), np.int32)) == 4
    cached = list(range(1, 5))
    assert state.block_ids.tolist()[:num_blocks] == cached[:num_blocks]
    assert not set(state.block_ids.tolist()[num_blocks:]) & set(cached)
    assert manager.use_counts(np.array(cached)).tolist() == [1] * num_blocks + [0] * (
        4 - num_blocks
    )
    assert manager.num_used_blocks == 6
    assert manager.num_evictable_blocks == 4 - num_blocks
    stats = world.kv.rank_stats()
    assert stats.prefix_cache_hits_total == num_blocks * SIZE
    assert stats.state_hits_total == 1
    world.prefill(sequence)


def test_without_any_checkpoint_everything_is_computed(make_world):
    world = make_world(**only())
    world.serve(text(10))
    assert checkpoints(world) == []
    assert world.kv.block_manager.num_blocks_in_prefix_cache == 2
    assert world.hit(text(10)) == 0


def test_a_stride_of_several_blocks_counts_in_strides(make_world):
    world = make_world(stride_tokens=2 * SIZE, num_slots=20, **only("at_stride"))
    world.serve(text(7 * SIZE))
    assert checkpoints(world) == [8, 16, 24]
    assert world.hit(text(7 * SIZE)) == 24
    forget_checkpoint(world, 16)
    assert world.hit(text(7 * SIZE)) == 8


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)]
)
def test_a_whole_prompt_hit_leaves_a_token_to_compute(make_world, num_tokens, num_hit):
    world = make_world()
    world.serve(text(12))
    assert checkpoints(world) == [4, 8, 12]
    assert world.hit(text(num_tokens)) == num_hit


def test_where_the_boundary_left_has_no_checkpoint_an_earlier_one_serves(make_world):
    world = make_world(match="deepest")
    world.serve(text(12))
    forget_checkpoint(world, 8)
    assert world.hit(text(13)) == 12
    assert world.hit(text(12)) == 4


def test_a_checkpoint_without_its_kv_is_no_hit(make_world):
    world = make_world(num_blocks=8)
    world.serve(text(12))
    assert world.kv.allocate(Sequence(text(24, 100))), "takes all blocks but one"
    assert 12 in checkpoints(world)
    num_cached = world.kv.block_manager.num_blocks_in_prefix_cache
    assert num_cached == 1
    assert world.hit(text(4)) == 0
    world.release(world.held()[0], publish=False) if world.held() else None


def test_a_resumed_state_is_its_own(make_world):
    """Two that begin from one checkpoint, and the one that left it, do not disturb each other."""
    world = make_world()
    world.serve(text(8))
    first, second = world.admit([*text(8), 1, 2]), world.admit([*text(8), 3, 4])
    assert first.kv_state.num_computed_tokens == second.kv_state.num_computed_tokens == 8
    assert first.linear_state_slot != second.linear_state_slot
    copies = world.copy()
    sources = {source for source, _ in copies}
    assert len(sources) == 1
    assert {target for _, target in copies} == {world.address(first), world.address(second)}
    world.compute(first)
    world.compute(second)
    world.check()
    assert world.hit([*text(8), 9]) == 8, "and the checkpoint is as it was"


def test_copies_are_handed_out_once(make_world):
    world = make_world()
    world.serve(text(8))
    world.admit(text(10))
    assert len(world.take()) == 1
    assert world.take() == []
    world.execute()
    world.acknowledge()
    assert world.take() == []


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "a"},
        {"lora": "a"},
        {"multimodal": ((5, b"cat"),)},
        {"multimodal": ((5, b"dog"),)},
    ],
)
def test_equal_tokens_in_another_namespace_never_match(make_world, other):
    world = make_world()
    world.serve(text(12), namespace=Namespace(**other))
    num_common = 4 if "multimodal" in other else 0
    assert world.hit(text(12)) == num_common, "before the image all are alike"
    assert world.hit(text(12), namespace=Namespace(**other)) == 8
    if "multimodal" in other:
        assert world.hit(text(12), namespace=Namespace(multimodal=((5, b"cow"),))) == 4


def test_equal_tokens_under_other_weights_never_match(make_world):
    world = make_world()
    world.serve(text(12))
    world.kv.begin_version(1)
    assert world.hit(text(12)) == 0
    world.serve(text(12))
    assert world.hit(text(12)) == 8


def test_a_forced_collision_of_the_prefix_hash_is_a_miss(make_world, monkeypatch):
    def constant(_self, token_ids, *, namespace=None):
        return np.ones((len(token_ids) // SIZE, 2), np.uint64)

    monkeypatch.setattr(PrefixHasher, "hashes", constant)
    world = make_world(match="deepest", **only("at_prompt_end", "at_generation_end"))
    world.serve(text(8))
    [known] = world.kv.linear_state.slots.committed.values()
    # Its KV is cached, too, since that compares tokens.
    world.serve([*text(8, 100), 0])
    assert world.kv.linear_state.num_collisions_total > 0
    assert list(world.kv.linear_state.slots.committed.values()) == [known], "the first one stays"
    assert world.hit([*text(8, 100), 0]) == 0
    num_known = known.prefix.num_tokens
    assert world.hit([*text(8), 0]) == num_known, "its own is found"
    world.kv.reset_prefix_cache()  # names are no hashes here, which the teardown would notice
    world.num_resets += 1


# -- admission: all or nothing ---------------------------------------------------------------------


def test_a_live_slot_is_one_sequences_from_admission_to_release(make_world):
    world = make_world()
    sequences = [world.admit(text(5, 100 * i)) for i in range(3)]
    slots = [sequence.linear_state_slot for sequence in sequences]
    assert len({*slots, 0}) == 4
    assert world.kv.linear_state.num_live_slots == 3
    world.decode(sequences[0], text(6))
    assert [sequence.linear_state_slot for sequence in sequences] == slots
    world.release(sequences[1], publish=False)
    assert sequences[1].linear_state_slot is None
    assert world.kv.linear_state.num_live_slots == 2


def test_row_and_slot_are_rolled_back_when_blocks_are_short(make_world):
    world = make_world(num_blocks=10)
    world.serve(text(8))
    running = world.admit(text(24, 100))
    assert running is not None
    blocked = Sequence([*text(8), *text(12, 500)])
    before = books(world)
    for _ in range(3):
        assert not world.kv.allocate(blocked)
    assert is_blank(blocked)
    assert books(world) == before, "neither KV nor checkpoints are any more recent"
    elsewhere = make_rank(dp_rank=1)
    assert elsewhere.allocate(blocked)
    assert (blocked.dp_rank, blocked.linear_state_slot) == (1, 1)
    elsewhere.deallocate_without_cache(blocked)
    world.release(running)
    assert world.allocate([blocked])
    assert blocked.kv_state.num_computed_tokens == 8
    world.prefill(blocked)


def test_a_list_gets_all_its_slots_or_nothing(make_world):
    world = make_world(num_slots=6, max_num_seqs=5)
    running = fill(world, 3)
    world.take()
    [pin] = [world.kv.linear_state.acquire_live_slot()]
    new = [Sequence(text(4, 100 * i)) for i in range(1, 3)]
    before = books(world)
    assert not world.kv.allocate([*running, *new])
    assert books(world) == before
    assert all(map(is_blank, new))
    pin.release()
    assert world.allocate([*running, *new])
    assert len({one.linear_state_slot for one in [*running, *new]}) == 5


def test_a_live_slot_takes_the_place_of_the_oldest_checkpoint(make_world):
    world = make_world(num_slots=6, **only("at_prompt_end"))
    for i in range(3):
        world.serve(text(6, 100 * i))
    assert world.kv.linear_state.num_free_slots == 2
    assert world.hit(text(6)) == 4, "it is the most recent one now"
    fill(world, 3)
    assert world.kv.linear_state.num_checkpoints == 2
    first = world.admit(text(6, 100))
    assert first.kv_state.num_computed_tokens == 0, "its checkpoint went"
    world.release(first, publish=False)
    for one in world.held()[1:]:
        world.release(one, publish=False)
    assert world.hit(text(6)) == 4


def test_without_an_obtainable_slot_nobody_is_admitted(make_world):
    world = make_world(num_slots=5, max_num_seqs=4)
    running = fill(world, 4)
    for one in running[:2]:
        world.release(one, publish=False)
    cache = world.kv.linear_state
    held = cache.acquire_live_slots(2)
    assert world.kv.single_block_manager.num_free_blocks == 2
    assert world.kv.room.num_free_single_blocks == 0
    assert world.kv.rank_stats().num_free_single_blocks == 0
    assert world.admit(text(4)) is None
    shared = Sequence(text(9))
    world.kv.allocate_shared(shared)
    assert is_blank(shared)
    held.release()
    assert world.kv.room.num_free_single_blocks == 2
    assert world.admit(text(4)) is not None


def test_a_pool_passes_ranks_without_an_obtainable_slot():
    config = PoolConfig(
        num_blocks=20,
        block_size=SIZE,
        dp_size=2,
        max_num_seqs=3,
        linear_state={"num_slots": 4, "stride_tokens": SIZE},
    )
    with BlockManagerPool.local(config) as pool:
        cache = pool.ranks[0].kv.linear_state
        held = cache.acquire_live_slots(3)
        sequences = [Sequence(text(3, 100 * i)) for i in range(2)]
        assert [pool.select_rank(one) for one in sequences] == [1, 1]
        assert pool.allocate(sequences)
        assert [one.dp_rank for one in sequences] == [1, 1], "though rank 0 has more blocks"
        held.release()
        assert pool.select_rank(Sequence(text(3))) == 0
        pool.deallocate(sequences)
        pool.check_integrity()


def test_the_last_slot_is_not_read_and_written_at_once(make_world):
    """What hits the only reclaimable checkpoint computes anew, instead of waiting for a slot."""
    world = make_world(num_slots=5, max_num_seqs=4, **only("at_prompt_end"))
    world.serve(text(6))
    fill(world, 3)
    assert checkpoints(world) == [4]
    assert world.kv.linear_state.num_free_slots == 0
    sequence = world.admit(text(6))
    assert sequence.kv_state.num_computed_tokens == 0
    assert world.kv.explain(sequence).reason == "no_state_slot"
    assert checkpoints(world) == []
    world.prefill(sequence)


def test_a_checkpoint_that_others_are_reading_costs_no_slot(make_world):
    world = make_world(num_slots=6, max_num_seqs=5, **only("at_prompt_end"))
    world.serve(text(6))
    first = world.admit(text(6))
    assert first.kv_state.num_computed_tokens == 4
    fill(world, 2)
    assert world.kv.linear_state.num_free_slots == 1
    second = world.admit(text(6))
    assert second.kv_state.num_computed_tokens == 4
    world.compute(first)
    world.compute(second)


def test_a_checkpoint_that_is_to_be_restored_is_not_reclaimed(make_world):
    world = make_world(num_slots=6, max_num_seqs=5, **only("at_prompt_end"))
    world.serve(text(6))
    sequence = world.admit(text(6))
    [(source, target)] = world.take()
    fill(world)
    assert world.kv.linear_state.num_live_slots == 4
    assert checkpoints(world) == [4], "all others are live, and it is pinned"
    assert world.kv.linear_state.num_reclaimable == 0
    assert target == world.address(sequence)
    world.execute()
    assert world.admit(text(2, 900)) is None
    world.acknowledge()
    assert world.kv.linear_state.num_reclaimable == 1
    world.check()
    assert world.admit(text(2, 900)) is not None, "now it may go"
    assert source not in world.kv.linear_state.slots._checkpoints
