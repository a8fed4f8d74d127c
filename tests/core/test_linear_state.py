"""Live slots and checkpoints of recurrent state, one promise at a time."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from raykv.core import CheckedPrefix, LinearStatePrefixCache, Namespace, Sequence
from raykv.errors import ConfigError, DoubleFreeError, IntegrityError, RequestError

COUNTERS = [
    "num_total_slots",
    "num_free_slots",
    "num_live_slots",
    "num_pending",
    "num_checkpoints",
    "num_reclaimable",
    "num_lingering_slots",
    "num_committed_total",
    "num_hits_total",
    "num_skipped_total",
    "num_coalesced_total",
    "num_collisions_total",
    "num_reclaimed_total",
]


@pytest.fixture
def cache():
    """Five slots to hand out."""
    cache = LinearStatePrefixCache(6)
    yield cache
    cache.check_integrity()
    given = cache.num_free_slots + cache.num_live_slots + cache.num_pending
    assert given + cache.num_checkpoints + cache.num_lingering_slots == cache.num_total_slots


def counters(cache):
    return {name: getattr(cache, name) for name in COUNTERS}


def save(cache, name, prefix=None) -> int:
    """A checkpoint, from reservation to commit."""
    return cache.commit(cache.reserve_checkpoint(name, prefix=prefix))


def running(cache) -> Sequence:
    """A sequence with a live slot, detached from its handle."""
    sequence = Sequence([1])
    sequence.linear_state_slot = int(cache.acquire_live_slot().detach()[0])
    return sequence


def saved(cache, *names) -> list[bytes]:
    return [name for name in names if cache.contains(name)]


def checked(*tokens, **namespace) -> CheckedPrefix:
    return CheckedPrefix(np.array(tokens, np.int32).tobytes(), len(tokens), Namespace(**namespace))


def pinned(cache, *names):
    return [cache.match(name) for name in names]


# -- slots -----------------------------------------------------------------------------------------


def test_slot_0_is_padding_and_a_fresh_cache_hands_out_the_rest(cache):
    assert (cache.num_total_slots, cache.num_free_slots) == (5, 5)
    held = [cache.acquire_live_slot() for _ in range(5)]
    assert [int(blocks.ids[0]) for blocks in held] == [1, 2, 3, 4, 5]
    assert cache.acquire_live_slot() is None
    assert (cache.num_live_slots, cache.num_free_slots) == (5, 0)


@pytest.mark.parametrize("num_slots", [1, 0, -3, 2.0, 1 << 31])
def test_fewer_than_two_slots_are_refused(num_slots):
    with pytest.raises(ConfigError, match="num_slots"):
        LinearStatePrefixCache(num_slots)


def test_the_manager_of_the_slots_says_what_they_are(cache):
    assert "linear-state slot" in repr(cache.slots)


def test_several_live_slots_are_all_or_nothing(cache):
    save(cache, b"a")
    held = cache.acquire_live_slots(3)
    before = counters(cache)
    assert cache.acquire_live_slots(3) is None
    assert counters(cache) == before
    assert saved(cache, b"a")
    rest = cache.acquire_live_slots(2)
    assert sorted([*held.ids, *rest.ids]) == [1, 2, 3, 4, 5]
    assert not saved(cache, b"a")
    assert len(cache.acquire_live_slots(0)) == 0


def test_a_live_slot_comes_back_from_its_sequence_detached_or_not(cache):
    detached, kept = running(cache), Sequence([1])
    handle = cache.acquire_live_slot()
    kept.linear_state_slot = int(handle.ids[0])
    for sequence in (detached, kept):
        cache.release_live_slot(sequence)
        assert sequence.linear_state_slot is None
        cache.release_live_slot(sequence)  # has none: nothing to do
    assert handle.is_released
    assert cache.num_free_slots == 5
    handle.release()
    cache.check_integrity()


def test_a_live_slot_comes_back_with_its_handle(cache):
    cache.acquire_live_slot().release()
    assert cache.num_free_slots == 5
    cycle = [cache.acquire_live_slot()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert cache.num_free_slots == 5


def test_one_of_several_in_one_handle_comes_back(cache):
    handle = cache.acquire_live_slots(3)
    sequence = Sequence([1])
    sequence.linear_state_slot = 2
    cache.release_live_slot(sequence)
    assert (handle.ids.tolist(), cache.num_live_slots) == ([1, 3], 2)
    handle.release()
    assert cache.num_free_slots == 5


def test_an_adopted_live_slot_comes_back_once(cache):
    sequence = running(cache)
    handle = cache.slots.adopt([sequence.linear_state_slot])
    cache.release_live_slot(sequence)
    handle.release()
    assert cache.num_free_slots == 5


def test_shared_uses_come_back_one_by_one(cache):
    handle = cache.acquire_live_slot()
    other = handle.share()
    sequence = Sequence([1])
    sequence.linear_state_slot = int(handle.detach()[0])
    cache.release_live_slot(sequence)
    assert (cache.num_live_slots, other.is_released) == (1, False)
    sequence.linear_state_slot = int(other.ids[0])
    cache.release_live_slot(sequence)
    assert (cache.num_free_slots, other.is_released) == (5, True)


def test_a_live_slot_is_given_back_once(cache):
    save(cache, b"a")
    sequence = Sequence([1])
    for slot in (0, 1, 2, 6, -1):  # padding, committed, free, outside
        sequence.linear_state_slot = slot
        with pytest.raises(DoubleFreeError, match=f"slot {slot} "):
            cache.release_live_slot(sequence)
        assert sequence.linear_state_slot == slot
    assert cache.num_free_slots == 4


def test_a_dropped_handle_leaves_nothing_to_give_back(cache):
    sequence = Sequence([1])
    sequence.linear_state_slot = int(cache.acquire_live_slot().ids[0])
    with pytest.raises(DoubleFreeError):
        cache.release_live_slot(sequence)


def test_a_slot_that_a_step_still_pins_comes_back_with_the_pin(cache):
    handle = cache.acquire_live_slot()
    step = handle.pin()
    handle.release()
    assert (cache.num_live_slots, cache.num_lingering_slots, cache.num_free_slots) == (0, 1, 4)
    step.release()
    assert cache.num_free_slots == 5


def test_ids_of_checkpoints_cannot_be_freed(cache):
    slot = save(cache, b"a")
    with pytest.raises(DoubleFreeError, match="holds a checkpoint"):
        cache.slots.free(slot)
    assert saved(cache, b"a")


# -- reserve and commit ----------------------------------------------------------------------------


def test_a_pending_checkpoint_cannot_be_matched_and_a_committed_one_can(cache):
    reservation = cache.reserve_checkpoint(b"a")
    assert not reservation.existing
    assert cache.match(b"a") is None
    assert not cache.contains(b"a")
    assert (cache.num_pending, cache.num_checkpoints) == (1, 0)
    slot = cache.commit(reservation)
    assert slot == reservation.slot
    assert cache.match(b"a").ids.tolist() == [slot]
    assert cache.contains(b"a")
    assert (cache.num_pending, cache.num_checkpoints) == (0, 1)
    assert (cache.num_committed_total, cache.num_hits_total) == (1, 1)


def test_a_released_reservation_gives_its_slot_back(cache):
    reservation = cache.reserve_checkpoint(b"a")
    reservation.release()
    reservation.release()
    assert (cache.num_free_slots, cache.num_pending) == (5, 0)
    with pytest.raises(DoubleFreeError):
        cache.commit(reservation)
    assert cache.match(b"a") is None
    assert save(cache, b"a")


def test_a_dropped_reservation_gives_its_slot_back(cache):
    reservation = cache.reserve_checkpoint(b"a")
    cycle = [reservation]
    cycle.append(cycle)
    del reservation, cycle
    gc.collect()
    assert (cache.num_free_slots, cache.num_pending) == (5, 0)
    assert save(cache, b"a")  # the hash is free, too


def test_a_known_hash_takes_no_slot(cache):
    slot = save(cache, b"a")
    before = counters(cache)
    again = cache.reserve_checkpoint(b"a")
    assert (again.existing, again.slot, again.prefix_hash) == (True, slot, b"a")
    assert cache.commit(again) == slot
    assert counters(cache) == before
    again = cache.reserve_checkpoint(b"a")
    again.release()
    assert counters(cache) == before


def test_committing_an_existing_one_makes_it_the_most_recently_used(cache):
    for name in (b"a", b"b"):
        save(cache, name)
    save(cache, b"a")
    cache.acquire_live_slots(4).detach()
    assert saved(cache, b"a", b"b") == [b"a"]


def test_an_existing_one_that_was_reclaimed_is_not_there(cache):
    save(cache, b"a")
    again = cache.reserve_checkpoint(b"a")
    cache.acquire_live_slots(5).detach()
    assert cache.commit(again) == 0


def test_a_pending_hash_is_not_reserved_twice(cache):
    first = cache.reserve_checkpoint(b"a")
    assert cache.reserve_checkpoint(b"a") is None
    assert (cache.num_coalesced_total, cache.num_skipped_total, cache.num_pending) == (1, 0, 1)
    assert cache.commit(first) == first.slot


def test_a_reservation_is_committed_once(cache):
    for _ in range(2):  # the second one finds it existing
        reservation = cache.reserve_checkpoint(b"a")
        cache.commit(reservation)
        before = counters(cache)
        with pytest.raises(DoubleFreeError, match="committed or released before"):
            cache.commit(reservation)
        reservation.release()
        assert counters(cache) == before


def test_a_reservation_is_committed_where_it_was_made(cache):
    reservation = LinearStatePrefixCache(6).reserve_checkpoint(b"a")
    with pytest.raises(ValueError, match="another cache"):
        cache.commit(reservation)


# -- eviction --------------------------------------------------------------------------------------


def test_checkpoints_go_least_recently_used_first(cache):
    for name in (b"a", b"b", b"c", b"d", b"e"):
        save(cache, name)
    cache.match(b"b").release()
    for gone in (b"a", b"c", b"d", b"e", b"b"):
        assert cache.contains(gone)
        cache.acquire_live_slot().detach()
        assert not cache.contains(gone)
    assert cache.num_reclaimed_total == 5


def test_a_match_counts_as_a_use_when_its_pin_goes(cache):
    for name in (b"a", b"b", b"c", b"d", b"e"):
        save(cache, name)
    first, second = pinned(cache, b"a", b"b")
    second.release()
    first.release()
    cache.acquire_live_slots(4).detach()
    assert saved(cache, b"a", b"b") == [b"a"]


def test_a_pinned_checkpoint_stays_until_the_last_pin_goes(cache):
    slot = save(cache, b"a")
    first, second = pinned(cache, b"a", b"a")
    assert cache.num_reclaimable == 0
    first.release()
    assert cache.acquire_live_slots(5) is None
    assert cache.acquire_live_slots(4).detach().tolist()
    assert cache.acquire_live_slot() is None
    assert saved(cache, b"a")
    del second
    assert cache.num_reclaimable == 1
    assert cache.acquire_live_slot().detach().tolist() == [slot]


def test_a_checkpoint_takes_a_checkpoints_place_and_never_a_live_or_pending_slot(cache):
    cache.acquire_live_slots(3).detach()
    pending = cache.reserve_checkpoint(b"p")
    save(cache, b"a")
    assert save(cache, b"b") == 5
    assert saved(cache, b"a", b"b") == [b"b"]
    assert (cache.num_live_slots, cache.num_pending) == (3, 1)
    assert cache.commit(pending) == 4


def test_without_a_slot_the_save_is_skipped_and_counted(cache):
    for name in (b"a", b"b"):
        save(cache, name)
    pins = pinned(cache, b"a", b"b")
    pending = cache.reserve_checkpoint(b"p")
    cache.acquire_live_slots(2).detach()
    assert not cache.was_skipped(b"x")
    assert cache.reserve_checkpoint(b"x") is None
    assert (cache.num_skipped_total, cache.num_coalesced_total) == (1, 0)
    assert cache.was_skipped(b"x")
    assert (saved(cache, b"a", b"b"), cache.num_pending) == ([b"a", b"b"], 1)
    pins.pop().release()
    assert save(cache, b"x")
    assert not cache.was_skipped(b"x")
    pending.release()


def test_few_skipped_hashes_are_remembered():
    cache = LinearStatePrefixCache(2)
    cache.acquire_live_slot().detach()
    names = [bytes([number]) for number in range(100)]
    for name in names:
        assert cache.reserve_checkpoint(name) is None
    assert [name for name in names if cache.was_skipped(name)] == names[-64:]
    cache.clear()
    assert not cache.was_skipped(names[-1])


# -- promote ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
def test_a_final_promotion_needs_no_slot(cache, keep):
    handle, sequence = cache.acquire_live_slot(), Sequence([1])
    slot = sequence.linear_state_slot = int(handle.ids[0] if keep else handle.detach()[0])
    cache.acquire_live_slots(4).detach()
    pin = cache.promote(sequence, b"a", final=True)
    assert pin.ids.tolist() == [slot]
    assert sequence.linear_state_slot is None
    assert handle.is_released
    assert (cache.num_live_slots, cache.num_checkpoints, cache.num_reclaimable) == (4, 1, 0)
    handle.release()
    cache.release_live_slot(sequence)
    pin.release()
    assert (cache.num_reclaimable, cache.num_committed_total, cache.num_hits_total) == (1, 1, 0)
    assert cache.match(b"a").ids.tolist() == [slot]


@pytest.mark.parametrize("keep", [True, False])
def test_a_promotion_that_is_not_final_gives_another_live_slot(cache, keep):
    handle, sequence = cache.acquire_live_slot(), Sequence([1])
    slot = sequence.linear_state_slot = int(handle.ids[0] if keep else handle.detach()[0])
    pin = cache.promote(sequence, b"a")
    fresh = sequence.linear_state_slot
    assert pin.ids.tolist() == [slot] != [fresh]
    assert handle.ids.tolist() == ([fresh] if keep else [])
    assert (cache.num_live_slots, cache.num_checkpoints, cache.num_reclaimable) == (1, 1, 0)
    # The pin keeps the state until it is copied.
    assert cache.acquire_live_slots(3).detach().tolist()
    assert cache.acquire_live_slot() is None
    pin.release()
    assert cache.acquire_live_slot().detach().tolist() == [slot]
    cache.release_live_slot(sequence)
    assert handle.is_released
    assert cache.num_free_slots == 1


def test_a_promotion_may_take_the_least_recently_used_checkpoints_place(cache):
    for name in (b"a", b"b", b"c", b"d"):
        save(cache, name)
    sequence = running(cache)
    cache.promote(sequence, b"e").release()
    assert saved(cache, b"a", b"b", b"c", b"d", b"e") == [b"b", b"c", b"d", b"e"]
    cache.promote(sequence, b"f").release()
    assert saved(cache, b"b", b"c", b"d", b"e", b"f") == [b"c", b"d", b"e", b"f"]


def test_a_promotion_without_another_slot_changes_nothing(cache):
    sequence = running(cache)
    cache.acquire_live_slots(4).detach()
    before = counters(cache)
    slot = sequence.linear_state_slot
    assert cache.promote(sequence, b"a") is None
    assert sequence.linear_state_slot == slot
    assert cache.was_skipped(b"a")
    assert counters(cache) == before | {"num_skipped_total": 1}


@pytest.mark.parametrize("final", [True, False])
def test_promoting_to_a_known_hash_pins_the_one_that_is_there(cache, final):
    known = save(cache, b"a")
    sequence = running(cache)
    live = sequence.linear_state_slot
    pin = cache.promote(sequence, b"a", final=final)
    assert pin.ids.tolist() == [known]
    assert sequence.linear_state_slot == (None if final else live)
    assert cache.num_live_slots == (0 if final else 1)
    assert (cache.num_checkpoints, cache.num_reclaimable, cache.num_committed_total) == (1, 0, 1)
    pin.release()
    assert cache.num_reclaimable == 1


def test_a_promotion_comes_before_a_pending_reservation(cache):
    reservation = cache.reserve_checkpoint(b"a")
    sequence = running(cache)
    live = sequence.linear_state_slot
    pin = cache.promote(sequence, b"a", final=True)
    assert cache.match(b"a").ids.tolist() == [live]
    assert cache.num_pending == 1
    assert cache.commit(reservation) == live
    assert (cache.num_pending, cache.num_checkpoints, cache.num_free_slots) == (0, 1, 4)
    assert pin.ids.tolist() == [live]


def test_a_reservation_is_worth_something_once_the_promoted_one_is_gone(cache):
    reservation = cache.reserve_checkpoint(b"a")
    cache.promote(running(cache), b"a", final=True).release()
    cache.acquire_live_slots(4).detach()
    assert not cache.contains(b"a")
    assert cache.commit(reservation) == reservation.slot
    assert cache.match(b"a").ids.tolist() == [reservation.slot]


def test_steps_in_flight_pin_what_a_live_slot_becomes(cache):
    handle, sequence = cache.acquire_live_slot(), Sequence([1])
    sequence.linear_state_slot = int(handle.ids[0])
    step = handle.pin()
    cache.promote(sequence, b"a", final=True).release()
    assert cache.num_reclaimable == 0
    step.release()
    assert cache.num_reclaimable == 1


def test_only_a_sequences_own_live_slot_is_promoted(cache):
    save(cache, b"a")
    pending = cache.reserve_checkpoint(b"p")
    sequence = Sequence([1])
    before = counters(cache)
    for slot in (None, 0, 1, pending.slot, 3, 6, -1):
        sequence.linear_state_slot = slot
        with pytest.raises(RequestError, match=f"slot {slot},"):
            cache.promote(sequence, b"x", final=True)
        assert sequence.linear_state_slot == slot
    assert counters(cache) == before
    shared = cache.acquire_live_slot()
    other = shared.share()
    sequence.linear_state_slot = int(shared.ids[0])
    with pytest.raises(RequestError, match="2 sequences use"):
        cache.promote(sequence, b"x", final=True)
    other.release()
    cache.promote(sequence, b"x", final=True).release()
    pending.release()


# -- equal hashes ----------------------------------------------------------------------------------

ONE, OTHER = checked(1, 2, 3), checked(1, 2, 4)


def test_equal_hashes_of_different_prefixes_never_match(cache):
    slot = save(cache, b"a", ONE)
    for asked in (OTHER, checked(1, 2), checked(1, 2, 3, tenant="x")):
        before = counters(cache)
        assert not cache.verify(b"a", asked)
        assert counters(cache) == before
        assert cache.match(b"a", prefix=asked) is None
        assert cache.reserve_checkpoint(b"a", prefix=asked) is None
        assert counters(cache) == before | {
            "num_collisions_total": before["num_collisions_total"] + 2
        }
    assert cache.match(b"a", prefix=checked(1, 2, 3)).ids.tolist() == [slot]
    assert cache.verify(b"a", checked(1, 2, 3))
    assert not cache.verify(b"b", ONE)


def test_a_pending_hash_of_another_prefix_is_a_collision(cache):
    reservation = cache.reserve_checkpoint(b"a", prefix=ONE)
    assert cache.reserve_checkpoint(b"a", prefix=OTHER) is None
    assert (cache.num_collisions_total, cache.num_coalesced_total) == (1, 0)
    assert cache.reserve_checkpoint(b"a", prefix=ONE) is None
    assert (cache.num_collisions_total, cache.num_coalesced_total) == (1, 1)
    reservation.release()


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize("final", [True, False])
def test_a_live_slot_is_not_promoted_to_another_prefixs_hash(cache, pending, final):
    reservation = cache.reserve_checkpoint(b"a", prefix=ONE)
    if not pending:
        cache.commit(reservation)
    sequence = running(cache)
    live = sequence.linear_state_slot
    assert cache.promote(sequence, b"a", final=final, prefix=OTHER) is None
    assert cache.num_collisions_total == 1
    assert sequence.linear_state_slot == (None if final else live)
    assert cache.num_live_slots == (0 if final else 1)
    assert cache.num_checkpoints == (0 if pending else 1)
    if not final:
        assert cache.promote(sequence, b"a", prefix=ONE) is not None
    reservation.release()


def test_a_state_saved_without_its_prefix_is_not_believed_by_who_checks(cache):
    save(cache, b"a")
    assert cache.match(b"a", prefix=ONE) is None
    assert cache.match(b"a") is not None
    reservation = cache.reserve_checkpoint(b"b", prefix=ONE)
    cache.promote(running(cache), b"b", final=True)
    assert cache.commit(reservation) == 0
    assert cache.num_collisions_total == 2


# -- clear and retire ------------------------------------------------------------------------------


def test_clear_forgets_the_checkpoints_and_frees_their_slots(cache):
    save(cache, b"a")
    save(cache, b"b")
    assert cache.clear() == 2
    assert saved(cache, b"a", b"b") == []
    assert (cache.num_free_slots, cache.num_checkpoints, cache.clear()) == (5, 0, 0)
    assert cache.num_reclaimed_total == 0
    assert save(cache, b"a")


def test_a_pinned_slot_that_is_forgotten_comes_back_with_its_last_pin(cache):
    save(cache, b"a")
    first, second = pinned(cache, b"a", b"a")
    assert cache.clear() == 1
    assert cache.match(b"a") is None
    assert (cache.num_free_slots, cache.num_lingering_slots) == (4, 1)
    again = save(cache, b"a")
    assert [again] != first.ids.tolist()
    first.release()
    assert cache.num_free_slots == 3
    second.release()
    assert (cache.num_free_slots, cache.num_lingering_slots) == (4, 0)
    assert saved(cache, b"a")


def test_what_was_pending_at_a_clear_is_never_matched(cache):
    old = cache.reserve_checkpoint(b"a")
    assert cache.clear() == 0
    assert cache.num_pending == 1  # somebody may be writing to it
    new = cache.reserve_checkpoint(b"a")
    assert cache.commit(old) == 0
    assert (cache.match(b"a"), cache.num_free_slots, cache.num_pending) == (None, 4, 1)
    assert cache.reserve_checkpoint(b"a") is None  # the new claim is still there
    assert cache.commit(new) == new.slot


def test_an_existing_reservation_does_not_outlive_a_clear(cache):
    save(cache, b"a")
    existing = cache.reserve_checkpoint(b"a")
    cache.clear()
    assert cache.commit(existing) == 0


def test_a_reservation_dropped_after_a_clear_leaves_the_new_claim(cache):
    old = cache.reserve_checkpoint(b"a")
    cache.clear()
    new = cache.reserve_checkpoint(b"a")
    old.release()
    assert cache.num_free_slots == 4
    assert cache.commit(new) == new.slot


def test_live_slots_survive_a_clear(cache):
    sequence = running(cache)
    cache.clear()
    assert cache.num_live_slots == 1
    cache.release_live_slot(sequence)


def test_retired_versions_go_first_now_and_later(cache):
    for version, names in ((1, (b"a", b"b")), (0, (b"c", b"d"))):
        for name in names:
            save(cache, name, checked(1, weights_version=version))
    assert cache.retire(0) == 2
    save(cache, b"e", checked(2, weights_version=0))  # later ones go first, too
    held = cache.match(b"c")
    assert (cache.retire(0), cache.retire(7)) == (2, 0)
    held.release()
    for gone in (b"d", b"e", b"c", b"a", b"b"):
        assert cache.contains(gone)
        cache.acquire_live_slot().detach()
        assert not cache.contains(gone)


def test_a_retired_checkpoint_can_be_matched(cache):
    save(cache, b"a", ONE)
    cache.retire(0)
    assert cache.match(b"a", prefix=ONE) is not None


def test_a_state_saved_without_its_prefix_has_no_version(cache):
    save(cache, b"a")
    assert cache.retire(0) == 0


# -- the audit -------------------------------------------------------------------------------------


def break_hash(cache):
    cache.slots.committed[b"x"] = cache.slots.committed.pop(b"a")


def break_slot(cache):
    cache.slots._checkpoints.clear()


def break_claim(cache):
    cache.slots._reserved.clear()


def break_queue(cache):
    cache.slots._recent.clear()


def break_order(cache):
    cache.slots._retired_versions.add(0)


def break_pin(cache):
    cache.slots._recent[3] = None


def break_handle(cache):
    cache.slots._handles[5] = ()


def break_counts(cache):
    cache.slots._ledger.num_free -= 1


@pytest.mark.parametrize(
    "damage",
    [
        break_hash,
        break_slot,
        break_claim,
        break_queue,
        break_order,
        break_pin,
        break_handle,
        break_counts,
    ],
)
def test_the_audit_finds_damage(damage):
    cache = LinearStatePrefixCache(6)
    save(cache, b"a", ONE)
    pending = cache.reserve_checkpoint(b"p")
    held = [cache.acquire_live_slot()]
    cache.check_integrity()
    damage(cache)
    with pytest.raises(IntegrityError):
        cache.check_integrity()
    assert (pending.slot, len(held)) == (2, 1)
