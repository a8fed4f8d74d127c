"""Forks, aborts, drivers and sleep of sequences with recurrent state, and why hits ended.

Each test runs with live states in slots, and with live states apart from compressed checkpoints.
"""

from __future__ import annotations

import pytest

from raykv.core import Sequence
from raykv.errors import IntegrityError, RequestError

from .state_world import books, fill, forget_checkpoint, is_blank, make_rank, only, text

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
    kept = world.kv.linear_state.slots.committed.values()
    versions = {one.prefix.namespace.weights_version for one in kept}
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
