"""RankKV with recurrent state: what a sequence resumes from, and which checkpoints it leaves.

Each test runs with live states in slots, and with live states apart from compressed checkpoints.
"""

from __future__ import annotations

import numpy as np
import pytest

from raykv.config import PoolConfig
from raykv.core import Namespace, Sequence
from raykv.core.prefix_hash import PrefixHasher
from raykv.errors import ConfigError, IntegrityError, RequestError
from raykv.memory.state_spec import StateSpec, StateTensor
from raykv.pool import BlockManagerPool
from raykv.rank import RankKV

from .state_world import SIZE, StateWorld, make_rank

RULES = ("at_stride", "at_prompt_end", "at_generation_end", "at_branch")


@pytest.fixture(params=[False, True], ids=["exact", "split"])
def make_world(request):
    """Makes worlds that are checked, emptied and checked again when the test is over."""
    made = []

    def make(**settings):
        made.append(StateWorld(make_rank(**settings), split=request.param))
        return made[-1]

    yield make
    for world in made:
        world.check()
        for sequence in world.held():
            world.release(sequence)
        for driver in list(world.kv.states._copies._owed):
            world.copy(driver)
        world.check()
        world.check_drained()


def only(*rules):
    """Settings under which these rules alone make checkpoints."""
    return {rule: rule in rules for rule in RULES}


def text(num_tokens, first=0):
    return list(range(first, first + num_tokens))


def checkpoints(world):
    """Tokens of each prefix that has a checkpoint."""
    return sorted(one.prefix.num_tokens for one in world.kv.linear_state.slots.committed.values())


def forget_checkpoint(world, num_tokens):
    """As if its slot had been reclaimed."""
    slots = world.kv.linear_state.slots
    [name] = [k for k, one in slots.committed.items() if one.prefix.num_tokens == num_tokens]
    one = slots.committed.pop(name)
    del slots._checkpoints[one.slot], slots._recent[one.slot]
    slots._ledger.give_back_one(one.slot)
    world.overwrite()


def books(world):
    """Everything that a refused call must leave as it was, the orders of eviction included."""
    kv = world.kv
    slots, order = kv.linear_state.slots, kv.block_manager._cache._order
    return (
        kv.rank_stats(),
        slots._ledger.counts.tolist(),
        list(slots._recent),
        list(slots.committed),
        kv.block_manager._ledger.counts.tolist(),
        [(run.index, run.length) for run in order._queue],
        list(order._stamps),
        kv.single_block_manager._ledger.counts.tolist(),
    )


def is_blank(sequence):
    return (
        sequence.dp_rank is sequence.single_block_id is sequence.linear_state_slot is None
        and sequence.kv_state.num_blocks == sequence.kv_state.num_computed_tokens == 0
        and sequence.kv_state.checkpoint_stops == ()
    )


def fill(world, count=None):
    """Running sequences that share nothing, until no more are admitted."""
    made = []
    while count is None or len(made) < count:
        sequence = world.admit(text(2, 1000 + 10 * len(world.held())))
        if sequence is None:
            return made
        made.append(sequence)
    return made


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
    def constant(_self, token_ids, *, namespace=None):  # noqa: ARG001
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


# -- when checkpoints are taken -------------------------------------------------------------------


def test_every_stride(make_world):
    world = make_world(stride_tokens=2 * SIZE, **only("at_stride"))
    sequence = world.admit(text(18))
    assert sequence.kv_state.checkpoint_stops == ()
    seen = []
    while (stop := world.kv.next_checkpoint(sequence)) is not None:
        seen.append(stop)
        world.compute(sequence, stop - sequence.kv_state.num_computed_tokens)
        world.kv.cache(sequence)
        world.copy()
    assert seen == checkpoints(world) == [8, 16]
    world.compute(sequence)
    world.decode(sequence, text(9))
    assert checkpoints(world) == [8, 16, 24], "generation passes boundaries, too"


