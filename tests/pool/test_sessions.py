"""What a driver gave up is never believed, and what it held comes back."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from raykv import PoolConfig, Sequence
from raykv.errors import RankUnavailableError, RequestError
from raykv.rank_host import RankHost
from raykv.testing import LoopbackRank, MortalHost, loopback_driver

SETTINGS = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class RecordingRank(LoopbackRank):
    def __init__(self, host, driver_id="driver"):
        self.calls = []
        super().__init__(host, driver_id)

    def send(self, call):
        self.calls.append(call)
        return super().send(call)


def config(**settings):
    return PoolConfig(**SETTINGS | settings).with_seed()


def make_sequence(num_tokens, first=0):
    return Sequence(np.arange(first, first + num_tokens))


def on_rank(rank, num_tokens=8, first=0):
    sequence = make_sequence(num_tokens, first)
    sequence.dp_rank = rank
    return sequence


@pytest.fixture
def hosts():
    made = [MortalHost(config(dp_size=2), rank) for rank in range(2)]
    yield made
    for host in made:
        host.close()


@pytest.fixture
def pool(hosts):
    return loopback_driver(hosts)


def used(host):
    return host.host._kv.rank_stats().num_used_blocks


# -- tombstones ------------------------------------------------------------------------------------


def test_a_new_session_drops_the_old_one_and_refuses_what_still_comes(hosts):
    rank = RecordingRank(hosts[0])
    sequence = make_sequence(10)
    assert rank.allocate([sequence], [10]).result()
    late = replace(rank.calls[0], number=2)
    rank.lose("as if")
    assert used(hosts[0]) == 3, "nobody told the rank yet"
    rank.beat()
    assert rank.lost is None
    assert used(hosts[0]) == 0, "the first word of the new session did"
    with pytest.raises(RankUnavailableError, match="session 0"):
        hosts[0].call(late)
    assert used(hosts[0]) == 0
    assert rank.take_lost(sequence)
    assert not rank.take_lost(sequence)
    hosts[0].host._service.check_integrity()


def test_an_answer_that_comes_after_the_rank_was_given_up_is_not_believed(hosts):
    rank = LoopbackRank(hosts[0])
    sequence = make_sequence(10)
    reply = rank.allocate([sequence], [10])
    rank.lose("as if")
    with pytest.raises(RankUnavailableError, match="as if"):
        reply.result()
    assert sequence.single_block_id is None
    rank.beat()
    assert used(hosts[0]) == 0


def test_drivers_lose_a_rank_each_for_itself(hosts):
    one, two = LoopbackRank(hosts[0], "one"), LoopbackRank(hosts[0], "two")
    mine, other = make_sequence(8), make_sequence(8, 100)
    assert one.allocate([mine], [8]).result()
    assert two.allocate([other], [8]).result()
    one.lose("as if")
    one.beat()
    two.beat()
    assert used(hosts[0]) == 2
    other.append(1)
    assert two.allocate([other], [9]).result()


# -- leases ----------------------------------------------------------------------------------------


@pytest.fixture
def clocked():
    clock = Clock()
    host = RankHost(config(ray={"lease_s": 5}), 0, clock=clock)
    return clock, host


def test_a_silent_driver_loses_what_it_held_and_the_others_do_not(clocked):
    clock, host = clocked
    one, two = LoopbackRank(host, "one"), LoopbackRank(host, "two")
    mine, other = make_sequence(8), make_sequence(8, 100)
    assert one.allocate([mine], [8]).result()
    assert two.allocate([other], [8]).result()
    for _ in range(4):
        clock.now += 2
        two.beat()
        host.expire()
    assert host.info().stats.num_used_blocks == 2
    mine.append(7)
    with pytest.raises(RankUnavailableError, match="silent for 5 s"):
        one.allocate([mine], [9]).result()
    assert one.lost
    one.beat()
    assert one.lost is None
    assert one.take_lost(mine)
    other.append(1)
    assert two.allocate([other], [9]).result()


def test_heartbeats_and_calls_renew_a_lease(clocked):
    clock, host = clocked
    rank = LoopbackRank(host)
    sequence = make_sequence(8)
    assert rank.allocate([sequence], [8]).result()
    for renew in (rank.beat, lambda: rank.refresh().result()) * 3:
        clock.now += 4
        renew()
        assert host.expire() == 0
    clock.now += 6
    assert host.expire() == 1
    assert host.info().stats.num_used_blocks == 0
    rank.beat()
    assert rank.session == 1, "the heartbeat said that the lease had run out"


def test_copies_that_a_dead_driver_owed_are_forgotten(clocked):
    clock, host = clocked
    pool = loopback_driver([host])
    parent = make_sequence(6)
    assert pool.allocate(parent)
    parent.kv_state.num_computed_tokens = 6
    child = parent.fork()
    child.append(9)
    assert pool.allocate(child)
    assert pool.get_swap_block_transfer_infos() != [[]], "handed out, and never acknowledged"
    clock.now += 6
    assert host.expire() == 1
    stats = host.info().stats
    assert stats.num_free_blocks == stats.num_total_blocks


def test_two_drivers_do_not_get_each_others_copies(clocked):
    _, host = clocked
    pools = [loopback_driver([host], name) for name in ("one", "two")]
    for first, pool in enumerate(pools):
        parent = make_sequence(6, 100 * first)
        assert pool.allocate(parent)
        parent.kv_state.num_computed_tokens = 6
        child = parent.fork()
        child.append(9)
        assert pool.allocate(child)
    copies = [pool.get_swap_block_transfer_infos()[0] for pool in pools]
    assert [len(each) for each in copies] == [1, 1]
    assert copies[0] != copies[1]
    pools[0].ack_swaps()
    assert pools[1].get_swap_block_transfer_infos() == [[]]


# -- failing over ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_sequence_of_a_lost_rank_begins_anew_on_another(hosts, pool, how):
    lost, kept = on_rank(0, 9), on_rank(1, 9, 100)
    assert pool.allocate([lost, kept])
    lost.kv_state.num_computed_tokens = kept.kv_state.num_computed_tokens = 9
    getattr(hosts[0], how)()
    lost.append(1)
    kept.append(1)
    assert pool.allocate([lost, kept])
    assert (lost.dp_rank, kept.dp_rank) == (1, 1)
    assert lost.kv_state.num_computed_tokens == 0
    assert kept.kv_state.num_computed_tokens == 9
    assert pool.num_lost_sequences == 1
    assert pool.num_used_blocks() == [0, 6]
    assert pool.select_rank(make_sequence(4)) == 1
    pool.check_integrity()


def test_a_rank_that_is_back_is_used_again_by_and_by(hosts):
    made = [MortalHost(config(dp_size=2, ray={"ramp_s": 0.4}), rank) for rank in range(2)]
    pool = loopback_driver(made)
    held = on_rank(1, 8)
    assert pool.allocate(held)
    made[0].kill()
    pool.monitor.beat()
    assert pool.ranks[0].lost
    made[0].restart()
    pool.monitor.beat()
    assert pool.ranks[0].lost is None
    assert pool.select_rank(make_sequence(4)) == 1, "it offers little yet, though it is empty"
    deadline = time.monotonic() + 10
    while pool.select_rank(make_sequence(4)) != 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for host in made:
        host.close()


def test_a_thawed_rank_gives_back_what_was_served_elsewhere_meanwhile(hosts, pool):
    sequence = on_rank(0, 8)
    assert pool.allocate(sequence)
    hosts[0].freeze()
    pool.monitor.beat()
    sequence.append(1)
    assert pool.allocate(sequence)
    assert sequence.dp_rank == 1
    hosts[0].thaw()
    assert used(hosts[0]) == 2
    pool.monitor.beat()
    assert used(hosts[0]) == 0
    pool.deallocate(sequence)
    pool.check_integrity()


def test_where_no_rank_is_left_nothing_hangs(hosts, pool):
    sequence = on_rank(0, 8)
    assert pool.allocate(sequence)
    for host in hosts:
        host.kill()
    sequence.append(1)
    with pytest.raises(RankUnavailableError):
        pool.allocate(sequence)
    with pytest.raises(RankUnavailableError):
        pool.stats()
    pool.deallocate(sequence)
    assert sequence.single_block_id is None


def test_losses_are_reported_where_that_is_wanted():
    made = [MortalHost(config(dp_size=2, ray={"on_rank_loss": "report"}), r) for r in range(2)]
    pool = loopback_driver(made)
    sequence = on_rank(0, 8)
    assert pool.allocate(sequence)
    made[0].kill()
    sequence.append(1)
    for _ in range(2):
        with pytest.raises(RankUnavailableError, match="rank 0"):
            pool.allocate(sequence)
    made[0].restart()
    pool.monitor.beat()
    with pytest.raises(RankUnavailableError, match="lost with rank 0"):
        pool.allocate(sequence)
    pool.deallocate(sequence)
    assert pool.num_lost_sequences == 1
    assert pool.allocate(sequence), "it begins anew where the caller says so"
    pool.close()


def test_an_interrupted_call_loses_nothing(hosts, pool, monkeypatch):
    sequence = on_rank(0, 8)
    rank = pool.ranks[0]
    send = rank.send

    class Interrupted:
        def __init__(self, reply):
            self.reply, self.is_first = reply, True

        def result(self):
            if self.is_first:
                self.is_first = False
                raise KeyboardInterrupt
            return self.reply.result()

    monkeypatch.setattr(rank, "send", lambda call: Interrupted(send(call)))
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(sequence)
    monkeypatch.undo()
    assert used(hosts[0]) == 2
    rank.refresh().result()
    assert sequence.kv_state.num_blocks == 2
    pool.deallocate(sequence)
    assert used(hosts[0]) == 0


def test_an_update_that_a_dead_driver_left_halfway_is_given_up(clocked):
    clock, host = clocked
    one, two = LoopbackRank(host, "one"), LoopbackRank(host, "two")
    one.prepare_weights(2, None, "wait").result()
    with pytest.raises(RequestError, match="changing to weights version 2"):
        two.prepare_weights(3, None, "wait").result()
    clock.now += 6
    two.beat()
    assert host.expire() == 1
    two.prepare_weights(3, None, "wait").result()
    two.apply_weights(3).result()
    assert two.weights_status().result().version == 3
