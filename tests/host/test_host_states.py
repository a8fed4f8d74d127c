"""Checkpoints of recurrent state on the host: stored, found, corrupt, left behind."""

from __future__ import annotations

import numpy as np
import pytest

from raykv.core import Namespace
from raykv.errors import ConfigError
from raykv.host.host_states import HostStates
from raykv.host.state_tickets import StateOffer
from raykv.host.tickets import LoadOutcome

from .host_state_world import SPACE, StatesWorld

OK, STALE, CORRUPT = LoadOutcome.OK, LoadOutcome.STALE, LoadOutcome.CORRUPT


def text(num_tokens, first=0):
    return list(range(first, first + num_tokens))


@pytest.fixture
def world():
    """Five slots to hand out, two tokens per block."""
    world = StatesWorld(6)
    yield world
    world.check()
    world.drain()


@pytest.fixture
def one(world):
    return world.start()


@pytest.fixture
def other(world):
    return world.start()


def test_what_one_stored_another_finds(world, one, other):
    assert [store.ticket.num_tokens for store in world.put(one, text(8), 8, 4)] == [8, 4]
    assert world.get(other, text(20)) == (8, OK)
    assert world.get(other, [*text(6), 99, 99, 99]) == (4, OK)
    assert world.get(other, text(3)) is None
    assert world.get(other, text(20, first=1)) is None
    stats = world.books.stats()
    assert (stats.stored_total, stats.hit, stats.loaded_total, stats.cached) == (2, 2, 2, 2)


def test_the_deepest_within_the_limits_is_found(world, one):
    world.put(one, text(12), 10, 8, 6, 4)
    found = [
        world.get(one, text(12), **limits)
        for limits in (
            {"max_tokens": 9},
            {"max_tokens": 8},
            {"min_tokens": 8},
            {"min_tokens": 8, "max_tokens": 9},
            {"step_tokens": 4},
            {"max_tokens": 100},
            {"max_tokens": 3},
        )
    ]
    assert found == [(8, OK), (8, OK), (10, OK), None, (8, OK), (10, OK), None]


def test_a_token_is_left_to_compute(world, one):
    world.put(one, text(8), 8, 6)
    assert world.get(one, text(8)) == (6, OK)
    assert world.get(one, text(8), max_tokens=8) == (8, OK), "unless the caller says otherwise"
    assert world.get(one, []) is None


def test_nothing_is_found_before_it_is_stored(world, one, other):
    [store] = world.offer(one, text(4), 4)
    assert world.get(other, text(5)) is None
    assert world.offer(other, text(4), 4) == [], "somebody is storing it"
    world.write(store)
    assert world.get(other, text(5)) is None
    world.report_stored(one, store)
    assert world.get(other, text(5)) == (4, OK)
    assert world.offer(other, text(4), 4) == [], "it is there"


def test_a_store_that_failed_leaves_nothing(world, one):
    [store] = world.offer(one, text(4), 4)
    world.report_stored(one, store)
    assert world.get(one, text(5)) is None
    assert world.books.stats().free == 5
    assert len(world.put(one, text(4), 4)) == 1


def test_namespaces_are_told_apart(world, one):
    version = Namespace(weights_version=1)
    world.put(one, text(4), 4)
    assert world.get(one, text(5), version) is None
    world.put(one, text(4), 4, namespace=version)
    assert world.get(one, text(5), version) == (4, OK)


