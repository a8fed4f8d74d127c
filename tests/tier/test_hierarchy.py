"""A pool with host memory: what falls out of the devices comes back."""

from __future__ import annotations

import numpy as np
import pytest

from raykv import BlockManagerPool, Namespace, PoolConfig
from raykv.errors import ConfigError
from raykv.hierarchy import HierarchyBlockManagerPool

from .tier_world import SETTINGS, SIZE, WAIT_S


def test_what_a_sequence_computed_is_offloaded_when_it_ends(world):
    world.live(range(9))
    report = world.pool.transfer_blocks()
    assert report.num_offload_blocks_started <= 4
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [4]
    assert world.pool.num_free_host_blocks() == [32 - 4]
    assert world.pool.stats().total.num_offloaded_blocks_total == 4


def test_what_the_host_has_is_loaded_beyond_the_device_hit(world):
    world.store(range(9))
    sequence = world.admit(range(9))
    assert sequence.is_loading
    assert sequence.kv_state.num_computed_tokens == 0
    report = world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert not sequence.is_loading
    assert sequence.kv_state.num_computed_tokens == 8
    assert report.loaded == {sequence.seq_id: 8}
    assert report.num_load_blocks_started == report.num_loaded_blocks == 4
    world.check(sequence)
    stats = world.pool.stats().total
    assert (stats.host_hits_total, stats.num_loaded_blocks_total) == (8, 4)
    report = world.pool.explain(sequence)
    assert (report.reason, report.num_hit_tokens, report.num_host_tokens) == ("complete", 8, 8)


def test_a_part_comes_from_the_device_and_the_rest_from_the_host(world):
    world.store(range(9))
    world.live(range(5))  # loads two blocks, which the device has from now on
    sequence = world.admit(range(9))
    assert sequence.kv_state.num_computed_tokens == 4
    report = world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert report.loaded == {sequence.seq_id: 4}
    assert sequence.kv_state.num_computed_tokens == 8
    world.check(sequence)
    explained = world.pool.explain(sequence)
    assert (explained.num_hit_tokens, explained.num_host_tokens) == (8, 4)


def test_what_was_loaded_is_shared_at_once(world):
    world.store(range(9))
    first = world.admit(range(9))
    world.pool.transfer_blocks([first], wait_s=WAIT_S)
    second = world.admit([*range(8), 99, 98, 97])
    assert second.kv_state.num_shared_blocks == 4
    world.check(first, second)


def test_one_token_is_left_to_compute(world):
    world.store(range(8))
    sequence = world.admit(range(8))
    world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert sequence.kv_state.num_computed_tokens == 6
    assert world.pool.explain(sequence).reason == "last_token_kept"


def test_other_namespaces_are_not_found(world):
    world.store(range(9))
    assert world.live(range(9), namespace=Namespace(tenant="a")) == 0


def test_the_host_keeps_more_than_the_device(make_world):
    world = make_world(num_blocks=6, host={"num_blocks": 65})
    prompts = [[100 * index + at for at in range(7)] for index in range(12)]
    for prompt in prompts:
        world.live(prompt)
        world.settle()
    assert [world.live(prompt) for prompt in prompts] == [6] * 12


def test_a_full_host_evicts_its_oldest_deepest_first(make_world):
    world = make_world(host={"num_blocks": 5})
    world.store(range(8))
    world.store(range(100, 104))
    assert world.live(range(9)) == 4
    assert world.tier.host.stats().evicted >= 2


def test_queued_offloads_are_cancelled_for_an_allocation(world):
    world.live(range(16))
    assert world.kv_of().tier.num_offloading_blocks == 8
    assert world.pool.stats().total.num_available_blocks == 1
    assert world.pool.ranks[0].room.num_available_blocks == 9  # what routing counts on
    sequence = world.admit(range(100, 116))
    assert world.totals()["offloads_cancelled"] == 8
    world.settle()
    assert world.pool.num_blocks_in_host_prefix_cache() == [0]
    world.check(sequence)


def test_only_the_batch_is_waited_for(world):
    world.store(range(9))
    sequence, new = world.admit(range(9)), world.admit(range(50, 53))
    world.pool.transfer_blocks([new], wait_s=WAIT_S)
    assert not new.is_loading
    world.pool.transfer_blocks(wait_s=WAIT_S)
    assert not sequence.is_loading


def test_reports_of_a_wait_are_summed(world):
    world.store(range(9))
    world.store(range(50, 55))
    both = [world.admit(range(9)), world.admit(range(50, 55))]
    report = world.pool.transfer_blocks(both, wait_s=WAIT_S)
    assert report.loaded == {both[0].seq_id: 8, both[1].seq_id: 4}
    assert report.num_load_blocks_started == report.num_loaded_blocks == 6
    assert report.missed == {}
    world.settle()
    assert world.pool.transfer_blocks().loaded == {}


def test_ranks_of_a_node_share_a_tier(make_world):
    world = make_world(dp_size=2)
    world.store(range(9), rank=0)
    assert world.live(range(9), rank=1) == 8
    assert world.kv_of(1).rank_stats().host_hits_total == 8


def test_each_rank_may_have_its_own():
    config = PoolConfig(**SETTINGS, dp_size=2, host={"num_blocks": 9, "scope": "rank"})
    with HierarchyBlockManagerPool.local(config) as pool:
        assert len(pool.tiers) == 2
        assert pool.num_free_host_blocks() == [8, 8]


def test_what_is_not_configured_is_told():
    with pytest.raises(ConfigError, match="host is missing"):
        HierarchyBlockManagerPool.local(PoolConfig(**SETTINGS))
    with pytest.raises(ConfigError, match="use HierarchyBlockManagerPool"):
        BlockManagerPool.local(PoolConfig(**SETTINGS, host={"num_blocks": 9}))


def test_forks_of_a_sequence_that_loads_share_what_it_had(world):
    world.store(range(9))
    world.live(range(5))
    parent = world.admit(range(9))
    child = parent.fork()
    assert parent.is_loading
    assert not child.is_loading
    assert child.kv_state.num_computed_tokens == 4
    assert world.pool.allocate(child)
    world.pool.transfer_blocks([parent], wait_s=WAIT_S)
    world.write(child)
    world.check(parent, child)
    assert parent.kv_state.num_computed_tokens == 8


def test_a_sequence_that_grows_while_it_loads(world):
    world.store(range(9))
    sequence = world.admit(range(9))
    sequence.extend([7, 7, 7])
    assert world.pool.allocate(sequence)
    world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert sequence.kv_state.num_computed_tokens == 8
    theirs = world.kv_of()._rows.sequences[sequence.single_block_id]
    assert np.array_equal(theirs.kv_state.block_ids, sequence.kv_state.block_ids)
    world.write(sequence)
    world.check(sequence)


def test_who_computes_before_the_load_was_started_calls_it_off(world):
    world.store(range(9))
    sequence = world.admit(range(9))
    world.write(sequence)
    report = world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert not sequence.is_loading
    assert report.loaded == {sequence.seq_id: 0}
    assert sequence.kv_state.num_computed_tokens == 9
    assert world.totals()["loads_cancelled"] == 4
    world.check(sequence)


def test_host_tokens_say_where_the_load_ends(world):
    world.store(range(9))
    sequence = world.admit(range(13))
    assert sequence.host_kv_state.num_computed_tokens == 8
    world.pool.transfer_blocks([sequence], wait_s=WAIT_S)
    assert sequence.host_kv_state.num_computed_tokens == 0
    assert sequence.kv_state.num_computed_tokens == 4 * SIZE
