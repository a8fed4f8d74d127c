"""A tier that dies, forgets a rank or loses a word: the rank joins again, and nothing is left."""

from __future__ import annotations

import random

import pytest

from raykv.errors import RankUnavailableError
from raykv.testing_tiers import FaultyTier, TierFaults
from raykv.tiering import link as tier_link

from .copy_gates import Gate
from .tier_world import WAIT_S, Clock, World, make_config, wait_until


def test_a_tier_that_dies_is_a_miss_and_the_rank_joins_the_next(world):
    world.store(range(9))
    world.tier.kill()
    assert world.live(range(9)) == 0
    assert world.link.num_lost == 1
    assert "killed" in world.link.last_error
    sequence = world.admit(range(50, 59))
    assert not sequence.is_loading
    assert world.pool.explain(sequence).reason == "host_unavailable"
    world.write(sequence)
    world.pool.deallocate(sequence)
    world.tier.restart()
    world.rejoin()
    assert world.live(range(100, 109)) == 0
    world.forget_device()
    assert world.live(range(100, 109)) == 8
    assert world.live(range(9)) == 0, "the tier before had that"


@pytest.mark.parametrize("direction", ["load", "offload"])
def test_a_copy_under_way_outlives_its_tier(make_world, direction):
    gate = Gate(direction)
    world = make_world(copy_faults=gate, num_blocks=20)
    world.store(range(9))
    gate.close()
    seen = gate.num_seen
    if direction == "load":
        sequence = world.admit(range(9))
    else:
        world.live(range(50, 59))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen > seen)
    world.tier.kill()
    other = world.admit(range(70, 75))  # hears that the tier is dead
    assert not world.link.is_up
    world.tier.restart()
    world.pool.transfer_blocks()
    assert not world.link.is_up, "what is copied belongs to the memory of before"
    gate.open()
    if direction == "load":
        world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
        assert sequence.kv_state.num_computed_tokens == 8, "the memory is there all the same"
        world.check(sequence)
    world.rejoin()
    world.check(other)
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [0]


def test_a_rank_whose_lease_ran_out_joins_again(make_world):
    clock = Clock()
    world = make_world(clock=clock, host={"lease_s": 1000.0})
    world.store(range(9))
    clock.now += 1001
    world.books.expire(clock.now)
    assert world.live(range(50, 59)) == 0
    world.rejoin()
    assert world.live(range(9)) == 8


def test_what_a_silent_rank_may_still_write_is_quarantined_until_it_is_done(make_world):
    gate = Gate("offload", is_open=False)
    world = make_world(copy_faults=gate)
    world.live(range(9))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    world.books.expire(float("inf"))
    stats = world.tier.host.stats()
    assert (stats.quarantined, stats.storing, stats.free) == (4, 0, 32 - 4)
    world.live(range(50, 53))
    rejoined = world.link.is_up
    assert not rejoined
    assert world.tier.host.stats().quarantined == 4
    gate.open()
    world.rejoin()
    stats = world.tier.host.stats()
    assert (stats.quarantined, stats.cached) == (0, 0)


def test_a_load_that_goes_on_without_lease_is_stale_where_its_source_was_given_away(make_world):
    gate = Gate("load", is_open=False)
    world = make_world(copy_faults=gate, host={"num_blocks": 5}, num_blocks=20)
    world.store(range(9))
    sequence = world.admit(range(9))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    world.books.expire(float("inf"))
    other = World("local", tier=world.tier)
    other.live(range(100, 109))
    other.settle()
    assert world.tier.host.stats().evicted == 4
    world.tier.copy_faults = None
    gate.open()
    report = world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert report.missed == {sequence.seq_id: "host_stale"}
    assert sequence.kv_state.num_computed_tokens == 0
    for rank in other.pool.ranks:
        rank.close()


def test_lost_words_cost_hits_and_leave_nothing(make_world, monkeypatch):
    monkeypatch.setattr(tier_link, "_JOIN_AGAIN_S", 0.0)
    world = make_world()
    faults = TierFaults(random.Random(3), lost_call=0.2, lost_reply=0.2)
    world.tier.faults = faults
    for index in range(60):
        world.rejoin()
        world.live(range(10 * index % 70, 10 * index % 70 + 9))
    assert min(faults.counts["lost_call"], faults.counts["lost_reply"]) > 5
    world.tier.faults = None
    world.rejoin()


def test_a_name_that_was_lost_is_cleared_when_the_rank_is_back(make_world):
    """Though word that nothing is written under it got lost."""
    gate = Gate("offload", is_open=False)
    world = make_world(copy_faults=gate)
    world.live(range(9))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    world.tier.faults = TierFaults(random.Random(0), lost_call=1.0)
    world.admit(range(50, 55))
    assert not world.link.is_up
    gate.open()
    wait_until(lambda: world.link._joining is None and world.link._join_s > world.link._sent_s)
    world.pool.transfer_blocks()
    assert world.tier.host.stats().storing == 4
    world.tier.faults = None
    world.rejoin()
    stats = world.tier.host.stats()
    assert (stats.storing, stats.quarantined) == (0, 0)


def test_a_tier_that_is_not_there_is_told():
    config = make_config()
    tier = FaultyTier(config)
    tier.kill()
    with pytest.raises(RankUnavailableError, match="killed"):
        World("local", tier=tier)


def test_a_closed_pool_leaves_no_client(make_world):
    world = make_world()
    world.store(range(9))
    other = World("local", tier=world.tier)
    other.live(range(50, 55))
    assert len(list(world.books.clients)) == 2
    for rank in other.pool.ranks:
        rank.close()
    assert len(list(world.books.clients)) == 1
    assert world.books.clients.remains == {}


def test_closing_in_the_middle_of_a_copy_gives_everything_back(make_world):
    gate = Gate("load", is_open=False)
    world = make_world(copy_faults=gate)
    world.store(range(9))
    sequence = world.admit(range(9))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    gate.open()
    world.kv_of().close_tier()
    loaded = world.kv_of()._rows.sequences[sequence.single_block_id]
    assert not loaded.is_loading
    assert world.books.clients.remains == {}
    world.pool.deallocate_without_cache(sequence)
    world.kv_of().connect_tier(world.tier)


def test_a_rank_with_nothing_to_say_joins_a_tier_that_started_again(make_world):
    world = make_world(host={"lease_s": 0.2})
    world.live(range(9))
    world.settle()
    world.tier.restart()
    tier = world.kv_of().tier
    wait_until(lambda: not tier.is_idle)
    world.settle()
    world.rejoin()
    assert world.link.num_lost == 1
    assert world.pool.num_free_host_blocks() == [32]
