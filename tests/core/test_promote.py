"""A live slot that becomes a checkpoint, without a copy."""

from __future__ import annotations

import pytest

from raykv.core import LinearStatePrefixCache, Sequence
from raykv.errors import RequestError

from .state_helpers import check_partition, checked, counters, running, save, saved


@pytest.fixture
def cache():
    """Five slots to hand out."""
    cache = LinearStatePrefixCache(6)
    yield cache
    check_partition(cache)


ONE, OTHER = checked(1, 2, 3), checked(1, 2, 4)


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


def test_a_slot_whose_handle_was_dropped_is_not_promoted(cache):
    sequence = Sequence([1])
    sequence.linear_state_slot = int(cache.acquire_live_slot().ids[0])
    with pytest.raises(RequestError, match="0 sequences use"):
        cache.promote(sequence, b"a", final=True)


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
