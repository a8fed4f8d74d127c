"""Lists over several ranks: all or nothing, and of two drivers at odds one gets through."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from raykv import BlockManagerPool, PoolConfig, Sequence
from raykv.errors import RankUnavailableError
from raykv.rank_host import RankHost
from raykv.testing import LoopbackRank

TOTAL = 9
SIZE = 4
WAIT_S = 60


class SharedRank(LoopbackRank):
    """A rank that several drivers talk to from their threads: one call at a time, each recorded.

    Attributes:
        calls: operations and the ranks they went to, of one driver.
        after_allocate: called when an allocation was applied, before its answer is read.
    """

    def __init__(self, host, driver_id, lock, calls):
        super().__init__(host, driver_id)
        self.lock = lock
        self.calls = calls
        self.after_allocate = lambda: None

    def send(self, call):
        with self.lock:
            reply = super().send(call)
        self.calls.append((call.operation, self.dp_rank))
        if call.operation == "allocate":
            self.after_allocate()
        return reply


def make_pools(num_ranks, names, on_rank_loss="fail_over"):
    """One pool per driver over the same ranks, and each driver's calls."""
    config = PoolConfig(
        dp_size=num_ranks,
        num_blocks=TOTAL + 1,
        block_size=SIZE,
        num_single_blocks=9,
        ray={"on_rank_loss": on_rank_loss},
    ).with_seed()
    hosts = [RankHost(config, rank, epoch=1) for rank in range(num_ranks)]
    locks = [threading.Lock() for _ in hosts]
    calls = {name: [] for name in names}
    pools = [
        BlockManagerPool(
            config,
            [
                SharedRank(host, name, lock, calls[name])
                for host, lock in zip(hosts, locks, strict=True)
            ],
        )
        for name in names
    ]
    return pools, list(calls.values())


def make_list(ranks, num_tokens=TOTAL * SIZE):
    """A sequence per rank; by default each fills its rank."""
    sequences = [Sequence(np.arange(num_tokens)) for _ in ranks]
    for sequence, rank in zip(sequences, ranks, strict=True):
        sequence.dp_rank = rank
    return sequences


def assert_nothing_is_held(pools):
    for pool in pools:
        pool.check_integrity()
        stats = pool.stats().total
        assert stats.num_used_blocks == 0
        assert stats.num_free_blocks == TOTAL * len(pool.ranks)
        assert stats.num_free_single_blocks == 8 * len(pool.ranks)


@pytest.fixture
def rests(monkeypatch):
    """The pauses between two tries, in seconds; none is made."""
    made = []
    monkeypatch.setattr("raykv.list_allocation.time", SimpleNamespace(sleep=made.append))
    return made


# -- one driver -----------------------------------------------------------------------------------


def test_a_list_that_fits_is_asked_for_once_on_all_ranks(rests):
    [pool], [calls] = make_pools(3, ["a"])
    assert pool.allocate(make_list([2, 0, 1]))
    assert calls == [("allocate", 0), ("allocate", 1), ("allocate", 2)]
    assert rests == []


def test_where_a_part_was_granted_ranks_are_asked_again_in_ascending_order(rests):
    (pool, other), (calls, _) = make_pools(4, ["a", "b"])
    [taken] = make_list([2])
    assert other.allocate(taken)
    wanted = make_list([3, 2, 1, 0])
    assert not pool.allocate(wanted)
    assert calls == [
        *[("allocate", rank) for rank in range(4)],
        *[("undo", rank) for rank in (0, 1, 3)],
        *[("allocate", rank) for rank in range(3)],  # up to the one that is short
        *[("undo", rank) for rank in (0, 1)],
    ]
    assert [sequence.dp_rank for sequence in wanted] == [3, 2, 1, 0]
    assert len(rests) == 1
    assert 0 < rests[0] < 0.01
    other.deallocate(taken)
    assert_nothing_is_held([pool, other])


def test_a_part_freed_meanwhile_is_taken_on_the_second_try(monkeypatch):
    (pool, other), _ = make_pools(2, ["a", "b"])
    [taken] = make_list([1])
    assert other.allocate(taken)
    monkeypatch.setattr(
        "raykv.list_allocation.time", SimpleNamespace(sleep=lambda _: other.deallocate(taken))
    )
    [running] = make_list([0], SIZE)
    assert pool.allocate(running)
    running.append(1)
    [free] = make_list([None], SIZE)
    wanted = [running, free, *make_list([0], SIZE), *make_list([1], SIZE * (TOTAL - 1))]
    assert pool.allocate(wanted)
    assert [sequence.dp_rank for sequence in wanted] == [0, 1, 0, 1]
    for sequence in wanted:
        assert sequence.owner is pool
        sequence.reset()
    assert_nothing_is_held([pool, other])