@pytest.mark.parametrize(
    ("num_tokens", "stops"), [(3, ()), (4, (4,)), (5, (4,)), (8, (4, 8)), (11, (8,)), (12, (8, 12))]
)
def test_at_the_end_of_a_prompt(make_world, num_tokens, stops):
    """The last boundary that an equal prompt can use, and the last that a longer one can."""
    world = make_world(**only("at_prompt_end"))
    sequence = world.admit(text(num_tokens))
    assert sequence.kv_state.checkpoint_stops == stops
    world.prefill(sequence)
    assert tuple(checkpoints(world)) == stops
    world.decode(sequence, text(9))
    world.release(sequence)
    assert tuple(checkpoints(world)) == stops


def test_where_a_prompt_branches_off(make_world):
    """The second sequence that shares a prefix leaves what the third one uses."""
    world = make_world(match="deepest", **only("at_branch"))
    prefix = text(9)
    assert world.serve([*prefix, *text(7, 100)]) == 0
    assert checkpoints(world) == []
    second = world.admit([*prefix, *text(7, 200)])
    assert second.kv_state.num_computed_tokens == 0
    assert second.kv_state.checkpoint_stops == (8,)
    world.prefill(second)
    world.release(second)
    assert checkpoints(world) == [8]
    third = world.admit([*prefix, *text(7, 300)])
    assert third.kv_state.num_computed_tokens == 8
    assert third.kv_state.checkpoint_stops == ()
    world.prefill(third)


def test_at_the_end_of_what_was_generated(make_world):
    world = make_world(match="deepest", **only("at_generation_end"))
    world.serve(text(6), text(7, 50))
    assert checkpoints(world) == [12], "of 13 tokens"
    assert world.hit([*text(6), *text(7, 50), 1, 2]) == 12


@pytest.mark.parametrize(
    ("rule", "made"),
    [
        (None, [8, 12, 16, 20, 28]),
        ("at_stride", [8, 12, 20, 28]),
        ("at_prompt_end", [8, 16, 28]),
        ("at_generation_end", [8, 12, 16, 20]),
        ("at_branch", [12, 16, 20, 28]),
    ],
)
def test_each_rule_can_be_switched_off(make_world, rule, made):
    """Two prompts of 13 and 22 tokens with 9 in common; the second one generates 9."""
    rules = only(*set(RULES) - {rule})
    world = make_world(match="deepest", stride_tokens=4 * SIZE, **rules)
    world.serve([*text(9), *text(4, 50)])
    world.serve([*text(9), *text(13, 100)], text(9, 200))
    assert checkpoints(world) == made


def test_none_at_all(make_world):
    world = make_world(**only())
    sequence = world.admit(text(16))
    assert world.kv.next_checkpoint(sequence) is None
    world.prefill(sequence)
    world.decode(sequence, text(8))
    world.release(sequence)
    assert checkpoints(world) == []
    assert world.kv.linear_state.num_committed_total == 0


def test_what_a_resumed_sequence_began_with_is_not_saved_again(make_world):
    world = make_world()
    world.serve(text(8))
    total = world.kv.linear_state.num_committed_total
    sequence = world.admit(text(9))
    assert sequence.kv_state.num_computed_tokens == 8
    world.copy()
    world.kv.cache(sequence)
    assert world.copy() == []
    world.release(sequence)
    assert world.kv.linear_state.num_committed_total == total


def test_equal_prefixes_are_saved_once(make_world):
    """Two that compute the same side by side; the second one's copy is not even asked for."""
    world = make_world(**only("at_prompt_end"))
    pair = [world.admit(text(6)) for _ in range(2)]
    for one in pair:
        world.compute(one, 4)
    for one in pair:
        world.kv.cache(one)
    assert len(world.copy()) == 1
    assert world.kv.linear_state.num_coalesced_total == 1
    world.kv.cache(pair[1])
    assert world.copy() == []
    assert checkpoints(world) == [4]


# -- the final promotion and the rolling reservation ----------------------------------------------


