"""Offloads: sources stay until they are copied, and nothing that is not whole is found."""

from __future__ import annotations

import pytest

from raykv.tiering import offloads as tier_offloads

from .copy_gates import Gate
from .tier_world import WAIT_S, wait_until


@pytest.mark.parametrize(("fault", "num_stored"), [("fail", 0), ("short", 2)])
def test_only_what_is_whole_is_found(make_world, fault, num_stored):
    world = make_world(copy_faults=Gate("offload", fault))
    world.store(range(9))
    assert world.pool.num_blocks_in_host_prefix_cache() == [num_stored]
    assert world.totals()["offloads_failed"] == 4 - num_stored
    assert world.live(range(9)) == 2 * num_stored


def test_a_block_that_was_stored_corrupt_is_never_served(make_world):
    world = make_world(copy_faults=Gate("offload", "corrupt"))
    world.store(range(9))
    assert world.pool.num_blocks_in_host_prefix_cache() == [4], "nobody knows yet"
    assert world.live(range(9)) == 4
    assert world.tier.host.stats().corrupt == 1


def test_without_checksums_the_canary_sees_it(make_world):
    """The negative control."""
    world = make_world(copy_faults=Gate("offload", "corrupt"), host={"checksum_rate": 0.0})
    world.store(range(9))
    sequence = world.admit(range(9))
    world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert world.find_wrong(sequence) != []
    world.pool.deallocate_without_cache(sequence)


def test_sources_stay_until_they_are_copied(make_world):
    gate = Gate("offload", is_open=False)
    world = make_world(copy_faults=gate)
    world.live(range(9))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    world.pool.reset_prefix_cache()
    assert world.kv_of().tier.num_offloading_blocks == 4
    assert world.pool.num_available_blocks() == [9 - 4]
    gate.open()
    world.settle()
    assert world.pool.num_available_blocks() == [9]
    assert world.pool.num_blocks_in_host_prefix_cache() == [0], "the reset was meanwhile"


def test_a_copy_under_way_is_not_freed_by_being_called_off(make_world):
    gate = Gate("offload", is_open=False)
    world = make_world(copy_faults=gate)
    world.live(range(13))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    assert world.kv_of().tier.cancel_unstarted_offloads() == 0
    assert world.kv_of().tier.num_offloading_blocks == 6
    assert not world.pool.try_allocate(world_sequence(range(100, 110)))
    assert not world.pool.transfer_blocks().is_idle
    gate.open()
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [6]


def test_a_long_offload_goes_in_pieces_and_its_rest_can_be_called_off(make_world, monkeypatch):
    monkeypatch.setattr(tier_offloads, "_PIECE_BYTES", 1)  # one block
    gate = Gate("offload", is_open=False)
    world = make_world(copy_faults=gate)
    world.live(range(13))
    assert world.pool.transfer_blocks().num_offload_blocks_started == 2
    wait_until(lambda: gate.num_seen)
    sequence = world.admit(range(100, 110))  # five blocks, of three free ones
    world.write(sequence)
    assert world.kv_of().tier.num_offloading_blocks == 1
    gate.open()
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [1]
    assert world.totals()["offloads_failed"] == 0
    assert world.live(range(3)) == 2
    world.check(sequence)


def test_all_pieces_arrive(make_world, monkeypatch):
    monkeypatch.setattr(tier_offloads, "_PIECE_BYTES", 1)
    world = make_world()
    world.store(range(13))
    assert world.live(range(13)) == 12


@pytest.mark.parametrize("stage", ["queued", "offered", "granted"])
def test_what_has_not_started_can_be_called_off_in_any_stage(world, stage):
    world.live(range(9))
    offloads = world.kv_of().tier._offloads
    if stage == "offered":
        world.tier.freeze()
    if stage != "queued":
        world.kv_of().pump_tier()
    if stage == "granted":
        world.kv_of().pump_tier()
    lines = {"queued": offloads._queued, "offered": offloads._offered, "granted": offloads._granted}
    assert [name for name, line in lines.items() if line] == [stage]
    assert world.kv_of().tier.cancel_unstarted_offloads() == 4
    assert world.kv_of().block_manager.num_available_blocks == 9
    world.tier.thaw()
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [0]


def test_what_the_host_has_is_not_copied_again(world):
    world.store(range(9))
    world.live(range(9))
    world.settle()
    assert world.totals()["offloaded"] == 4
    world.live([*range(9), 50, 51])
    world.settle()
    assert world.totals()["offloaded"] == 5


def test_an_aborted_sequence_offloads_nothing(world):
    sequence = world.admit(range(9))
    world.write(sequence)
    world.pool.deallocate_without_cache(sequence)
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [0]


def test_only_computed_blocks_are_offloaded(world):
    sequence = world.admit(range(9))
    world.write(sequence, 5)
    world.pool.deallocate(sequence)
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [2]
    world.forget_device()
    assert world.live(range(9)) == 4


def test_a_host_without_room_refuses_and_counts(make_world):
    world = make_world(host={"num_blocks": 3})
    world.store(range(9))
    stats = world.tier.host.stats()
    assert (stats.cached, stats.refused) == (2, 2)
    assert world.live(range(9)) == 4


def world_sequence(tokens):
    from raykv import Sequence  # noqa: PLC0415 - one use

    return Sequence(tokens)
