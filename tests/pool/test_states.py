"""Recurrent state through a pool: what a driver hears is what its ranks hold, whatever carries it.

Over Ray see ray/test_hybrid.py.
"""

from __future__ import annotations

import pytest

from raykv import PoolConfig, Sequence
from raykv.rank_host import RankHost
from raykv.testing import LoopbackRank, MortalHost, loopback_driver

SIZE = 4
STATES = {"num_slots": 9, "stride_tokens": 2 * SIZE, "match": "deepest"}


@pytest.fixture(params=["local", "loopback"])
def kind(request):
    """The pools that need no Ray."""
    return request.param


@pytest.fixture
def make_states_pool(make_pool):
    def make(num_blocks=30, num_single_blocks=9, **settings):
        states = {**STATES, **settings.pop("linear_state", {})}
        return make_pool(
            num_blocks=num_blocks,
            num_single_blocks=num_single_blocks,
            linear_state=states,
            **settings,
        )

    return make


def rank_kv(pool, rank=0):
    handle = pool.ranks[rank]
    if hasattr(handle, "kv"):
        return handle.kv
    return getattr(handle.host, "host", handle.host)._kv


def theirs(pool, sequence):
    """The rank's own view of a sequence."""
    return rank_kv(pool, sequence.dp_rank)._rows.sequences[sequence.single_block_id]


def check_mirror(pool, *sequences):
    pool.check_integrity()
    for sequence in sequences:
        other, kv = theirs(pool, sequence), rank_kv(pool, sequence.dp_rank)
        assert sequence.linear_state_slot == other.linear_state_slot != 0
        assert sequence.kv_state.checkpoint_stops == other.kv_state.checkpoint_stops
        assert sequence.kv_state.num_admitted_tokens == other.kv_state.num_admitted_tokens
        other.kv_state.num_computed_tokens = sequence.kv_state.num_computed_tokens
        assert pool.next_checkpoint(sequence) == kv.next_checkpoint(other)


def copy(pool):
    copies = pool.get_state_transfer_infos()
    pool.ack_state_transfers()
    return copies


def prefill(pool, sequence):
    """Compute all; returns each stop with the copies that were due then."""
    seen = []
    while sequence.kv_state.num_computed_tokens < sequence.num_tokens:
        stop = pool.next_checkpoint(sequence) or sequence.num_tokens
        sequence.kv_state.num_computed_tokens = stop
        pool.cache(sequence)
        check_mirror(pool, sequence)
        seen.append((stop, copy(pool)[sequence.dp_rank]))
    return seen


def admitted(pool, tokens, rank=None):
    sequence = Sequence(tokens)
    sequence.dp_rank = rank
    assert pool.allocate(sequence)
    return sequence


def slots(pool):
    """Free and live slots, and checkpoints, of all ranks."""
    total = pool.stats().total
    return total.num_free_state_slots, total.num_live_state_slots, total.num_checkpoints


def test_slots_and_stops_reach_the_driver(make_states_pool):
    pool = make_states_pool()
    first = admitted(pool, range(22))
    assert first.linear_state_slot == 1
    assert first.kv_state.checkpoint_stops == (20,)
    seen = prefill(pool, first)
    assert [stop for stop, _ in seen] == [8, 16, 20, 22]
    assert [[source for source, _ in copies] for _, copies in seen] == [[1], [1], [1], []]
    branch = admitted(pool, [*range(14), *range(50, 60)])
    assert branch.kv_state.num_computed_tokens == 8
    assert branch.kv_state.checkpoint_stops == (12, 20, 24)
    check_mirror(pool, first, branch)
    [[(source, target)]] = copy(pool)
    assert (source, target) == (seen[0][1][0][1], branch.linear_state_slot)
    prefill(pool, branch)
    pool.deallocate([first, branch])
    assert first.linear_state_slot is branch.linear_state_slot is None
    assert slots(pool)[1] == 0


