"""Copies of state without a rank: which are due, and which become checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

from raykv.core import Sequence
from raykv.core.linear_state import LinearStatePrefixCache
from raykv.core.state_copies import Save, StateCopies


class Bench:
    """A cache, what is owed, and one sequence that has computed eight tokens."""

    def __init__(self):
        self.cache = LinearStatePrefixCache(9)
        self.copies = StateCopies(self.cache)
        self.sequence = self.start()
        self.live = self.sequence.linear_state_slot

    def start(self):
        sequence = Sequence(range(20))
        sequence.linear_state_slot = int(self.cache.acquire_live_slot().detach()[0])
        sequence.kv_state.num_computed_tokens = 8
        return sequence

    def pin(self, slot):
        return self.cache.slots.pin(np.array([slot]))

    def save(self, name=b"eight", num_tokens=8):
        save = Save(self.sequence, num_tokens, self.cache.reserve_checkpoint(name), name)
        self.copies.add_save(save, self.live, self.pin(self.live))
        return save

    def fork(self):
        """A copy that is no save; its target."""
        child = self.start()
        target = child.linear_state_slot
        self.copies.add("", self.live, target, self.pin(self.live), self.pin(target))
        return target


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.cache.check_integrity()


def test_a_save_can_be_found_once_its_copy_is_acknowledged(bench):
    save = bench.save()
    assert not bench.copies.is_idle
    assert bench.copies.take("") == [(bench.live, save.reservation.slot)]
    assert not bench.cache.contains(b"eight")
    bench.copies.acknowledge("")
    assert bench.cache.contains(b"eight")
    assert bench.copies.is_idle
    assert bench.cache.num_reclaimable == 1
    assert bench.copies.take("") == []


def test_a_state_that_moved_on_is_not_saved(bench):
    bench.save()
    bench.sequence.kv_state.num_computed_tokens = 9
    assert bench.copies.take("") == []
    assert bench.copies.is_idle
    assert bench.cache.num_pending == 0


def test_saves_are_taken_without_the_others(bench):
    save, target = bench.save(), bench.fork()
    assert bench.copies.take_saves("") == [(bench.live, save.reservation.slot)]
    assert bench.copies.take_saves("") == []
    bench.copies.fail("")
    assert not bench.cache.contains(b"eight")
    assert bench.cache.num_skipped_total == 1
    assert bench.copies.take("") == [(bench.live, target)], "as if nothing had failed"


def test_a_failure_leaves_a_later_copy_to_the_same_slot_alone(bench):
    save = bench.save(name=None)
    bench.copies.take("")
    bench.sequence.kv_state.num_computed_tokens = save.num_tokens = 12
    bench.copies.add_save(save, bench.live, bench.pin(bench.live))
    bench.copies.fail("")
    assert bench.cache.num_pending == 1
    assert bench.copies.take("") == [(bench.live, save.reservation.slot)]
    bench.copies.acknowledge("")
    assert save.is_copied


def test_what_is_acknowledged_is_what_was_handed_out(bench):
    save = bench.save(name=None)
    bench.copies.take("")
    bench.sequence.kv_state.num_computed_tokens = save.num_tokens = 12
    bench.copies.add_save(save, bench.live, bench.pin(bench.live))
    bench.copies.acknowledge("")
    assert not save.is_copied, "the slot holds the state at 8"


def test_a_release_gives_up_what_is_due_and_not_what_is_under_way(bench):
    under_way = bench.save(b"first")
    bench.copies.take("")
    due, target = bench.save(b"second"), bench.fork()
    bench.copies.release(bench.sequence, bench.live)
    assert due.reservation.is_done
    assert bench.copies.take("") == [(bench.live, target)], "a fork's copy from it is still due"
    bench.copies.acknowledge("")
    assert bench.cache.contains(under_way.name)
    assert not bench.cache.contains(due.name)


def test_a_slot_that_is_given_up_while_it_is_written_comes_back_afterwards(bench):
    save = bench.save(name=None)
    bench.copies.take("")
    num_free = bench.cache.num_free_slots
    save.give_up()
    assert bench.cache.num_free_slots == num_free
    bench.copies.acknowledge("")
    assert bench.cache.num_free_slots == num_free + 1


def test_a_driver_that_is_forgotten_owes_nothing(bench):
    bench.save(b"first")
    bench.copies.take("")
    bench.save(b"second")
    bench.fork()
    bench.copies.forget("")
    assert bench.copies.is_idle
    assert bench.cache.num_pending == bench.cache.num_checkpoints == 0
    assert bench.cache.num_lingering_slots == 0
    for call in (bench.copies.acknowledge, bench.copies.fail, bench.copies.forget):
        call("")
    assert bench.copies.take("") == bench.copies.take_saves("") == []
