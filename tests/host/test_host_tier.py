"""The host tier's promises, one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from raykv.core import Namespace
from raykv.errors import ConfigError, IntegrityError
from raykv.host.host_tier import HostTier
from raykv.host.tickets import NO_TICKET, LoadOutcome, LoadResult, Offer, StoreResult, Want

from .host_world import World, num_found, prompt, run_of

OK, CORRUPT, STALE = LoadOutcome.OK, LoadOutcome.CORRUPT, LoadOutcome.STALE


# -- storing ---------------------------------------------------------------------------------------


def test_what_one_stored_another_finds(world, one, other):
    assert world.put(one, run_of(1, 2, 3)).ticket.first_block == 0
    assert world.get(other, prompt(1, 2, 3)) == [OK] * 3
    stats = world.tier.stats()
    assert (stats.stored_total, stats.hit, stats.loaded_total) == (3, 3, 3)
    assert (stats.cached, stats.free, stats.pinned, stats.storing) == (3, 5, 0, 0)


def test_only_what_the_host_lacks_is_stored(world, one):
    world.put(one, run_of(1, 2))
    store = world.put(one, run_of(1, 2, 3, 4))
    assert store.ticket.first_block == 2
    assert len(store.names) == 2
    assert world.put(one, run_of(1, 2, 3)).ticket.id == NO_TICKET
    assert world.put(one, run_of(5))
    assert world.tier.stats().stored_total == 5


def test_nothing_is_found_before_it_is_stored(world, one):
    (store,) = world.offer(one, run_of(1, 2, 3))
    world.write(store, 3)
    assert num_found(world, one, 1, 2, 3) == 0
    world.report_stored(one, store)
    assert num_found(world, one, 1, 2, 3) == 3


def test_only_the_leading_blocks_that_were_written_are_found(world, one):
    (store,) = world.offer(one, run_of(1, 2, 3))
    world.write(store, 1)
    world.report_stored(one, store)
    assert num_found(world, one, 1, 2, 3) == 1
    stats = world.tier.stats()
    assert (stats.cached, stats.free) == (1, 7)


def test_a_cancelled_store_leaves_nothing(world, one):
    (store,) = world.offer(one, run_of(1, 2, 3))
    world.report_stored(one, store)
    assert world.tier.stats().free == 8
    assert num_found(world, one, 1) == 0


def test_offers_of_one_prefix_are_stored_once(world, one, other):
    first, second, third = world.offer(one, run_of(1, 2), run_of(1, 2), run_of(1, 2, 3))
    (late,) = world.offer(other, run_of(1, 2, 3, 4))
    assert [len(s.names) for s in (first, second, third, late)] == [2, 0, 1, 1]
    assert late.ticket.first_block == 3
    for process, store in ((other, late), (one, third), (one, first)):  # the last blocks first
        assert num_found(world, one, 1, 2, 3, 4) == 0
        world.write(store, 2)
        world.report_stored(process, store)
    assert num_found(world, one, 1, 2, 3, 4) == 4


def test_a_store_whose_ancestors_fail_is_an_orphan(world, one, other):
    (first,) = world.offer(one, run_of(1, 2))
    (second,) = world.offer(other, run_of(1, 2, 3))
    world.write(second, 1)
    world.write(first, 1)
    world.report_stored(one, first)
    world.report_stored(other, second)
    assert num_found(world, one, 1, 2, 3) == 1
    stats = world.tier.stats()
    assert (stats.orphaned, stats.stored_total, stats.free) == (1, 1, 7)
    world.put(one, run_of(1, 2, 3))
    assert num_found(world, one, 1, 2, 3) == 3


def test_memory_that_is_short_gives_a_part(world, one):
    stores = world.offer(one, run_of(*range(6)), run_of(*range(10, 16)))
    assert [len(store.names) for store in stores] == [6, 2]
    assert world.tier.stats().refused == 4
    (none,) = world.offer(one, run_of(20))
    assert none.ticket.id == NO_TICKET
    assert world.tier.stats().refused == 5


def test_what_is_not_pinned_is_evicted(world, one):
    world.put(one, run_of(*range(8)))
    world.put(one, run_of(*range(10, 13)))
    assert num_found(world, one, *range(10, 13)) == 3
    assert num_found(world, one, *range(8)) == 5  # from its end
    assert world.tier.stats().evicted == 3


def test_what_is_read_is_not_evicted(world, one):
    world.put(one, run_of(*range(8)))
    load = world.find(one, prompt(0, 1, 2))
    assert len(world.put(one, run_of(*range(10, 18))).names) == 5
    world.copy(load)
    assert world.outcomes(load) == [OK] * 3
    world.report_loaded(one, load, [OK] * 3)
    assert len(world.put(one, run_of(*range(20, 28))).names) == 8


def test_what_an_offer_builds_on_is_not_evicted_for_another_of_the_call():
    world = World(9, 2)
    one = world.start()
    world.put(one, run_of(1, 2, 3, 4))  # the least recently used
    world.put(one, run_of(5, 6, 7, 8))
    greedy, builds = world.offer(one, run_of(*range(20, 24)), run_of(1, 2, 3, 4, 9))
    assert len(greedy.names) == 4
    assert builds.ticket.first_block == 4
    assert num_found(world, one, 1, 2, 3, 4) == 4
    assert num_found(world, one, 5, 6, 7, 8) == 0
    world.drain()


def test_ancestors_stay_while_a_store_is_under_way(world, one):
    world.put(one, run_of(1, 2))
    (store,) = world.offer(one, run_of(1, 2, 3))
    world.put(one, run_of(*range(10, 18)))
    world.write(store)
    world.report_stored(one, store)
    assert num_found(world, one, 1, 2, 3) == 3


def test_a_block_has_another_generation_each_time_it_is_given(world, one):
    seen = {}
    for mark in range(0, 40, 4):
        store = world.put(one, run_of(*range(mark, mark + 4)))
        for block_id, generation in zip(
            store.ticket.host_ids.tolist(), store.ticket.generations.tolist(), strict=True
        ):
            assert generation == seen.get(block_id, 0) + 1
            seen[block_id] = generation
    assert max(seen.values()) > 1


# -- loading ---------------------------------------------------------------------------------------


def test_only_what_lies_beyond_the_device_is_given(world, one):
    world.put(one, run_of(1, 2, 3))
    load = world.find(one, prompt(1, 2, 3), num_device_blocks=2)
    assert (load.ticket.first_block, len(load.names)) == (2, 1)
    for num_device_blocks in (3, 4):
        assert world.find(one, prompt(1, 2, 3), num_device_blocks).ticket.id == NO_TICKET


def test_a_token_is_left_to_compute(world, one):
    world.put(one, run_of(1, 2, 3))
    assert len(world.get(one, run_of(1, 2, 3))) == 2
    assert len(world.get(one, prompt(1, 2, 3))) == 3
    assert world.get(one, []) == []


def test_a_find_refreshes():
    world = World(5, 2)
    one = world.start()
    world.put(one, run_of(1, 2))
    world.put(one, run_of(3, 4))
    assert num_found(world, one, 1, 2, num_device_blocks=2) == 0  # nothing to load, and yet
    world.put(one, run_of(5, 6))
    assert num_found(world, one, 1, 2) == 2
    assert num_found(world, one, 3, 4) == 0
    world.drain()


def test_what_is_ready_is_counted_without_being_used():
    world = World(5, 2)
    one = world.start()
    world.put(one, run_of(1, 2))
    world.put(one, run_of(3))
    (store,) = world.offer(one, run_of(1, 2, 4))
    count = world.tier.num_ready
    assert [count(run_of(1, 2, 4)), count([*run_of(1), 2]), count(run_of(4)), count([])] == [
        2, 1, 0, 0,
    ]  # fmt: skip
    assert count(run_of(1, 2), Namespace(tenant="a")) == 0
    world.write(store)
    world.report_stored(one, store)
    assert count(run_of(1, 2, 4)) == 3
    world.get(one, prompt(3))
    before = world.tier.stats()
    assert count(run_of(1, 2, 4)) == 3
    assert world.tier.stats() == before
    world.put(one, run_of(5))
    assert (count(run_of(1, 2, 4)), count(run_of(3))) == (2, 1)  # it was not used by being counted
    world.drain()


def test_namespaces_do_not_mix(world, one):
    world.put(one, run_of(1, 2), namespace=Namespace(tenant="a"))
    assert num_found(world, one, 1, 2) == 0
    assert num_found(world, one, 1, 2, namespace=Namespace(tenant="a")) == 2


def test_a_corrupt_block_goes_with_all_that_depends_on_it(world, one, other):
    ids = world.put(one, run_of(1, 2, 3)).ticket.host_ids.tolist()
    world.put(one, run_of(1, 2, 4))
    reader = world.find(other, prompt(1, 2, 3))
    world.damage(ids[1])
    assert world.get(one, prompt(1, 2, 4)) == [OK, CORRUPT, OK]
    assert num_found(world, one, 1, 2, 3) == 1
    assert num_found(world, one, 1, 2, 4) == 1
    stats = world.tier.stats()
    assert (stats.corrupt, stats.quarantined, stats.cached) == (1, 1, 1)
    world.copy(reader)  # a second one that finds the same
    world.report_loaded(other, reader, world.outcomes(reader))
    assert world.tier.stats().corrupt == 1


def test_a_corrupt_block_is_handed_out_again_only_on_request(world, one):
    (bad,) = world.put(one, run_of(1)).ticket.host_ids.tolist()
    world.damage(bad)
    assert world.get(one, prompt(1)) == [CORRUPT]
    store = world.put(one, run_of(*range(10, 18)))
    assert len(store.names) == 7
    assert bad not in store.ticket.host_ids
    assert world.tier.release_quarantine([bad, 77]) == 1
    assert world.tier.release_quarantine() == 0
    assert world.put(one, run_of(20)).ticket.host_ids.tolist() == [bad]


def test_stale_blocks_are_counted(world, one):
    world.put(one, run_of(1, 2))
    load = world.find(one, prompt(1, 2))
    world.report_loaded(one, load, [OK, STALE])
    stats = world.tier.stats()
    assert (stats.loaded_total, stats.stale, stats.corrupt) == (1, 1, 0)


# -- the rest --------------------------------------------------------------------------------------


def test_a_reset_forgets_what_is_being_stored_too(world, one):
    world.put(one, run_of(1))
    (store,) = world.offer(one, run_of(1, 2, 3))
    load = world.find(one, prompt(1))
    assert world.tier.reset() == 3
    world.write(store, 2)
    world.report_stored(one, store)
    world.copy(load)
    assert world.outcomes(load) == [OK]
    world.report_loaded(one, load, [OK])
    assert num_found(world, one, 1, 2) == 0
    assert world.tier.stats().free == 8


def test_retired_weights_go_first(world, one):
    world.put(one, run_of(1, 2, 3, 4), namespace=Namespace(weights_version=1))
    world.put(one, run_of(5, 6, 7, 8), namespace=Namespace(weights_version=2))
    world.get(one, prompt(1, 2, 3, 4), namespace=Namespace(weights_version=1))
    assert world.tier.retire(1) == 4
    world.put(one, run_of(*range(10, 14)), namespace=Namespace(weights_version=2))
    assert num_found(world, one, 5, 6, 7, 8, namespace=Namespace(weights_version=2)) == 4


def test_a_refused_call_changes_nothing(world, one):
    world.put(one, run_of(1, 2))
    (store,) = world.offer(one, run_of(3, 4))
    load = world.find(one, prompt(1, 2))
    before = world.tier.stats()
    tier, who, space = world.tier, one.client_id, Namespace()
    good = Offer(np.zeros(4, np.int32), space, 2)
    with pytest.raises(ValueError, match="has 1 full blocks of 2, but says that 2"):
        tier.offer(who, [good, Offer(np.zeros(3, np.int32), space, 2)])
    with pytest.raises(ValueError, match="-1 blocks"):
        tier.find(who, [Want(np.array(prompt(1, 2)), space, 0), Want(np.zeros(3), space, -1)])
    with pytest.raises(ValueError, match="is of 2 blocks, but 3"):
        tier.stored(who, [StoreResult(store.ticket.id, 3, None)])
    with pytest.raises(ValueError, match="reports 2 blocks, but 1 checksums"):
        tier.stored(who, [StoreResult(store.ticket.id, 2, np.ones(1, np.uint64))])
    with pytest.raises(ValueError, match=r"is of 2 blocks, but outcomes of shape \(1,\)"):
        tier.loaded(who, [LoadResult(load.ticket.id, np.zeros(1, np.uint8))])
    assert tier.stats() == before


def test_unknown_reports_are_counted(world, one):
    world.tier.stored(one.client_id, [StoreResult(77, 1, None)])
    world.tier.loaded("nobody", [LoadResult(78, np.zeros(3, np.uint8))])
    assert world.tier.stats().expired == 2


@pytest.mark.parametrize(
    "generations", [np.zeros(8, np.uint64), np.zeros(9, np.int64), np.zeros((9, 1), np.uint64)]
)
def test_generations_must_fit(generations):
    with pytest.raises(ConfigError, match="uint64 of shape"):
        HostTier(9, 2, generations, lease_s=1.0)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda tier: tier.manager.allocate(1).share().detach(),
        lambda tier: tier.blocks.ready.__setitem__(1, False),
        lambda tier: tier.blocks.corrupt.setdefault(1, tier.manager.pin(np.array([1]))),
        lambda tier: next(iter(tier.clients)).stores.clear(),
        lambda tier: tier.blocks.generations.__setitem__(1, 0),
    ],
)
def test_the_audit_notices(break_it):
    world = World(9, 2)
    one = world.start()
    world.put(one, run_of(1))
    kept = world.offer(one, run_of(2))
    world.tier.check_integrity()
    break_it(world.tier)
    with pytest.raises(IntegrityError):
        world.tier.check_integrity()
    assert kept