def test_equal_names_of_different_prefixes_never_match(world, one, monkeypatch):
    monkeypatch.setattr(
        type(world.books._hasher), "names", lambda _, row, **__: [b"x" * 16] * (len(row) // 2)
    )
    world.put(one, text(2), 2)
    assert world.get(one, text(3)) == (2, OK)
    assert world.get(one, text(3, first=5)) is None
    assert world.offer(one, text(2, first=5), 2) == []
    assert world.books.cache.num_collisions_total == 2


def test_the_least_recently_used_makes_room_and_what_is_offered_again_counts_as_used(world, one):
    for first in (0, 100, 200, 300, 400):
        world.put(one, text(2, first), 2)
    world.get(one, text(3, 0))
    world.offer(one, text(2, 100), 2)
    world.put(one, text(2, 500), 2)
    found = [world.get(one, text(3, first)) is not None for first in (0, 100, 200, 300, 400, 500)]
    assert found == [True, True, False, True, True, True]
    assert world.books.stats().evicted == 1


def test_what_is_read_or_written_makes_no_room(world, one):
    world.put(one, text(8), 8, 6)
    loads = [world.find(one, text(20), max_tokens=end) for end in (8, 6)]
    stores = world.offer(one, text(20, 100), 20, 18, 16, 14)
    assert [store.ticket.num_tokens for store in stores] == [20, 18, 16], "the first come first"
    assert world.books.stats().refused == 1
    for load in loads:
        assert world.outcome(load) == OK


def test_a_slot_has_another_generation_each_time_it_is_given(world, one):
    slots = {}
    for round_ in range(4):
        for store in world.put(one, text(8, 100 * round_), 8, 6):
            slots.setdefault(store.ticket.host_slot, []).append(store.ticket.generation)
    assert all(seen == list(range(1, 1 + len(seen))) for seen in slots.values())
    assert max(map(len, slots.values())) == 2


def test_a_corrupt_checkpoint_is_never_found_again_and_its_slot_waits(world, one, other):
    [store] = world.put(one, text(4), 4)
    also = world.find(other, text(5))
    world.damage(store.ticket.host_slot)
    assert world.get(one, text(5)) == (4, CORRUPT)
    assert world.get(one, text(5)) is None
    world.report_loaded(other, also, CORRUPT)
    stats = world.books.stats()
    assert (stats.corrupt, stats.quarantined, stats.free) == (1, 1, 4)
    [again] = world.put(one, text(4), 4)
    assert again.ticket.host_slot != store.ticket.host_slot
    assert world.get(one, text(5)) == (4, OK)
    assert world.books.release_quarantine([store.ticket.host_slot, 0]) == 1
    assert world.books.stats().free == 4


def test_a_silent_writer_may_still_write_and_others_store_the_same_elsewhere(world, one, other):
    [store] = world.offer(one, text(4), 4)
    world.end(one)
    assert world.books.stats().quarantined == 1
    [again] = world.put(other, text(4), 4)
    world.write(store)  # the zombie
    assert world.get(other, text(5)) == (4, OK)
    assert len(world.put(other, text(20, 100), *range(20, 8, -2))) == 4, "the slot goes to nobody"
    assert world.kill(one) == 1
    assert world.books.stats().quarantined == 0
    assert again.ticket.host_slot != store.ticket.host_slot


def test_a_late_report_publishes_nothing_and_ends_the_quarantine(world, one, other):
    [store] = world.offer(one, text(4), 4)
    world.write(store)
    world.end(one)
    world.books.stored(other.client_id, [(store.ticket.id, True, None)])
    assert world.books.stats().quarantined == 1, "it is not the other's to report"
    world.report_stored(one, store)
    stats = world.books.stats()
    assert (stats.expired, stats.quarantined, stats.free, stats.stored_total) == (2, 0, 5, 0)
    assert world.get(other, text(5)) is None


def test_a_silent_reader_holds_nothing_and_sees_that_its_slot_went(world, one, other):
    world.put(one, text(4), 4)
    load = world.find(one, text(5))
    world.copy(load)
    world.end(one)
    assert world.outcome(load) == OK, "nobody has taken it yet"
    world.put(other, text(20, 100), 20, 18, 16, 14, 12)
    assert world.outcome(load) == STALE
    world.report_loaded(one, load, OK)
    assert world.books.stats().expired == 1


def test_ending_one_twice_keeps_what_it_left(world, one):
    stores = world.offer(one, text(4), 4)
    world.end(one)
    stores += world.offer(one, text(4), 4)
    world.end(one)
    world.end(one)
    assert world.books.stats().quarantined == 2
    assert world.kill(one) == 2


def test_a_reset_forgets_what_is_stored_and_what_is_being_stored(world, one):
    world.put(one, text(8), 8)
    load = world.find(one, text(9))
    [store] = world.offer(one, text(6), 6)
    assert world.books.reset() == 1
    world.write(store)
    world.report_stored(one, store)
    assert world.get(one, text(9)) is None
    assert world.outcome(load) == OK, "who reads it reads on"
    stats = world.books.stats()
    assert (stats.orphaned, stats.cached, stats.pinned) == (1, 0, 1)


def test_retired_versions_go_first(world, one):
    version = Namespace(weights_version=1)
    world.put(one, text(2), 2, namespace=version)
    world.put(one, text(2, 100), 2)
    world.get(one, text(3), version)
    assert world.books.retire(1) == 1
    world.put(one, text(8, 200), 8, 6, 4, 2)
    assert world.get(one, text(3), version) is None
    assert world.get(one, text(3, 100)) == (2, OK)


@pytest.mark.parametrize("boundary", [0, -2, 3, 10])
def test_only_ends_of_full_blocks_are_taken(world, one, boundary):
    offer = StateOffer(np.arange(8, dtype=np.int32), SPACE, (8, boundary))
    with pytest.raises(ValueError, match=f"after {boundary} of 8 tokens"):
        world.books.offer(one.client_id, [offer, offer])
    assert world.books.stats().free == 5


@pytest.mark.parametrize("generations", [np.zeros(5, np.uint64), np.zeros(6, np.int64)])
def test_generations_must_fit(generations):
    with pytest.raises(ConfigError, match="one per host slot"):
        HostStates(6, 2, generations)