def test_a_sequence_that_ends_at_a_boundary_leaves_its_slot_itself(make_world):
    world = make_world(match="deepest", **only("at_generation_end"))
    if world.split:
        pytest.skip("live states are no checkpoints there")
    sequence = world.admit(text(5))
    world.prefill(sequence)
    world.decode(sequence, [*text(2), 9])
    slot = sequence.linear_state_slot
    assert sequence.kv_state.num_computed_tokens == 8
    world.release(sequence)
    [one] = world.kv.linear_state.slots.committed.values()
    assert (one.slot, one.prefix.num_tokens) == (slot, 8)
    assert world.take() == [], "nothing is copied"
    assert world.kv.linear_state.num_pending == 0
    world.check()


def test_apart_from_slots_the_rolling_copy_is_kept_instead(make_world):
    world = make_world(match="deepest", **only("at_generation_end"))
    if not world.split:
        pytest.skip("the slot itself is kept there")
    sequence = world.admit(text(5))
    world.prefill(sequence)
    world.decode(sequence, [*text(2), 9])
    world.release(sequence)
    assert checkpoints(world) == [8]


def test_in_between_one_reservation_rolls_along(make_world):
    world = make_world(match="deepest", **only("at_generation_end"))
    sequence = world.admit(text(5))
    world.prefill(sequence)
    cache = world.kv.linear_state
    for _ in range(4):
        world.decode(sequence, text(4))
        assert cache.num_pending == 1
        assert cache.num_checkpoints == 0, "it can be matched by nobody before it is named"
    assert sequence.kv_state.num_computed_tokens == 21
    world.release(sequence)
    assert checkpoints(world) == [20]
    assert cache.num_pending == 0
    assert cache.num_live_slots == 0


def test_a_rolling_copy_that_is_not_done_yet_is_committed_once_it_is(make_world):
    world = make_world(match="deepest", **only("at_generation_end"))
    sequence = world.admit(text(5))
    world.prefill(sequence)
    world.decode(sequence, text(2))
    sequence.append(1)
    assert world.allocate([sequence])
    world.compute(sequence)
    world.kv.checkpoint([sequence])
    world.take()
    world.execute()
    sequence.append(1)
    assert world.allocate([sequence])
    world.compute(sequence, how="late")
    world.release(sequence)
    assert checkpoints(world) == []
    world.acknowledge()
    assert checkpoints(world) == [8]


def test_what_is_acknowledged_late_is_not_taken_for_a_later_boundary(make_world):
    """The slot of a rolling reservation holds the state at 8 when that at 12 is due."""
    world = make_world(match="deepest", **only("at_generation_end"))
    sequence = world.admit(text(5))
    world.prefill(sequence)

    def step(count):
        for _ in range(count):
            sequence.append(1)
            assert world.allocate([sequence])
            world.compute(sequence, how="late")
        world.kv.checkpoint([sequence])

    step(3)
    assert len(world.take()) == 1
    world.execute()
    step(4)
    assert sequence.kv_state.num_computed_tokens == 12
    world.acknowledge()
    step(1)
    world.release(sequence)
    assert checkpoints(world) == []


def test_a_reservation_that_is_given_up_is_not_written_to_any_more(make_world):
    """Neither by a copy that is due nor, before it is done, handed to somebody else."""
    world = make_world(num_slots=6, max_num_seqs=5, **only("at_generation_end"))
    for is_handed in (False, True):
        sequence = world.admit(text(4), driver="a")
        world.prefill(sequence)
        world.decode(sequence, text(3))
        sequence.append(1)
        assert world.allocate([sequence])
        world.compute(sequence)
        world.kv.checkpoint([sequence])
        if is_handed:
            assert len(world.take("a")) == 1
        world.release(sequence, publish=False)
        others = fill(world)
        assert len(others) == (3 if is_handed and not world.split else 4 if is_handed else 5)
        for one in others:
            world.compute(one)
        world.copy("a")
        world.check()
        for one in others:
            world.release(one, publish=False)


# -- when none is taken ---------------------------------------------------------------------------


def test_a_copy_that_is_fetched_too_late_makes_no_checkpoint(make_world):
    world = make_world(**only("at_prompt_end"))
    sequence = world.admit(text(10))
    world.compute(sequence, 8)
    world.kv.cache(sequence)
    assert world.kv.linear_state.num_pending == 1
    world.compute(sequence, 1, how="late")
    assert world.take() == [], "the state has moved on"
    assert world.kv.linear_state.num_pending == 0
    world.acknowledge()
    assert checkpoints(world) == []


