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
