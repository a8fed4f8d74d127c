"""Loads: what goes wrong with them is a miss, never data, and gives everything back."""

from __future__ import annotations

import pytest

from raykv.host.tickets import LoadOutcome
from raykv.memory.copy_batches import BlockOutcome
from raykv.tiering.loads import Stage

from .copy_gates import Gate
from .tier_world import WAIT_S, Clock, wait_until


def stages(world):
    return [load.stage for load in world.kv_of().tier._loads._of_row.values()]


@pytest.mark.parametrize(
    ("fault", "num_computed", "reason"),
    [("fail", 0, "host_failed"), ("short", 4, "host_failed"), ("corrupt", 4, "host_corrupt")],
)
def test_a_fault_is_a_miss_that_is_counted_and_named(make_world, fault, num_computed, reason):
    gate = Gate("load", fault)
    world = make_world(copy_faults=gate)
    world.store(range(9))
    sequence = world.admit(range(9))
    report = world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert sequence.kv_state.num_computed_tokens == num_computed
    assert report.loaded == {sequence.seq_id: num_computed}
    assert report.missed == {sequence.seq_id: reason}
    assert world.pool.stats().total.num_tier_faults_total > 0
    explained = world.pool.explain(sequence)
    assert (explained.reason, explained.token_position) == (reason, num_computed)
    assert str(num_computed) in str(explained)
    world.check(sequence)
    world.write(sequence)
    world.pool.deallocate(sequence)
    world.settle()
    assert world.live(range(9)) == 8


def test_without_checksums_the_canary_sees_the_damage(make_world):
    """The negative control: what the tests look at does notice wrong bytes."""
    world = make_world(copy_faults=Gate("load", "corrupt"), host={"checksum_rate": 0.0})
    world.store(range(9))
    sequence = world.admit(range(9))
    world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert sequence.kv_state.num_computed_tokens == 8
    assert world.find_wrong(sequence) != []
    world.pool.deallocate_without_cache(sequence)


def test_a_block_that_arrived_corrupt_is_quarantined(make_world):
    """Whether it was damaged on the way or in the slab, nobody can tell."""
    world = make_world(copy_faults=Gate("load", "corrupt"))
    world.store(range(9))
    sequence = world.admit(range(9))
    world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    world.pool.deallocate_without_cache(sequence)
    world.settle()
    assert world.tier.host.stats().corrupt == world.tier.host.stats().quarantined == 1
    world.forget_device()
    assert world.live(range(9)) == 4, "what depends on it is not found either"


def test_damage_in_the_slab_is_never_served(make_world):
    world = make_world()
    world.store(range(9))
    slab = world.tier.host._books.slab
    slab.blocks[1:, 5] ^= 1
    assert world.live(range(9)) == 0
    assert world.totals()["loads_corrupt"] == 4


def test_a_block_that_was_reassigned_while_it_was_read_is_a_miss(make_world):
    gate = Gate("load", is_open=False)
    world = make_world(copy_faults=gate)
    world.store(range(9))
    sequence = world.admit(range(9))
    world.pool.transfer_blocks([sequence])
    wait_until(lambda: gate.num_seen)
    world.tier.host._books.slab.generations[1:] += 1
    gate.open()
    report = world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert report.missed == {sequence.seq_id: "host_stale"}
    assert sequence.kv_state.num_computed_tokens == 0
    assert world.totals()["loads_stale"] == 4
    world.settle()
    world.books.manager.reset_prefix_cache()


# -- giving up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("stage", ["to_ask", "asked", "granted", "copying"])
def test_an_abort_in_any_stage_gives_everything_back(make_world, stage, publish):
    gate = Gate("load", is_open=stage != "copying")
    world = make_world(copy_faults=gate)
    world.store(range(9))
    if stage in {"to_ask", "asked"}:
        world.tier.freeze()
        if stage == "to_ask":
            world.admit(range(50, 55))  # its question is under way
    sequence = world.admit(range(9))
    if stage == "copying":
        world.pool.transfer_blocks()
        wait_until(lambda: gate.num_seen)
    assert stages(world)[-1] is Stage[stage.upper()]
    (world.pool.deallocate if publish else world.pool.deallocate_without_cache)(sequence)
    assert not sequence.is_loading
    if stage == "copying":
        other = world.admit(range(200, 210))  # must not get blocks that are still written to
        world.write(other)
        gate.open()
        world.settle()
        world.check(other)
    # What is left is seen by the fixture's drain.