def test_nothing_is_found_before_the_copy_is_acknowledged(make_world):
    world = make_world(match="deepest", **only("at_prompt_end"))
    sequence = world.admit(text(10))
    world.compute(sequence, 8)
    world.kv.cache(sequence)
    assert world.hit(text(10), driver="other") == 0, "it is due"
    world.take()
    assert world.hit(text(10), driver="other") == 0, "it is under way"
    world.execute()
    assert world.hit(text(10), driver="other") == 0, "nobody said that it is done"
    world.acknowledge()
    assert world.hit(text(10), driver="other") == 8


def test_not_at_a_place_that_is_no_boundary(make_world):
    world = make_world()
    sequence = world.admit(text(10))
    for count in (3, 2, 2):
        world.compute(sequence, count)
        world.kv.cache(sequence)
        assert world.copy() == []
    assert checkpoints(world) == []


@pytest.mark.parametrize("rule", RULES)
def test_not_by_a_sequence_that_runs_across_a_reset(make_world, rule):
    world = make_world(match="deepest", **only(rule))
    sequence = world.admit(text(17))
    world.compute(sequence, 4)
    world.kv.cache(sequence)
    world.reset()
    assert world.kv.next_checkpoint(sequence) is None
    world.copy()
    world.prefill(sequence)
    world.decode(sequence, text(3))
    world.release(sequence)
    assert checkpoints(world) == []
    assert world.hit(text(17)) == 0


def test_nor_by_its_forks(make_world):
    world = make_world()
    parent = world.admit(text(8))
    world.compute(parent, 5)
    world.reset()
    child = world.fork(parent)
    world.prefill(child)
    world.prefill(parent)
    world.decode(child, text(4))
    for one in (parent, child):
        world.release(one)
    assert checkpoints(world) == []


def test_nothing_of_before_a_reset_is_ever_matched(make_world):
    """Pending, rolling and pinned ones included."""
    world = make_world()
    world.serve(text(12))
    reader = world.admit(text(13))
    assert reader.kv_state.num_computed_tokens == 12
    pending = world.admit(text(9, 100))
    world.compute(pending, 8)
    world.kv.cache(pending)
    world.take()
    world.execute()
    world.reset()
    world.acknowledge()
    assert checkpoints(world) == []
    assert world.hit(text(13)) == world.hit(text(9, 100)) == 0


def test_not_under_weights_that_changed_meanwhile(make_world):
    world = make_world(match="deepest")
    sequence = world.admit(text(13))
    world.compute(sequence, 4)
    world.kv.cache(sequence)
    world.copy()
    assert checkpoints(world) == [4]
    world.kv.begin_version(1)
    assert world.kv.next_checkpoint(sequence) is None
    world.prefill(sequence)
    world.decode(sequence, text(3))
    world.release(sequence)
    assert checkpoints(world) == [4], "only what the earlier weights computed"
    assert world.hit([*text(13), *text(3)]) == 0


def test_not_without_a_prefix_cache(make_world):
    world = make_world(enable_prefix_cache=False)
    sequence = world.admit(text(8))
    assert world.kv.next_checkpoint(sequence) is None
    world.prefill(sequence)
    world.decode(sequence, text(4))
    assert sequence.kv_state.num_computed_tokens == 12
    world.release(sequence)
    cache = world.kv.linear_state
    assert cache.num_checkpoints == cache.num_committed_total == cache.num_pending == 0


def test_not_of_what_was_aborted(make_world):
    world = make_world(match="deepest", **only("at_generation_end"))
    sequence = world.admit(text(6))
    world.prefill(sequence)
    world.decode(sequence, text(6))
    world.release(sequence, publish=False)
    assert checkpoints(world) == []
    assert world.kv.linear_state.num_free_slots == world.kv.linear_state.num_total_slots


