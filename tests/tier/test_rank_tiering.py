"""Resets, weights versions and sleep of ranks that have a host tier."""

from __future__ import annotations

import pytest

from raykv import Namespace
from raykv.errors import RankUnavailableError, RequestError

from .copy_gates import Gate
from .tier_world import WAIT_S, Clock, wait_until

# -- resets -------------------------------------------------------------------------------------


def test_a_reset_forgets_the_host_too(world):
    world.store(range(9))
    world.pool.reset_prefix_cache()
    assert world.pool.num_blocks_in_host_prefix_cache() == [0]
    assert world.live(range(9)) == 0
    world.forget_device()
    assert world.live(range(9)) == 8, "what was computed since is shared again"


@pytest.mark.parametrize("stage", ["queued", "offered", "granted", "copying"])
def test_what_is_on_its_way_to_the_host_is_not_found_after_a_reset(make_world, stage):
    gate = Gate("offload", is_open=False)
    world = make_world(dp_size=2, copy_faults=gate)
    world.live(range(9), rank=0)
    kv = world.kv_of(0)
    if stage == "offered":
        world.tier.freeze()
    if stage != "queued":
        kv.pump_tier()
    if stage == "copying":
        world.pool.transfer_blocks()
        wait_until(lambda: gate.num_seen)
    if stage == "offered":  # the tier gets the offer before it hears of the reset
        world.tier.thaw()
    world.pool.reset_prefix_cache()
    gate.open()
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [0]
    assert world.live(range(9), rank=0) == 0
    world.settle()
    assert world.live(range(9), rank=1) == 8


@pytest.mark.parametrize("stage", ["to_ask", "granted", "copying"])
def test_who_loads_across_a_reset_finishes_and_publishes_nothing(make_world, stage):
    gate = Gate("load", is_open=stage != "copying")
    world = make_world(copy_faults=gate, num_blocks=20)
    world.store(range(9))
    if stage == "to_ask":
        world.tier.freeze()
    sequence = world.admit(range(9))
    if stage == "copying":
        world.pool.transfer_blocks([sequence])
        wait_until(lambda: gate.num_seen)
    world.tier.thaw()
    world.pool.reset_prefix_cache()
    gate.open()
    world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert not sequence.is_loading
    world.check(sequence)
    world.write(sequence)
    world.pool.deallocate(sequence)
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [0]
    assert world.live(range(9)) == 0


def test_a_rank_that_joins_again_during_a_reset_stores_nothing_from_before(make_world):
    """The tier has forgotten already, the rank has not, and its line breaks in between."""
    world = make_world()
    sequence = world.admit(range(9))
    world.write(sequence)
    world.books.expire(float("inf"))
    world.admit(range(50, 53))  # hears of it
    [(epoch, _)] = [world.tier.reset().result()]
    world.rejoin()
    assert world.link.epoch < epoch == world.link.heard_epoch
    world.pool.deallocate(sequence)
    world.settle()
    assert world.tier.host.stats().cached == 0
    world.kv_of().reset_prefix_cache()
    world.kv_of().begin_epoch(epoch)
    world.live(range(9))
    world.settle()
    assert world.tier.host.stats().cached == 4


def test_a_tier_that_started_again_and_was_reset_since_trusts_a_rank_no_sooner(make_world):
    world = make_world()
    sequence = world.admit(range(9))
    world.write(sequence)
    world.tier.kill()
    world.admit(range(50, 53))
    world.tier.restart()
    world.tier.reset().result()
    world.rejoin()
    world.pool.deallocate(sequence)
    world.settle()
    assert world.tier.host.stats().cached == 0
    world.pool.reset_prefix_cache()


def test_a_tier_that_started_again_takes_what_the_rank_has(world):
    sequence = world.admit(range(9))
    world.write(sequence)
    world.tier.kill()
    world.admit(range(50, 53))
    world.tier.restart()
    world.rejoin()
    world.pool.deallocate(sequence)
    world.settle()
    assert world.tier.host.stats().cached == 4


def test_a_rank_that_nobody_tells_of_a_reset_forgets_by_itself(make_world):
    """The driver that reset the tier died in the middle of it."""
    world = make_world(host={"lease_s": 1000.0})
    clock = Clock()
    world.link._clock = clock
    world.live(range(9))
    world.settle()
    world.tier.reset().result()
    assert world.live(range(9)) == 8, "the device has it, and hears that the tier has not"
    world.settle()
    assert world.tier.host.stats().cached == 0
    clock.now += 999
    world.kv_of().pump_tier()
    assert world.kv_of().block_manager.num_blocks_in_prefix_cache
    clock.now += 2
    world.kv_of().pump_tier()
    assert not world.kv_of().block_manager.num_blocks_in_prefix_cache
    world.live(range(9))
    world.settle()
    assert world.tier.host.stats().cached == 4


