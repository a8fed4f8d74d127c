"""Clients of a host tier that fall silent, die, leave and come back."""

from __future__ import annotations

import pytest

from raykv.errors import RankUnavailableError, RequestError
from raykv.host.tickets import NO_TICKET, LoadOutcome, StoreResult

from .host_world import LEASE_S, num_found, prompt, run_of

OK, STALE = LoadOutcome.OK, LoadOutcome.STALE


def test_a_silent_writers_blocks_are_quarantined_until_it_is_dead(world, one, other):
    (store,) = world.offer(one, run_of(1, 2, 3))
    assert world.pass_time(LEASE_S, [other]) == []
    assert world.pass_time(1, [other]) == [(one.client_id, one.pid)]
    assert world.tier.stats().quarantined == 3
    later = world.put(other, run_of(*range(10, 18)))
    assert len(later.names) == 5
    world.scribble(store)  # the zombie writes
    assert world.get(other, prompt(*range(10, 15))) == [OK] * 5
    assert world.tier.confirmed_dead(one.client_id) == 3
    world.kill(one)
    assert len(world.put(other, run_of(*range(20, 28))).names) == 8


def test_a_silent_reader_holds_nothing_and_sees_that_its_blocks_went(world, one, other):
    world.put(one, run_of(1, 2))
    load = world.find(one, prompt(1, 2))
    world.copy(load)
    world.pass_time(LEASE_S + 1, [other])
    assert world.tier.stats().pinned == 0
    assert world.outcomes(load) == [OK, OK]  # nobody has taken them yet
    world.put(other, run_of(*range(10, 18)))
    assert world.outcomes(load) == [STALE, STALE]
    world.report_loaded(one, load, [OK, OK])
    stats = world.tier.stats()
    assert (stats.expired, stats.loaded_total) == (1, 0)


def test_what_a_silent_writer_was_storing_can_be_stored_by_another(world, one, other):
    world.put(one, run_of(1))
    (store,) = world.offer(one, run_of(1, 2, 3))
    assert world.put(other, run_of(1, 2, 3)).ticket.id == NO_TICKET
    world.pass_time(LEASE_S + 1, [other])
    assert len(world.put(other, run_of(1, 2, 3)).names) == 2
    world.scribble(store)
    assert world.get(other, prompt(1, 2, 3)) == [OK] * 3


def test_a_late_report_publishes_nothing_and_ends_the_quarantine(world, one, other):
    (store,) = world.offer(one, run_of(1, 2))
    world.write(store, 2)
    world.pass_time(LEASE_S + 1, [other])
    world.report_stored(one, store)
    stats = world.tier.stats()
    assert (stats.expired, stats.quarantined, stats.stored_total, stats.free) == (1, 0, 0, 8)
    assert num_found(world, other, 1) == 0


def test_another_client_cannot_report_a_ticket(world, one, other):
    (store,) = world.offer(one, run_of(1, 2))
    world.tier.stored(other.client_id, [StoreResult(store.ticket.id, 2, None)])
    world.pass_time(LEASE_S + 1, [other])
    world.tier.stored(other.client_id, [StoreResult(store.ticket.id, 2, None)])
    stats = world.tier.stats()
    assert (stats.expired, stats.stored_total, stats.quarantined) == (2, 0, 2)


def test_who_leaves_in_the_middle_of_a_store_is_not_trusted(world, one):
    world.offer(one, run_of(1, 2))
    world.tier.leave(one.client_id)
    one.lose_lease()
    assert world.tier.stats().quarantined == 2
    assert not world.tier.renew(one.client_id, world.now_s)
    assert world.tier.unmapped(one.client_id) == 2
    assert world.tier.stats().free == 8
    world.tier.leave(one.client_id)
    one.stale_stores.clear()
    world.tier.join(one.client_id, one.pid, world.now_s)  # mapped anew


def test_a_name_belongs_to_one_process(world, one):
    world.tier.join(one.client_id, one.pid, world.now_s)
    with pytest.raises(RequestError, match="may still write"):
        world.tier.join(one.client_id, 7, world.now_s)
    (store,) = world.offer(one, run_of(1))
    world.pass_time(LEASE_S + 1, [])
    with pytest.raises(RequestError, match="may still write"):
        world.tier.join(one.client_id, 7, world.now_s)
    world.tier.join(one.client_id, one.pid, world.now_s)  # it woke up
    assert world.tier.stats().quarantined == 1
    world.report_stored(one, store)
    assert world.tier.stats().quarantined == 0


def test_who_has_no_lease_is_refused(world, one):
    world.pass_time(LEASE_S + 1, [])
    with pytest.raises(RankUnavailableError, match="join again"):
        world.offer(one, run_of(1))
    with pytest.raises(RankUnavailableError, match="join again"):
        world.find(one, run_of(1))


def test_a_renewed_lease_goes_on(world, one):
    (store,) = world.offer(one, run_of(1))
    for _ in range(5):
        assert world.pass_time(LEASE_S, [one]) == []
    world.write(store)
    world.report_stored(one, store)
    assert num_found(world, one, 1) == 1