def test_where_all_slots_are_live_saves_are_skipped_and_counted(make_world):
    world = make_world(num_slots=3, max_num_seqs=2)
    first, second = (world.admit(text(10, 100 * i)) for i in range(2))
    world.prefill(first)
    stats = world.kv.rank_stats()
    assert stats.state_skipped_total == 2
    assert stats.num_checkpoints == stats.state_checkpoints_total == 0
    world.release(second, publish=False)
    again = world.admit(text(10))
    assert again.kv_state.num_computed_tokens == 0
    report = world.kv.explain(again)
    assert (report.reason, report.num_hit_tokens, report.token_position) == ("no_state_slot", 0, 8)


def test_a_copy_that_failed_makes_no_checkpoint(make_world):
    world = make_world(**only("at_prompt_end"))
    sequence = world.admit(text(10))
    world.compute(sequence, 8)
    world.kv.cache(sequence)
    assert len(world.kv.take_state_saves("")) == 1
    world.kv.fail_state_transfers("")
    cache = world.kv.linear_state
    assert cache.num_pending == cache.num_checkpoints == 0
    assert cache.num_skipped_total == 1
    world.kv.cache(sequence)
    world.copy()
    assert checkpoints(world) == [8], "the next attempt is another one"


def test_a_copy_for_a_fork_waits_while_saves_are_fetched(make_world):
    """Saves may fail; a sequence whose state was not copied must not go on."""
    world = make_world()
    parent = world.admit(text(8))
    world.compute(parent, 4)
    child = world.fork(parent)
    world.kv.cache(parent)
    saves = world.kv.take_state_saves("")
    assert [source for source, _ in saves] == [world.address(parent)]
    assert world.address(child) not in {target for _, target in saves}
    world.kv.fail_state_transfers("")
    assert world.take() == [(world.address(parent), world.address(child))]
    world.execute()
    world.check()


# -- forks ----------------------------------------------------------------------------------------


def test_a_fork_gets_a_slot_and_a_copy_of_its_own(make_world):
    world = make_world()
    parent = world.admit(text(7))
    world.compute(parent)
    child = world.fork(parent)
    assert child.linear_state_slot not in {None, parent.linear_state_slot}
    assert world.take() == [(world.address(parent), world.address(child))]
    world.execute()
    world.acknowledge()
    world.decode(parent, [1, 2])
    world.decode(child, [3, 4])
    world.check()


def test_a_fork_of_what_has_computed_nothing_copies_nothing(make_world):
    world = make_world()
    parent = world.admit(text(7))
    child = world.fork(parent)
    assert child.linear_state_slot is not None
    assert world.take() == []
    world.prefill(child)


def test_a_fork_of_a_parent_that_is_still_to_be_restored_takes_the_root_source(make_world):
    world = make_world()
    world.serve(text(8))
    parent = world.admit(text(10))
    child = world.fork(parent)
    grandchild = world.fork(child)
    copies = world.take()
    assert len({source for source, _ in copies}) == 1
    assert [target for _, target in copies] == [
        world.address(one) for one in (parent, child, grandchild)
    ]
    world.release(parent, publish=False)
    world.execute()
    world.acknowledge()
    world.check()
    world.prefill(child)
    world.prefill(grandchild)


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("num_tokens", [7, 8])
def test_a_fork_outlives_a_parent_that_ends_before_the_copy(make_world, publish, num_tokens):
    """At 8 tokens the parent's slot becomes a checkpoint."""
    world = make_world()
    parent = world.admit(text(num_tokens), driver="a")
    world.compute(parent)
    child = world.fork(parent)
    world.release(parent, publish=publish)
    others = fill(world)
    for one in others:
        world.compute(one)
    world.decode(child, [1, 2])
    world.check()


def test_without_a_slot_a_fork_holds_nothing(make_world):
    world = make_world(num_slots=5, max_num_seqs=4)
    parent = world.admit(text(7))
    world.compute(parent)
    held = world.kv.linear_state.acquire_live_slots(3)
    before = books(world)
    child = world.fork(parent)
    assert is_blank(child)
    assert books(world) == before
    held.release()
    assert world.allocate([child])
    world.prefill(child)