def test_a_queued_copy_is_called_off(make_world):
    gate = Gate("load", is_open=False)
    world = make_world(copy_faults=gate, num_blocks=20)
    world.store(range(9))
    world.store(range(50, 59))
    first, second = world.admit(range(9)), world.admit(range(50, 59))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    world.pool.deallocate_without_cache(second)
    assert world.link.copier.num_cancelled == 1
    gate.open()
    world.pool.transfer_blocks([first], wait_s=WAIT_S)
    world.check(first)


# -- being late ---------------------------------------------------------------------------------


def test_the_sequence_of_a_late_load_moves_to_other_blocks(make_world):
    gate = Gate("load")
    world = make_world(copy_faults=gate, num_blocks=20, host={"timeout_s": 0.05})
    world.store(range(9))
    world.live(range(5))
    world.settle()
    gate.close()
    sequence = world.admit(range(9))
    before = sequence.kv_state.block_ids.tolist()
    report = world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    after = sequence.kv_state.block_ids.tolist()
    assert not sequence.is_loading
    assert report.missed == {sequence.seq_id: "host_load_late"}
    assert after[:2] == before[:2]
    assert not set(after[2:]) & set(before[2:4])
    assert world.pool.explain(sequence).reason == "host_load_late"
    world.write(sequence)
    gate.open()
    world.settle()
    world.check(sequence)
    assert world.totals()["loads_late"] == 2
    other = world.admit(range(70, 74))
    world.write(other)
    world.check(sequence)


def test_where_there_are_no_other_blocks_it_waits_on(make_world):
    gate = Gate("load")
    world = make_world(copy_faults=gate, host={"timeout_s": 0.05})
    world.store(range(17))
    gate.close()
    sequence = world.admit(range(17))
    world.pool.transfer_blocks([sequence], wait_s=0.2)
    assert sequence.is_loading
    gate.open()
    world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert sequence.kv_state.num_computed_tokens == 16
    world.check(sequence)


def test_a_load_that_is_called_late_by_a_test_is_done_with_the_next(make_world):
    world = make_world(copy_faults=Gate("load", "late"), num_blocks=20)
    world.store(range(9))
    world.store(range(50, 59))
    both = [world.admit(range(9)), world.admit(range(50, 59))]
    world.pool.transfer_blocks(both, wait_s=WAIT_S)
    assert [one.kv_state.num_computed_tokens for one in both] == [8, 8]
    world.check(*both)


def test_books_and_copiers_number_outcomes_alike():
    """A rank reports to the one what it heard from the other."""
    assert [(one.name, one.value) for one in LoadOutcome] == [
        (one.name, one.value) for one in BlockOutcome
    ]


# -- a tier that says nothing -------------------------------------------------------------------


def test_a_frozen_tier_costs_its_timeout_and_no_more(make_world):
    world = make_world(num_blocks=20)
    world.store(range(9))
    world.tier.freeze()
    first = world.admit(range(9))
    second = world.admit(range(50, 59))  # while the first one's question is under way
    report = world.pool.transfer_blocks([first, second], wait_s=WAIT_S)
    assert not first.is_loading
    assert not second.is_loading
    assert report.missed == dict.fromkeys([first.seq_id, second.seq_id], "host_unavailable")
    assert world.pool.explain(first).reason == "host_unavailable"
    third = world.admit(range(60, 65))
    assert not third.is_loading, "nobody asks a tier that owes an answer"
    for sequence in (first, second, third):
        world.write(sequence)
    world.check(first, second, third)
    world.pool.deallocate([first, second, third])
    world.tier.thaw()
    world.forget_device()
    assert world.live(range(9)) == 8


def test_time_is_counted_from_the_question(make_world):
    clock = Clock()
    world = make_world(host={"timeout_s": 5.0})
    world.link._clock = clock
    world.store(range(9))
    world.tier.freeze()
    sequence = world.admit(range(9))
    clock.now += 4.9
    world.pool.transfer_blocks()
    assert sequence.is_loading
    clock.now += 0.2
    world.pool.transfer_blocks()
    assert not sequence.is_loading
