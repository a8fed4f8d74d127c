"""What a sequence leaves where it ends: its slot itself, or the copy of its last boundary.

Each test runs with live states in slots, and with live states apart from compressed checkpoints.
"""

from __future__ import annotations

from .state_world import StateWorld, checkpoints, fill, make_rank, only, text


def test_a_sequence_that_ends_at_a_boundary_leaves_its_slot_itself():
    world = StateWorld(make_rank(match="deepest", **only("at_generation_end")))
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


def test_apart_from_slots_the_rolling_copy_is_kept_instead():
    world = StateWorld(make_rank(match="deepest", **only("at_generation_end")), split=True)
    sequence = world.admit(text(5))
    world.prefill(sequence)
    world.decode(sequence, [*text(2), 9])
    world.release(sequence)
    assert checkpoints(world) == [8]
    world.check()


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


def test_nor_is_that_boundary_taken_for_copied_before_it_is():
    """Of the two copies that were fetched one is done when the sequence ends."""
    world = StateWorld(make_rank(match="deepest", **only("at_generation_end")), split=True)
    sequence = world.admit(text(5))
    world.prefill(sequence)
    for count in (3, 4):
        for _ in range(count):
            sequence.append(1)
            assert world.allocate([sequence])
            world.compute(sequence, how="late")
        world.kv.checkpoint([sequence])
        if count == 3:
            world.take()
            world.execute()
    world.acknowledge()
    assert len(world.take()) == 1
    world.release(sequence)
    assert checkpoints(world) == []
    world.execute()
    world.acknowledge()
    assert checkpoints(world) == [12]
    world.check()


def test_a_fork_that_ends_before_its_state_is_copied_leaves_nothing(make_world):
    world = make_world(**only("at_generation_end"))
    parent = world.admit(text(8))
    world.compute(parent)
    world.release(world.fork(parent))
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


def roll(world, first):
    """A running sequence whose state at 8 is kept, should it end."""
    sequence = world.admit(text(5, first))
    world.prefill(sequence)
    world.decode(sequence, text(4))
    return sequence


def test_what_may_be_left_makes_room_for_who_wants_to_run(make_world):
    """The youngest goes first; what is left of the others is kept."""
    world = make_world(num_slots=5, max_num_seqs=4, **only("at_generation_end"))
    running = [roll(world, first) for first in (0, 100)]
    cache = world.kv.linear_state
    assert (cache.num_pending, cache.num_free_slots) == (2, 0)
    assert world.kv.room.num_free_single_blocks == 2
    third = world.admit(text(5, 200))
    assert cache.num_pending == 1
    world.prefill(third)
    assert world.kv.room.num_free_single_blocks == 1
    fourth = world.admit(text(5, 300))
    assert cache.num_pending == 0
    world.prefill(fourth)
    world.check()
    for one in (third, fourth):
        world.release(one, publish=False)
    world.decode(running[1], text(4))
    for one in running:
        world.release(one)
    assert checkpoints(world) == [12], "one has reached a boundary since, the other has not"
    world.check_drained()


def test_nor_does_it_keep_a_fork_or_a_hit_waiting(make_world):
    world = make_world(num_slots=3, max_num_seqs=2, **only("at_generation_end"))
    parent = roll(world, 0)
    child = world.fork(parent)
    assert child.single_block_id is not None
    world.decode(child, text(1))
    world.check()
    world.release(parent, publish=False)
    world.release(child, publish=False)
    world.serve(text(5, 100), text(4))
    roll(world, 200)
    assert checkpoints(world) == [], "the last slot was taken"
    world = make_world(num_slots=4, max_num_seqs=2, **only("at_generation_end"))
    world.serve(text(5, 100), text(4))
    roll(world, 200)
    resumed = world.admit([*text(5, 100), *text(4), 7])
    assert resumed.kv_state.num_computed_tokens == 8
    world.prefill(resumed)
    world.check()


def test_a_slot_that_is_written_to_makes_no_room(make_world):
    world = make_world(num_slots=3, max_num_seqs=2, **only("at_generation_end"))
    sequence = roll(world, 0)
    for _ in range(3):
        sequence.append(1)
        assert world.allocate([sequence])
        world.compute(sequence)
        world.kv.checkpoint([sequence])
    assert world.admit(text(5, 100)) is None, "a copy is due"
    assert len(world.take()) == 1
    assert world.admit(text(5, 100)) is None, "a copy is under way"
    world.execute()
    world.acknowledge()
    assert world.admit(text(5, 100)) is not None