def test_nothing_is_found_before_its_copy_is_acknowledged(make_states_pool):
    pool = make_states_pool()
    first = admitted(pool, range(10))
    first.kv_state.num_computed_tokens = 8
    pool.cache(first)
    assert len(pool.get_state_transfer_infos()[0]) == 1
    assert pool.get_state_transfer_infos() == [[]], "handed out once"
    second = admitted(pool, range(10))
    assert second.kv_state.num_computed_tokens == 0
    pool.ack_state_transfers()
    third = admitted(pool, range(10))
    assert third.kv_state.num_computed_tokens == 8
    assert pool.explain(second).reason == "no_checkpoint"
    assert pool.explain(third).reason == "complete"
    check_mirror(pool, first, second, third)


def test_copies_are_per_rank(make_states_pool):
    pool = make_states_pool(dp_size=2)
    for rank in range(2):
        prefill(pool, admitted(pool, range(9), rank))
    again = admitted(pool, range(10), 1)
    assert again.kv_state.num_computed_tokens == 8
    copies = pool.get_state_transfer_infos()
    assert copies[0] == []
    assert [target for _, target in copies[1]] == [again.linear_state_slot]
    pool.ack_state_transfers()
    check_mirror(pool, again)


def test_a_fork_has_a_slot_of_its_own_to_be_filled(make_states_pool):
    pool = make_states_pool()
    parent = admitted(pool, range(7))
    parent.kv_state.num_computed_tokens = 7
    child = parent.fork()
    check_mirror(pool, parent, child)
    assert copy(pool) == [[(parent.linear_state_slot, child.linear_state_slot)]]
    child.append(9)
    assert pool.allocate(child)
    check_mirror(pool, parent, child)
    pool.deallocate_without_cache([parent, child])
    pool.get_swap_block_transfer_infos()
    pool.ack_swaps()
    assert slots(pool) == (8, 0, 0)


def test_a_list_that_one_rank_refuses_gives_every_slot_back(make_states_pool):
    pool = make_states_pool(dp_size=2, num_single_blocks=4, linear_state={"num_slots": 4})
    running = [admitted(pool, range(100 * i, 100 * i + 3), 1) for i in range(2)]
    new = [Sequence(range(100 * i, 100 * i + 3)) for i in range(2, 6)]
    for sequence, rank in zip(new, [0, 1, 0, 1], strict=True):
        sequence.dp_rank = rank
    before = slots(pool)
    assert not pool.allocate([*running, *new])
    assert slots(pool) == before
    assert all(one.linear_state_slot is one.single_block_id is None for one in new)
    check_mirror(pool, *running)
    assert pool.allocate([*running, *new[:3]])
    check_mirror(pool, *running, *new[:3])


def test_ranks_without_an_obtainable_slot_are_passed_by(make_states_pool):
    pool = make_states_pool(dp_size=2, num_single_blocks=3, linear_state={"num_slots": 3})
    held = rank_kv(pool).linear_state.acquire_live_slots(2)
    for handle in pool.ranks:
        handle.refresh().result()
    chosen = [admitted(pool, range(100 * i, 100 * i + 3)) for i in range(2)]
    assert [one.dp_rank for one in chosen] == [1, 1]
    held.release()


@pytest.mark.parametrize("num_steps", range(5))
def test_a_sequence_can_be_given_up_in_any_state(make_states_pool, num_steps):
    pool = make_states_pool()
    first = admitted(pool, range(9))
    prefill(pool, first)
    pool.deallocate_without_cache(first)
    family = [admitted(pool, range(30))]
    assert family[0].kv_state.num_computed_tokens == 8
    if num_steps >= 1:
        pool.get_state_transfer_infos()
    if num_steps >= 2:
        family[0].kv_state.num_computed_tokens = 16
        pool.cache(family[0])
    if num_steps >= 3:
        pool.get_state_transfer_infos()
    if num_steps >= 4:
        family.append(family[0].fork())
    pool.deallocate_without_cache(family)
    copy(pool)
    cache = rank_kv(pool).linear_state
    assert cache.num_live_slots == cache.num_pending == cache.num_lingering_slots == 0
    assert cache.num_free_slots + cache.num_reclaimable == cache.num_total_slots
    assert cache.num_checkpoints == (2 if num_steps >= 3 else 1), "a copy that is done counts"


