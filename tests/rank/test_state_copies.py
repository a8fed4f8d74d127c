"""Copies of recurrent state on a rank that only keeps books: each slot gets what it is named for.

A world of numbers stands for the memory: a slot holds the number of tokens that its state covers.
"""

from __future__ import annotations

import pytest

from raykv.config import PoolConfig
from raykv.core.sequence import Sequence
from raykv.rank import RankKV

BLOCK_SIZE = 4


class World:
    """A rank whose driver copies when told, and one sequence."""

    def __init__(self, num_prompt_tokens=6):
        self.kv = RankKV(
            PoolConfig(
                num_blocks=100,
                block_size=BLOCK_SIZE,
                max_num_seqs=4,
                linear_state={
                    "num_slots": 16,
                    "match": "deepest",
                    "stride_tokens": 64,
                    "at_prompt_end": False,
                    "at_branch": False,
                },
            )
        )
        self.memory: dict[int, int] = {}
        self.in_flight: list[tuple[int, int]] = []
        self.sequence = self.admit(num_prompt_tokens)

    def admit(self, num_tokens):
        sequence = Sequence(range(num_tokens))
        assert self.kv.allocate(sequence)
        return sequence

    def compute(self, num_tokens, *, publishes=True):
        sequence = self.sequence
        while sequence.num_tokens <= num_tokens:
            sequence.append(sequence.num_tokens)
        assert self.kv.allocate(sequence)
        sequence.kv_state.num_computed_tokens = num_tokens
        self.memory[sequence.linear_state_slot] = num_tokens
        if publishes:
            self.kv.cache(sequence)

    def take(self):
        """The driver begins to copy: sources are read now, targets written at the end."""
        taken = self.kv.take_state_copies("")
        self.in_flight += [(self.memory[source], target) for source, target in taken]
        return taken

    def done(self):
        for value, target in self.in_flight:
            self.memory[target] = value
        self.in_flight = []
        self.kv.ack_state_transfers()

    def resumed(self, num_tokens=40):
        """Where an equal prompt goes on from, and what the state there covers."""
        sequence = self.admit(num_tokens)
        num_computed = sequence.kv_state.num_computed_tokens
        copies = self.kv.take_state_copies("")
        return num_computed, [self.memory[source] for source, _ in copies]

    def check(self, num_tokens):
        self.kv.check_integrity()
        assert self.resumed() == (num_tokens, [num_tokens] if num_tokens else [])


def test_a_rolling_checkpoint_is_what_was_copied_last():
    world = World()
    for boundary in (8, 12):
        world.compute(boundary)
        world.take()
        world.done()
    world.compute(13)
    world.kv.deallocate(world.sequence)
    world.check(12)


def test_a_copy_that_is_done_late_is_none_of_the_next_boundary():
    """Of 8 tokens, on its way when 12 are: it must not be found as the state of 12."""
    world = World()
    world.compute(8)
    assert world.take()
    world.compute(12)
    world.done()
    world.compute(13)
    world.kv.deallocate(world.sequence)
    world.take()
    world.done()
    world.check(0)


@pytest.mark.parametrize("is_late", [True, False])
def test_the_next_copy_counts_when_it_is_done(is_late):
    world = World()
    world.compute(8)
    world.take()
    if not is_late:
        world.done()
    world.compute(12)
    world.take()
    world.done()
    world.compute(13)
    world.kv.deallocate(world.sequence)
    world.check(12)


def test_a_sequence_that_ends_at_its_boundary_owes_no_copy():
    """Its slot becomes the checkpoint; the slot that was reserved is somebody else's then."""
    world = World()
    world.compute(6)
    world.compute(8)
    world.kv.deallocate(world.sequence)
    others = {world.admit(6).linear_state_slot for _ in range(3)}
    assert world.take() == []
    assert len(others) == 3
    world.kv.check_integrity()


@pytest.mark.parametrize("end", ["deallocate", "deallocate_without_cache"])
def test_a_slot_is_not_handed_out_while_a_copy_writes_to_it(end):
    world = World()
    world.compute(8)
    [(_, target)] = world.take()
    getattr(world.kv, end)(world.sequence)
    others = [world.admit(6).linear_state_slot for _ in range(3)]
    assert target not in others
    world.kv.check_integrity()
    world.done()
    free = world.kv.linear_state.num_free_slots
    assert world.kv.linear_state.num_pending == 0
    assert free == 15 - 3 - (end == "deallocate")
    world.kv.check_integrity()


def test_the_same_boundary_twice_is_one_copy():
    world = World()
    world.compute(8)
    world.kv.cache(world.sequence)
    assert len(world.take()) == 1
    world.kv.cache(world.sequence)
    assert world.take() == []
    world.done()
    world.compute(9)
    world.kv.deallocate(world.sequence)
    world.check(8)


def test_copies_that_failed_make_no_checkpoint_and_leave_no_slot():
    world = World()
    world.compute(8)
    world.take()
    world.compute(12)  # due as well, into the same slot
    world.kv.fail_state_transfers()
    world.in_flight = []
    assert world.take() == []
    world.compute(13)
    world.kv.deallocate(world.sequence)
    assert world.kv.linear_state.num_free_slots == 15
    world.check(0)


def test_after_a_failure_the_next_boundary_has_its_checkpoint():
    world = World()
    world.compute(8)
    world.take()
    world.in_flight = []
    world.kv.fail_state_transfers()
    world.compute(12)
    world.take()
    world.done()
    world.compute(14)
    world.kv.deallocate(world.sequence)
    world.check(12)


def test_a_state_that_has_moved_on_is_not_copied():
    world = World()
    world.compute(8)
    world.compute(9)
    assert world.take() == []
    world.kv.deallocate(world.sequence)
    world.check(0)


def test_the_world_would_notice_a_wrong_state():
    world = World()
    world.compute(8)
    world.take()
    world.done()
    world.compute(9)
    world.kv.deallocate(world.sequence)
    world.memory = dict.fromkeys(world.memory, 7)
    with pytest.raises(AssertionError):
        world.check(8)