def test_no_second_try_where_nothing_was_granted_or_one_rank_was_asked(rests):
    (pool, other), (calls, _) = make_pools(2, ["a", "b"])
    taken = make_list([0, 1])
    assert other.allocate(taken)
    assert not pool.allocate(make_list([0, 1]))
    assert not pool.allocate(make_list([0, 0], SIZE))
    assert calls == [("allocate", 0), ("allocate", 1), ("allocate", 0)]
    assert rests == []
    other.deallocate(taken)


def test_no_second_try_after_an_error(rests):
    [pool], [calls] = make_pools(2, ["a"], "report")
    pool.ranks[1]._is_closed = True
    with pytest.raises(RankUnavailableError):
        pool.allocate(make_list([0, 1]))
    assert calls == [("allocate", 0), ("allocate", 1), ("undo", 0)]
    assert rests == []
    pool.ranks[1]._is_closed = False
    pool.monitor.beat()
    assert_nothing_is_held([pool])


# -- two drivers ----------------------------------------------------------------------------------


class Round:
    """Lets two drivers run into each other, and keeps one from outrunning the other's pause.

    Nobody goes on after the first allocation of a round before the other has done its own, and
    nobody's pause ends before the other pauses, too, or is done.
    """

    def __init__(self):
        self.changed = threading.Condition()
        self.arrived, self.paused, self.num_pauses = set(), set(), 0

    def start(self):
        self.arrived.clear()
        self.paused.clear()

    def meet(self):
        self._wait(self.arrived)

    def pause(self, _seconds=0):
        self.num_pauses += 1
        self._wait(self.paused)

    def leave(self):
        with self.changed:
            self.arrived.add(threading.current_thread())
            self.paused.add(threading.current_thread())
            self.changed.notify_all()

    def _wait(self, line):
        with self.changed:
            line.add(threading.current_thread())
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(line) == 2, WAIT_S)


def run_both(work):
    """Run ``work(0)`` and ``work(1)`` on threads; raises what either raised."""
    errors = []

    def run(side):
        try:
            work(side)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(side,), daemon=True) for side in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT_S)
        assert not thread.is_alive()
    assert errors == []


@pytest.mark.parametrize(
    ("num_ranks", "wants"),
    [
        (2, ([0, 1], [0, 1])),
        (3, ([0, 1, 2], [2, 1, 0])),
        (3, ([0, 1, 2], [1, 2])),
        (4, ([0, 1, 2], [1, 2, 3])),
    ],
)
def test_of_two_drivers_at_odds_one_gets_through_every_time(num_ranks, wants, monkeypatch):
    pools, _ = make_pools(num_ranks, ["a", "b"])
    meeting = Round()
    monkeypatch.setattr("raykv.list_allocation.time", SimpleNamespace(sleep=meeting.pause))
    for pool, wanted in zip(pools, wants, strict=True):
        pool.ranks[min(wanted)].after_allocate = meeting.meet
    outcomes, together = [], threading.Barrier(2, timeout=WAIT_S)

    def drive(side):
        for number in range(150):
            sequences = make_list(wants[side])
            if together.wait() == 0:
                meeting.start()
                outcomes.append([None, None])
            together.wait()
            outcomes[number][side] = pools[side].allocate(sequences)
            meeting.leave()
            together.wait()
            assert sum(outcomes[number]) == 1, "they cannot both have a rank that both fill"
            if outcomes[number][side]:
                pools[side].deallocate_without_cache(sequences)
            else:
                assert all(sequence.single_block_id is None for sequence in sequences)
            together.wait()
            pools[side].check_integrity()

    run_both(drive)
    assert len(outcomes) == 150
    assert_nothing_is_held(pools)
    assert meeting.num_pauses > 0, "they ran into each other"


def test_drivers_that_try_again_all_come_to_their_end():
    """With the real pauses, and no steering: a round may be lost to bad luck, but no driver is."""
    pools, _ = make_pools(2, ["a", "b"])

    def drive(side):
        for _ in range(60):
            sequences = make_list([0, 1])
            while not pools[side].allocate(sequences):
                assert all(sequence.single_block_id is None for sequence in sequences)
            assert [sequence.dp_rank for sequence in sequences] == [0, 1]
            pools[side].deallocate_without_cache(sequences)

    run_both(drive)
    assert_nothing_is_held(pools)
