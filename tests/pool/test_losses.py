"""What a pool promises while ranks come and go under it."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from raykv import PoolConfig, Sequence
from raykv.rank_handle import Failed
from raykv.remote_rank import ReplyLostError
from raykv.testing import Faults, LoopbackRank, MortalHost, inject, loopback_driver

SETTINGS = {"dp_size": 2, "num_blocks": 40, "block_size": 4, "ray": {"ramp_s": 0}}


def make_hosts(**settings):
    config = PoolConfig(**SETTINGS | settings).with_seed()
    return [MortalHost(config, rank) for rank in range(2)]


def on_rank(rank, num_tokens=8, first=0):
    sequence = Sequence(np.arange(first, first + num_tokens))
    sequence.dp_rank = rank
    return sequence


def computed_on(pool, rank, num_tokens=9):
    sequence = on_rank(rank, num_tokens)
    assert pool.allocate(sequence)
    sequence.kv_state.num_computed_tokens = num_tokens
    return sequence


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_list_too_long_for_the_ranks_that_are_left_is_refused_and_no_error(how, lost):
    hosts = make_hosts(num_single_blocks=3)
    pool = loopback_driver(hosts)
    getattr(hosts[lost], how)()
    many = [Sequence(range(4)) for _ in range(6)]
    assert not pool.allocate(many)
    assert {sequence.dp_rank for sequence in many} == {None}
    assert pool.allocate(many[:2])
    assert not pool.allocate(many[2:])


def test_a_fork_of_what_was_lost_holds_nothing_and_begins_anew():
    hosts = make_hosts()
    pool = loopback_driver(hosts)
    parent = computed_on(pool, 0)
    hosts[0].kill()
    child = parent.fork()
    assert (parent.single_block_id, child.single_block_id) == (None, None)
    assert pool.num_lost_sequences == 1
    assert pool.allocate([parent, child])
    assert (parent.dp_rank, child.dp_rank) == (1, 1)
    pool.check_integrity()


def test_publishing_what_was_lost_publishes_nothing():
    hosts = make_hosts()
    pool = loopback_driver(hosts)
    sequence = computed_on(pool, 0)
    hosts[0].kill()
    pool.cache(sequence)
    assert sequence.single_block_id is None
    assert pool.num_blocks_in_prefix_cache() == [0, 0]


def test_a_shared_prefix_is_looked_for_on_a_rank_that_is_left():
    hosts = make_hosts()
    pool = loopback_driver(hosts)
    pool.deallocate(computed_on(pool, 1))
    hosts[0].kill()
    sequence = on_rank(0, 9)
    pool.allocate_shared(sequence)
    assert (sequence.dp_rank, sequence.kv_state.num_computed_tokens) == (1, 8)


# -- interrupts ------------------------------------------------------------------------------------


class Interrupted:
    """A reply whose reader is interrupted, once."""

    def __init__(self, reply):
        self.reply, self.is_first = reply, True

    def result(self):
        if self.is_first:
            self.is_first = False
            raise KeyboardInterrupt
        return self.reply.result()


@pytest.mark.parametrize("arrives", [True, False])
def test_a_call_that_is_interrupted_while_it_is_sent_loses_nothing(monkeypatch, arrives):
    pool = loopback_driver(make_hosts())
    sequence, rank = on_rank(0), pool.ranks[0]
    send = rank.send

    def interrupted(call):
        if arrives:
            send(call)
        raise KeyboardInterrupt

    monkeypatch.setattr(rank, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(sequence)
    monkeypatch.undo()
    assert pool.num_used_blocks() == [2, 0]
    assert sequence.kv_state.num_blocks == 2
    pool.deallocate(sequence)
    assert pool.num_used_blocks() == [0, 0]


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_list_that_is_interrupted_over_ranks_loses_nothing(monkeypatch, interrupted):
    pool = loopback_driver(make_hosts())
    both = [on_rank(0), on_rank(1)]
    rank = pool.ranks[interrupted]
    send = rank.send
    monkeypatch.setattr(rank, "send", lambda call: Interrupted(send(call)))
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(both)
    monkeypatch.undo()
    assert sum(pool.num_used_blocks()) == 2, "the other rank's part was taken back"
    assert [s.kv_state.num_blocks for s in both] == [2 * (i == interrupted) for i in range(2)]
    assert pool.allocate(both)
    pool.deallocate(both)
    assert pool.num_used_blocks() == [0, 0]


def test_a_release_that_is_interrupted_reads_every_answer(monkeypatch):
    pool = loopback_driver(make_hosts())
    both = [on_rank(0), on_rank(1)]
    assert pool.allocate(both)
    rank = pool.ranks[0]
    send = rank.send
    monkeypatch.setattr(rank, "send", lambda call: Interrupted(send(call)))
    with pytest.raises(KeyboardInterrupt):
        pool.deallocate(both)
    monkeypatch.undo()
    assert both[1].single_block_id is None
    assert pool.num_used_blocks() == [0, 0]
    assert both[0].single_block_id is None


# -- resets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loses", [True, False])
def test_a_reset_reaches_a_rank_that_was_lost_meanwhile(loses):
    hosts = make_hosts()
    pool = loopback_driver(hosts)
    pool.deallocate(computed_on(pool, 0))
    hosts[0].freeze()
    if loses:
        pool.monitor.beat()
    assert pool.reset_prefix_cache() == [0, 0], "nobody hears it there"
    hosts[0].thaw()
    pool.monitor.beat()
    assert pool.ranks[0].lost is None
    again = on_rank(0, 9)
    assert pool.allocate(again)
    assert again.dp_rank == 0
    assert again.kv_state.num_computed_tokens == 0
    again.kv_state.num_computed_tokens = 9
    pool.deallocate(again)
    assert pool.num_blocks_in_prefix_cache() == [2, 0], "what came after it stays"
    hosts[0].freeze()
    pool.monitor.beat()
    hosts[0].thaw()
    pool.monitor.beat()
    assert pool.num_blocks_in_prefix_cache() == [2, 0], "it is done once"


def test_an_owed_reset_is_said_until_it_is_heard(monkeypatch):
    hosts = make_hosts()
    pool = loopback_driver(hosts)
    pool.deallocate(computed_on(pool, 0))
    hosts[0].freeze()
    pool.reset_prefix_cache()
    hosts[0].thaw()
    rank = pool.ranks[0]
    send = rank.send
    faults = iter([True])
    monkeypatch.setattr(
        rank, "send", lambda call: Failed(ReplyLostError()) if next(faults, False) else send(call)
    )
    pool.monitor.beat()
    again = on_rank(0, 9)
    assert pool.allocate(again)
    assert (again.dp_rank, again.kv_state.num_computed_tokens) == (0, 0)


def test_a_reset_reaches_what_others_left_on_a_rank_that_restarted():
    hosts = make_hosts()
    pool, other = (loopback_driver(hosts, name) for name in ("one", "two"))
    hosts[0].kill()
    pool.monitor.beat()
    hosts[0].restart()
    other.monitor.beat()
    other.deallocate(computed_on(other, 0))
    pool.reset_prefix_cache()
    pool.monitor.beat()
    again = on_rank(0, 9)
    assert pool.allocate(again)
    assert (again.dp_rank, again.kv_state.num_computed_tokens) == (0, 0)


def test_many_threads_with_lost_answers_lose_no_rank():
    host = MortalHost(PoolConfig(num_blocks=400, block_size=4, max_num_seqs=64).with_seed(), 0)
    rank = LoopbackRank(host)
    inject(rank, Faults(random.Random(5), lost_reply=0.1, lost_call=0.1))
    errors = []

    def work(first):
        try:
            for turn in range(150):
                sequence = Sequence(np.arange(8) + 1000 * first + turn)
                assert rank.allocate([sequence], [8]).result()
                rank.release([sequence], publish=False).result()
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (rank.lost, rank.session) == (None, 0)
    assert host.info().stats.num_used_blocks == 0
    host.close()