def test_forks_leave_checkpoints_of_their_own(make_world):
    world = make_world(match="deepest", num_slots=16)
    parent = world.admit(text(6))
    world.prefill(parent)
    child = world.fork(parent)
    world.decode(parent, [1, 2, 3])
    world.decode(child, [7, 8, 9])
    for one in (parent, child):
        world.release(one)
    assert world.hit([*text(6), 1, 2, 3, 0]) == 8
    assert world.hit([*text(6), 7, 8, 9, 0]) == 8
    assert world.hit([*text(6), 5, 5, 5, 0]) == 4


# -- why a hit ended ------------------------------------------------------------------------------


def test_explain_no_checkpoint(make_world):
    world = make_world(**only("at_prompt_end"))
    world.serve(text(13))
    forget_checkpoint(world, 12)
    sequence = world.admit(text(14))
    report = world.kv.explain(sequence)
    assert (report.reason, report.num_hit_tokens, report.token_position) == ("no_checkpoint", 0, 12)
    world.prefill(sequence)
    assert world.kv.explain(sequence) == report, "what it leaves itself explains nothing"


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(8, 0), (24, 16)])
def test_explain_a_stride_that_is_longer_than_the_kv(make_world, num_tokens, num_hit):
    world = make_world(stride_tokens=16, num_slots=20, **only("at_stride"))
    world.serve(text(num_tokens))
    sequence = world.admit(text(num_tokens + 1))
    report = world.kv.explain(sequence)
    assert (report.reason, report.num_hit_tokens) == ("stride", num_hit)
    assert report.token_position == num_tokens


def test_explain_a_checkpoint_that_the_policy_may_not_use(make_world):
    world = make_world(match="contiguous", **only("at_stride"))
    world.serve(text(12))
    forget_checkpoint(world, 4)
    report = world.kv.explain(world.admit(text(13)))
    assert (report.reason, report.num_hit_tokens, report.token_position) == ("stride", 0, 12)


def test_explain_what_kv_alone_explains(make_world):
    world = make_world()
    world.serve(text(12))
    sequence = world.admit([*text(10), *text(6, 50)])
    report = world.kv.explain(sequence)
    assert (report.reason, report.num_hit_tokens, report.token_position) == ("diverged", 8, 10)
    assert world.kv.explain(world.admit(text(12))).reason == "last_token_kept"


# -- giving up ------------------------------------------------------------------------------------


STAGES = ["allocated", "fetched", "restored", "computing", "saving", "saved", "decoding", "forked"]


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_in_any_state_returns_every_slot_and_pin(make_world, stage, publish):
    world = make_world()
    world.serve(text(4))
    sequence = world.admit(text(9))
    assert sequence.kv_state.num_computed_tokens == 4
    at = STAGES.index(stage)
    if at >= 1:
        world.take()
    if at >= 2:
        world.execute()
        world.acknowledge()
    if at >= 3:
        world.compute(sequence, 2)
    if at >= 4:
        world.compute(sequence, 2)
        world.kv.cache(sequence)
        world.take()
    if at >= 5:
        world.copy()
    if at >= 6:
        world.prefill(sequence)
        world.decode(sequence, text(4))
    if at >= 7:
        world.release(world.fork(sequence), publish=publish)
    world.release(sequence, publish=publish)
    assert is_blank(sequence)
    world.copy()
    world.check()
    world.check_drained()


def test_a_driver_that_is_forgotten_leaves_nothing(make_world):
    world = make_world()
    world.serve(text(8), driver="other")
    mine, theirs = world.admit(text(9), driver="mine"), world.admit(text(9), driver="other")
    world.take("mine")
    world.fork(mine)
    saving = world.admit(text(6, 100), driver="mine")
    world.copy("mine")
    world.compute(saving, 4)
    world.kv.cache(saving)
    world.take("mine")
    world.forget_driver("mine")
    world.check()
    assert world.kv.linear_state.num_pending == 0
    assert world.kv.linear_state.num_live_slots == 1
    assert len(world.take("other")) == 1, "the others' are still due"
    world.execute("other")
    world.check()
    assert theirs.kv_state.num_computed_tokens == 8


