"""Several drivers over messages, one host tier: nobody computes into what another one loads."""

from __future__ import annotations

import pytest

from raykv import Sequence

from .copy_gates import Gate
from .tier_world import WAIT_S, World, wait_until


@pytest.fixture
def make_pair():
    made = []

    def make(**settings):
        made.append(World("loopback", num_drivers=2, **settings))
        return made[-1], *made[-1].pools

    yield make
    for world in made:
        world.drain()
        world.close()


def test_what_one_stored_the_other_loads(make_pair):
    world, first, second = make_pair()
    world.store(range(9), pool=first)
    assert world.live(range(9), pool=second) == 8


def test_another_drivers_loads_are_not_started(make_pair):
    """So that it may compute instead as long as it has not asked for them."""
    world, first, second = make_pair()
    world.store(range(9))
    sequence = world.admit(range(9), pool=first)
    report = second.transfer_blocks(wait_s=0.05)
    assert report.is_idle
    assert report.num_load_blocks_started == 0
    world.write(sequence)
    first.transfer_blocks([sequence], wait_s=WAIT_S)
    assert not sequence.is_loading
    world.check(sequence)


def test_each_hears_of_its_own(make_pair):
    world, first, second = make_pair(num_blocks=20)
    world.store(range(9))
    world.store(range(50, 55))
    ours, theirs = world.admit(range(9), pool=first), world.admit(range(50, 55), pool=second)
    second.transfer_blocks([theirs], wait_s=WAIT_S)
    report = first.transfer_blocks([ours], wait_s=WAIT_S)
    assert report.loaded == {ours.seq_id: 8}
    assert (ours.kv_state.num_computed_tokens, theirs.kv_state.num_computed_tokens) == (8, 4)
    world.check(ours, theirs)


def test_what_ends_during_anothers_call_reaches_its_driver(make_pair):
    gate = Gate("load", is_open=False)
    world, first, second = make_pair(copy_faults=gate, num_blocks=20)
    world.store(range(9))
    sequence = world.admit(range(9), pool=first)
    first.transfer_blocks([sequence])
    wait_until(lambda: gate.num_seen)
    gate.open()
    wait_until(lambda: not world.link.copier.num_running)
    world.admit(range(70, 73), pool=second)
    second.transfer_blocks()
    assert sequence.is_loading, "its driver has not asked"
    assert sequence.kv_state.num_computed_tokens == 0
    report = first.transfer_blocks()
    assert report.loaded == {sequence.seq_id: 8}
    assert sequence.kv_state.num_computed_tokens == 8
    world.check(sequence)


def test_a_late_load_moves_its_sequence_only_when_its_driver_calls(make_pair):
    gate = Gate("load", is_open=False)
    world, first, second = make_pair(copy_faults=gate, num_blocks=20, host={"timeout_s": 0.02})
    world.store(range(9))
    sequence = world.admit(range(9), pool=first)
    first.transfer_blocks([sequence])
    before = sequence.kv_state.block_ids.tolist()
    load = world.kv_of().tier._loads._copying[0]
    wait_until(lambda: world.link._clock() > load.late_s)
    second.transfer_blocks()
    theirs = world.kv_of()._rows.sequences[sequence.single_block_id]
    assert theirs.kv_state.block_ids.tolist() == before
    first.transfer_blocks()
    assert not sequence.is_loading
    assert sequence.kv_state.block_ids.tolist() == theirs.kv_state.block_ids.tolist() != before
    world.write(sequence)
    gate.open()
    world.settle()
    world.check(sequence)


def test_a_driver_that_comes_back_ends_nobody_elses_loads(make_pair):
    world, first, second = make_pair(num_blocks=20)
    world.store(range(9))
    sequence = world.admit(range(9), pool=first)
    second.ranks[0].lose("for a test")
    second.monitor.beat()
    wait_until(lambda: second.ranks[0].lost is None)
    assert sequence.is_loading
    first.transfer_blocks([sequence], wait_s=WAIT_S)
    assert sequence.kv_state.num_computed_tokens == 8
    world.check(sequence)


def test_what_a_lost_driver_loads_comes_back(make_pair):
    gate = Gate("load", is_open=False)
    world, first, _ = make_pair(copy_faults=gate, num_blocks=20)
    world.store(range(9))
    sequence = world.admit(range(9), pool=first)
    first.transfer_blocks([sequence])
    wait_until(lambda: gate.num_seen)
    first.ranks[0].lose("for a test")
    assert not sequence.is_loading
    first.monitor.beat()
    wait_until(lambda: first.ranks[0].lost is None)
    gate.open()
    assert first.allocate(sequence)
    first.transfer_blocks([sequence], wait_s=WAIT_S)
    assert first.num_lost_sequences == 1
    assert sequence.kv_state.num_computed_tokens == 8
    world.check(sequence)


def test_a_rank_that_died_loads_from_the_host_what_it_had(make_pair):
    world, first, _ = make_pair(dp_size=2)
    sequence = world.admit(range(9), pool=first, rank=0)
    world.write(sequence)
    first.cache(sequence)
    other = Sequence(range(9))
    other.dp_rank = 0
    assert first.allocate(other)
    world.write(other)
    first.deallocate(other)
    world.settle()
    world.hosts[0].kill()
    first.monitor.beat()
    assert first.allocate(sequence)
    assert sequence.dp_rank == 1
    first.transfer_blocks([sequence], wait_s=WAIT_S)
    assert sequence.kv_state.num_computed_tokens == 8
    world.hosts[0].restart()
    for pool in world.pools:
        pool.monitor.beat()
        wait_until(lambda pool=pool: pool.ranks[0].lost is None)
    world.check(sequence)
    assert world.kv_of(0).tier is not None, "it joined again"


@pytest.mark.parametrize("how", ["freeze", "kill"])
def test_a_rank_that_is_back_serves_without_its_tier_until_that_answers(make_pair, how):
    world, first, second = make_pair(num_blocks=20)
    getattr(world.tier, how)()
    world.hosts[0].kill()
    for pool in world.pools:
        pool.monitor.beat()
    world.hosts[0].restart()
    for pool in world.pools:
        pool.monitor.beat()
        wait_until(lambda pool=pool: pool.ranks[0].lost is None)
    assert not world.link.is_up
    assert world.live(range(9), pool=first) == 0
    assert world.live(range(9), pool=second) == 8
    world.check(world.admit(range(50, 55)))
    world.tier.thaw() if how == "freeze" else world.tier.restart()
    world.rejoin()
    world.store(range(70, 79))
    assert world.live(range(70, 79), pool=second) == 8