@pytest.mark.parametrize("how", ["freeze", "kill"])
def test_a_reset_that_a_tier_does_not_hear_is_told(make_world, how):
    world = make_world(ray={"call_timeout_s": 0.1})
    world.store(range(9))
    getattr(world.tier, how)()
    with pytest.raises(RankUnavailableError, match="tier"):
        world.pool.reset_prefix_cache()
    world.tier.thaw()
    if how == "kill":
        world.tier.restart()
    world.pool.reset_prefix_cache()
    assert world.live(range(9)) == 0


# -- weights versions and sleep -----------------------------------------------------------------


def test_kv_of_other_weights_is_not_found(world):
    world.store(range(9))
    world.pool.update_weights(1)
    assert world.live(range(9), namespace=Namespace(weights_version=1)) == 0
    world.forget_device()
    assert world.live(range(9), namespace=Namespace(weights_version=1)) == 8


def test_a_sequence_across_an_update_offloads_nothing(world):
    sequence = world.admit(range(9))
    world.write(sequence, 5)
    world.pool.update_weights(1)
    world.write(sequence)
    world.pool.deallocate(sequence)
    world.settle()
    assert world.tier.host.stats().cached == 0


def test_a_load_across_an_update_is_finished_and_not_published_anew(make_world):
    gate = Gate("load", is_open=False)
    world = make_world(copy_faults=gate, num_blocks=20)
    world.store(range(9))
    sequence = world.admit(range(9))
    world.pool.transfer_blocks([sequence])
    wait_until(lambda: gate.num_seen)
    world.pool.update_weights(1)
    gate.open()
    world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    world.check(sequence)
    assert world.kv_of().block_manager.num_blocks_in_prefix_cache == 0
    world.pool.deallocate(sequence)


def test_retired_versions_are_evicted_from_the_host_first(make_world):
    world = make_world(host={"num_blocks": 9})
    world.store(range(9))
    new = Namespace(weights_version=1)
    world.pool.update_weights(1)
    world.store(range(50, 59), namespace=new)
    world.live(range(9))  # used last
    world.pool.retire(0)
    world.store(range(70, 75), namespace=new)
    assert world.live(range(50, 59), namespace=new) == 8
    world.forget_device()
    assert world.live(range(9)) == 4


@pytest.mark.parametrize("stage", ["queued", "granted", "copying"])
def test_sleep_waits_for_copies_and_the_host_keeps_what_it_has(make_world, stage):
    gate = Gate("offload")
    world = make_world(copy_faults=gate)
    world.store(range(9))
    gate.close()
    world.live(range(50, 59))
    if stage != "queued":
        world.kv_of().pump_tier()
    if stage == "copying":
        world.pool.transfer_blocks()
        wait_until(lambda: gate.num_seen > 1)
    gate.open()
    world.pool.sleep()
    assert world.kv_of().buffers.is_released
    world.kv_of().pump_tier()
    world.pool.wake_up()
    assert world.live(range(9)) == 8
    world.forget_device()
    assert world.live(range(50, 59)) == (8 if stage == "copying" else 0)


def test_an_aborted_load_does_not_write_into_a_sleeping_rank(make_world):
    gate = Gate("load", is_open=False)
    world = make_world(copy_faults=gate)
    world.store(range(9))
    sequence = world.admit(range(9))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    with pytest.raises(RequestError, match="cannot sleep"):
        world.pool.sleep()
    world.pool.deallocate_without_cache(sequence)
    gate.open()
    world.pool.sleep()
    world.pool.wake_up()
    assert not world.kv_of().buffers.storage.any()
    assert world.live(range(9)) == 8


def test_a_copy_that_never_ends_keeps_the_rank_awake(make_world, monkeypatch):
    monkeypatch.setattr("raykv.tiering.rank_tier._QUIESCE_S", 0.05)
    gate = Gate("offload", is_open=False)
    world = make_world(copy_faults=gate)
    world.live(range(9))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    with pytest.raises(RequestError, match="cannot sleep while handles or copies hold 4"):
        world.pool.sleep()
    gate.open()
    world.pool.sleep()
    world.pool.wake_up()
