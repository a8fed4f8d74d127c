"""Checkpoints of recurrent state: reserved, committed, told apart, cleared and retired."""

from __future__ import annotations

import gc

import pytest

from raykv.core import LinearStatePrefixCache
from raykv.errors import DoubleFreeError

from .state_helpers import check_partition, checked, counters, pinned, running, save, saved


@pytest.fixture
def cache():
    """Five slots to hand out."""
    cache = LinearStatePrefixCache(6)
    yield cache
    check_partition(cache)


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


def test_a_hash_can_be_reserved_as_soon_as_its_reservation_is_dropped(cache):
    dropped = cache.reserve_checkpoint(b"a")
    del dropped
    assert cache.reserve_checkpoint(b"a") is not None


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
    again = cache.reserve_checkpoint(b"a")
    del again
    assert counters(cache) == before
    cache.check_integrity()


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


def test_what_was_pending_at_a_clear_is_not_taken_for_what_was_saved_since(cache):
    old = cache.reserve_checkpoint(b"a")
    cache.clear()
    assert save(cache, b"a")
    assert cache.commit(old) == 0
    assert (cache.num_free_slots, cache.num_checkpoints) == (4, 1)


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


# -- reservations that are named when they are committed -------------------------------------------


def test_an_unnamed_reservation_is_named_by_its_commit(cache):
    reservation = cache.reserve_checkpoint(None)
    assert cache.num_pending == 1
    with pytest.raises(ValueError, match="without a name"):
        cache.commit(reservation)
    prefix = checked(1, 2)
    slot = cache.commit(reservation, b"a", prefix=prefix)
    assert slot == reservation.slot
    assert cache.verify(b"a", prefix)
    assert not cache.verify(b"a", checked(1, 3))
    with pytest.raises(DoubleFreeError):
        cache.commit(reservation, b"b")


def test_unnamed_reservations_do_not_coalesce_and_come_back(cache):
    reservations = [cache.reserve_checkpoint(None) for _ in range(5)]
    assert len({one.slot for one in reservations}) == 5
    assert cache.reserve_checkpoint(None) is None
    assert (cache.num_coalesced_total, cache.num_skipped_total) == (0, 1)
    reservations.pop().release()
    assert cache.commit(reservations.pop(), b"a")
    reservations.clear()
    gc.collect()
    assert (cache.num_free_slots, cache.num_checkpoints) == (4, 1)


def test_a_name_that_is_committed_or_pending_meanwhile(cache):
    first, second, pending = cache.reserve_checkpoint(None), cache.reserve_checkpoint(None), None
    slot = cache.commit(first, b"a")
    assert cache.commit(second, b"a") == slot, "one is enough"
    assert cache.num_free_slots == 4
    pending, unnamed = cache.reserve_checkpoint(b"b"), cache.reserve_checkpoint(None)
    slot = cache.commit(unnamed, b"b")
    assert cache.commit(pending) == slot, "whoever is written first stays"
    assert (cache.num_free_slots, cache.num_checkpoints) == (3, 2)


def test_what_was_cleared_gets_no_name_any_more(cache):
    reservation = cache.reserve_checkpoint(None)
    cache.clear()
    assert cache.commit(reservation, b"a") == 0
    assert not cache.contains(b"a")
    assert cache.num_free_slots == 5


# -- speculative ones ------------------------------------------------------------------------------


def speculate(cache, name):
    return cache.commit(cache.reserve_checkpoint(name, is_speculative=True))


def test_speculative_ones_are_reclaimed_first_until_somebody_matches_them(cache):
    save(cache, b"old")
    for name in (b"x", b"y", b"z"):
        speculate(cache, name)
    cache.match(b"x").release()
    running(cache)  # the last free slot
    running(cache)
    assert saved(cache, b"old", b"x", b"y", b"z") == [b"old", b"x", b"z"]
    running(cache)
    running(cache)
    assert saved(cache, b"old", b"x", b"y", b"z") == [b"x"], "now the least recently used"
    check_partition(cache)


def test_a_speculative_one_that_is_asked_for_is_speculative_no_more(cache):
    for name in (b"x", b"y", b"z"):
        speculate(cache, name)
    assert cache.reserve_checkpoint(b"x").existing
    assert cache.reserve_checkpoint(b"y", is_speculative=True).existing
    for _ in range(4):
        running(cache)
    assert saved(cache, b"x", b"y", b"z") == [b"x"]
    check_partition(cache)


def test_a_named_reservation_stays_speculative_under_its_name(cache):
    save(cache, b"old")
    reservation = cache.reserve_checkpoint(b"x", is_speculative=True)
    cache.commit(reservation, b"x")
    for _ in range(4):
        running(cache)
    assert saved(cache, b"old", b"x") == [b"old"]


def test_speculative_ones_are_cleared_and_retired_like_others(cache):
    for version, name in enumerate((b"x", b"y")):
        prefix = checked(1, weights_version=version)
        cache.commit(cache.reserve_checkpoint(name, prefix=prefix, is_speculative=True))
    assert cache.retire(1) == 1
    for _ in range(4):
        running(cache)
    assert saved(cache, b"x", b"y") == [b"x"], "it is the older one, but y is retired"
    assert cache.clear() == 1
    check_partition(cache)
    assert cache.num_free_slots == 1


def test_a_void_reservation_keeps_its_slot_and_leaves_its_prefix_to_others():
    cache = LinearStatePrefixCache(4)
    late = cache.reserve_checkpoint(b"a", prefix=checked(1))
    assert cache.reserve_checkpoint(b"a", prefix=checked(1)) is None, "there is a claim"
    late.void()
    late.void()
    assert (cache.num_pending, cache.num_free_slots) == (1, 2)
    other = cache.reserve_checkpoint(b"a", prefix=checked(1))
    assert other.slot != late.slot
    late.void()
    slot = cache.commit(other)
    assert cache.commit(late) == 0
    assert (cache.num_pending, cache.num_free_slots) == (0, 2)
    [pin] = pinned(cache, b"a")
    assert int(pin.index[0]) == slot
    known = cache.reserve_checkpoint(b"a", prefix=checked(1))
    known.void()
    assert cache.contains(b"a"), "a word of what is there voids nothing"
    check_partition(cache)