# -- several drivers -------------------------------------------------------------------------------


class Clock:
    """Seconds, as a test says."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def config(**settings):
    return PoolConfig(
        num_blocks=40, block_size=SIZE, max_num_seqs=8, linear_state=STATES, **settings
    ).with_seed()


def test_two_drivers_do_not_get_each_others_copies():
    host = RankHost(config(), 0)
    one, two = (loopback_driver([host], name) for name in ("one", "two"))
    prefill(one, admitted(one, range(9)))
    mine, other = admitted(one, range(9)), admitted(two, range(9))
    assert [target for _, target in two.get_state_transfer_infos()[0]] == [other.linear_state_slot]
    two.ack_state_transfers()
    assert two.get_state_transfer_infos() == [[]]
    assert [target for _, target in one.get_state_transfer_infos()[0]] == [mine.linear_state_slot]
    one.check_integrity()


def test_a_driver_that_dies_leaves_no_slot_and_no_pin():
    """In the midst of restoring, saving and forking; what it saved before stays."""
    clock = Clock()
    host = RankHost(config(ray={"lease_s": 5}), 0, clock=clock)
    pool, other = loopback_driver([host], "dead"), loopback_driver([host], "other")
    prefill(pool, admitted(pool, range(9)))
    pool.get_state_transfer_infos()
    restoring = admitted(pool, range(20))
    assert restoring.kv_state.num_computed_tokens == 8
    pool.get_state_transfer_infos()
    restoring.fork()
    saving = admitted(pool, range(100, 110))
    saving.kv_state.num_computed_tokens = 8
    pool.cache(saving)
    assert host._kv.linear_state.num_pending == 1
    running = admitted(other, range(200, 203))
    for _ in range(4):
        clock.now += 2
        other.monitor.beat()
        host.expire()
    cache = host._kv.linear_state
    assert cache.num_pending == cache.num_lingering_slots == 0
    assert (cache.num_live_slots, cache.num_checkpoints) == (1, 1)
    assert cache.num_reclaimable == 1
    host._kv.check_integrity()
    check_mirror(other, running)
    found = admitted(other, range(9))
    assert found.kv_state.num_computed_tokens == 8


def test_a_sequence_of_a_lost_rank_begins_anew_with_a_slot_there():
    hosts = [MortalHost(config(dp_size=2), rank) for rank in range(2)]
    pool = loopback_driver(hosts)
    sequence = admitted(pool, range(20), 0)
    prefill(pool, sequence)
    hosts[0].kill()
    sequence.append(1)
    assert pool.allocate(sequence)
    assert sequence.dp_rank == 1
    assert sequence.kv_state.num_computed_tokens == 0
    kv = hosts[1].host._kv
    assert sequence.linear_state_slot is not None
    assert kv.linear_state.num_live_slots == 1
    assert pool.next_checkpoint(sequence) == 8
    pool.deallocate(sequence)
    assert kv.linear_state.num_live_slots == 0


def test_a_call_that_is_repeated_hands_out_the_same_copies():
    """Its answer may have been lost; the copies must not be."""
    host = RankHost(config(), 0)
    calls = []

    class Recording(LoopbackRank):
        def send(self, call):
            calls.append(call)
            return super().send(call)

    rank = Recording(host)
    sequence = Sequence(range(10))
    assert rank.allocate([sequence], [10]).result()
    sequence.kv_state.num_computed_tokens = 8
    rank.cache(sequence, None).result()
    copies = rank.take_state_copies().result()
    assert len(copies) == 1
    assert host.call(calls[-1]).value == copies
    assert rank.take_state_copies().result() == []