def test_a_reset_of_a_sequence_gives_its_slot_back(make_world):
    world = make_world()
    sequence = world.admit(text(6))
    sequence.reset()
    assert is_blank(sequence)
    assert world.kv.linear_state.num_live_slots == 0


def test_copies_under_way_keep_what_they_read_and_write(make_world):
    """Of a driver that is slow, while others take all that is free."""
    world = make_world(num_slots=9, max_num_seqs=8)
    world.serve(text(8))
    sequence = world.admit(text(10), driver="slow")
    child = world.fork(sequence)
    assert len(world.take("slow")) == 2
    for one in (sequence, child):
        world.release(one, publish=False)
    for one in fill(world):
        world.compute(one)
    world.execute("slow")
    world.check()
    world.acknowledge("slow")


# -- retiring and sleeping ------------------------------------------------------------------------


def test_checkpoints_of_retired_weights_go_first(make_world):
    world = make_world(num_slots=7, **only("at_prompt_end"))
    world.serve(text(6, 100))
    world.kv.begin_version(1)
    world.serve(text(6))
    assert world.kv.linear_state.num_checkpoints == 2
    world.kv.linear_state.retire(1)
    world.kv.begin_version(2)
    world.serve(text(6))
    fill(world, 4)
    versions = {one.prefix.namespace.weights_version for one in _committed(world)}
    assert versions == {0, 2}, "not the oldest, but the retired one"


def test_sleep_forgets_all_and_is_refused_while_states_are_copied(make_world):
    world = make_world()
    world.serve(text(8))
    sequence = world.admit(text(9), driver="a")
    with pytest.raises(RequestError, match="hold 3 blocks"):
        world.kv.sleep()
    world.take("a")
    world.release(sequence, publish=False)
    with pytest.raises(RequestError, match="ack_state_transfers"):
        world.kv.sleep()
    world.execute("a")
    world.acknowledge("a")
    world.kv.sleep()
    assert world.kv.linear_state.num_checkpoints == 0
    with pytest.raises(RequestError, match="sleeps"):
        world.admit(text(4))
    world.kv.wake_up()
    world.num_resets += 1
    assert world.hit(text(9)) == 0


def test_sleep_is_refused_while_a_state_is_copied_between_rows(make_world):
    """Apart from slots, no slot tells of it."""
    world = make_world()
    parent = world.admit(text(3), driver="a")
    world.compute(parent)
    child = world.fork(parent)
    world.take("a")
    for one in (parent, child):
        world.release(one, publish=False)
    with pytest.raises(RequestError, match="ack_state_transfers"):
        world.kv.sleep()
    world.execute("a")
    world.acknowledge("a")
    world.kv.sleep()
    world.kv.wake_up()


# -- books ----------------------------------------------------------------------------------------


def test_integrity_finds_a_slot_that_is_not_the_sequences():
    kv = make_rank()
    first, second = Sequence(text(4)), Sequence(text(4, 100))
    assert kv.allocate([first, second])
    kv.check_integrity()
    kept, first.linear_state_slot = first.linear_state_slot, second.linear_state_slot
    with pytest.raises(IntegrityError, match="slots are live"):
        kv.check_integrity()
    first.linear_state_slot = kept
    lost = kv.linear_state.acquire_live_slot()
    with pytest.raises(IntegrityError, match="slots are live"):
        kv.check_integrity()
    lost.release()
    kv.check_integrity()


def test_statistics_count_what_was_resumed_saved_and_skipped(make_world):
    world = make_world(match="deepest")
    world.serve(text(10))
    world.serve(text(10))
    stats = world.kv.rank_stats()
    assert stats.state_hits_total == 1
    assert stats.state_checkpoints_total == 2
    assert stats.state_skipped_total == 0
    assert stats.num_checkpoints == 2
    assert stats.num_free_state_slots == 11 - 2
    assert stats.num_live_state_slots == 0
    running = world.admit(text(3))
    assert world.kv.rank_stats().num_live_state_slots == 1
    world.release(running)


def _committed(world):
    return world.kv.linear_state.slots.committed.values()
