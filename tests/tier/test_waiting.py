"""Waiting until nothing is on its way; pools for configurations with host memory or without."""

from __future__ import annotations

from raykv import BlockManagerPool, HierarchyBlockManagerPool
from raykv.hierarchy import local_pool

from .copy_gates import Gate
from .tier_world import WAIT_S, make_config, wait_until


def test_an_offload_is_waited_for_until_it_is_reported(make_world):
    gate = Gate("offload", is_open=False)
    world = make_world(copy_faults=gate)
    assert not world.pool.has_transfers
    world.live(range(9))
    world.pool.transfer_blocks()
    wait_until(lambda: gate.num_seen)
    assert world.pool.has_transfers
    assert not world.pool.wait_for_transfers(0.05)
    gate.open()
    world.settle()
    assert world.pool.wait_for_transfers(WAIT_S)
    assert world.pool.num_blocks_in_host_prefix_cache() == [4]


def test_a_load_is_waited_for(make_world):
    gate = Gate("load", is_open=False)
    world = make_world(copy_faults=gate)
    world.store(range(9))
    sequence = world.admit(range(9))
    world.pool.transfer_blocks()
    assert world.pool.has_transfers
    gate.open()
    world.settle()
    assert not world.pool.has_transfers
    world.pool.deallocate_without_cache(sequence)


def test_many_short_offloads_start_together(make_world):
    world = make_world()
    sequences = [world.admit(range(start, start + 5)) for start in (10, 20, 30)]
    world.settle()
    for sequence in sequences:
        sequence.kv_state.num_computed_tokens = 4
    world.pool.deallocate(sequences)
    started = world.pool.transfer_blocks().num_offload_blocks_started
    world.settle()
    assert started == 6


def test_a_pool_has_a_host_where_its_configuration_has_one():
    for config, kind in (
        (make_config(), HierarchyBlockManagerPool),
        (make_config().model_copy(update={"host": None}), BlockManagerPool),
    ):
        with local_pool(config) as pool:
            assert type(pool) is kind
