"""Slots of recurrent state: who gets them, who gives them back, and which goes first."""

from __future__ import annotations

import gc

import pytest

from raykv.core import LinearStatePrefixCache, Sequence
from raykv.errors import ConfigError, DoubleFreeError, IntegrityError

from .state_helpers import check_partition, checked, counters, pinned, running, save, saved


@pytest.fixture
def cache():
    """Five slots to hand out."""
    cache = LinearStatePrefixCache(6)
    yield cache
    check_partition(cache)


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
    assert cache.reserve_checkpoint(names[-64]) is None  # once more: it is the newest now
    assert cache.reserve_checkpoint(b"new") is None
    assert [cache.was_skipped(name) for name in names[-64:-62]] == [True, False]
    cache.clear()
    assert not cache.was_skipped(b"new")


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
    save(cache, b"a", checked(1))
    pending = cache.reserve_checkpoint(b"p")
    held = [cache.acquire_live_slot()]
    cache.check_integrity()
    damage(cache)
    with pytest.raises(IntegrityError):
        cache.check_integrity()
    assert (pending.slot, len(held)) == (2, 1)


@pytest.mark.parametrize("is_speculative", [False, True])
def test_a_forgotten_checkpoint_is_never_matched_and_its_slot_comes_back_with_its_pin(
    cache, is_speculative
):
    slots = cache.slots
    for name in (b"a", b"b", b"c"):
        cache.commit(cache.reserve_checkpoint(name, is_speculative=is_speculative))
    assert slots.is_unproven(slots.committed[b"b"]) == is_speculative
    [pin] = pinned(cache, b"b")
    assert not slots.is_unproven(slots.committed[b"b"])
    for name in (b"a", b"b"):
        slots.forget(slots.committed[name])
        check_partition(cache)
    assert saved(cache, b"a", b"b", b"c") == [b"c"]
    assert (cache.num_free_slots, cache.num_lingering_slots) == (3, 1)
    again = cache.reserve_checkpoint(b"b")
    assert again.slot != int(pin.index[0])
    pin.release()
    assert (cache.num_free_slots, cache.num_lingering_slots) == (3, 0)
