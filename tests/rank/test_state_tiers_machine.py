"""Histories of recurrent state on one rank with a tier behind it.

As test_states_machine.py, and besides, a copier reads slots that are pinned and writes those that
loads go to, at any time. What it reads stays as it is; what it wrote is what sequences go on from.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from raykv.core import Sequence
from raykv.tiering.state_tiers import CheckpointPin, StateLoadTarget, StateTiers

from .state_world import cells
from .test_states_machine import StatesMachine, drivers, index, prompts, spaces


@dataclass(eq=False)
class Load:
    sequence: Sequence
    target: StateLoadTarget
    state: tuple  # what the tier has
    is_written: bool = False


class StateTiersMachine(StatesMachine):
    """See the module."""

    def __init__(self):
        super().__init__()
        self.pins: list[tuple[CheckpointPin, object]] = []
        self.loads: list[Load] = []

    @property
    def tiers(self):
        return StateTiers(self.kv.states, self.kv.block_manager)

    def state_at(self, sequence, num_tokens):
        """The state behind a sequence's first tokens, computed under its weights, since resets."""
        space, now = sequence.namespace, self.world.num_resets
        return cells(sequence.token_ids, space, 0, num_tokens, space.weights_version, now)

    def someone(self, number, tokens, space, driver):
        """A sequence that holds blocks, or one that waits in line."""
        held = self.world.held()
        place = number % (len(held) + 1)
        return held[place] if place < len(held) else self.new(tokens, space, driver)

    @rule(number=index, tokens=prompts, space=spaces, driver=drivers)
    def pin(self, number, tokens, space, driver):
        one = self.someone(number, tokens, space, driver)
        for pin in self.tiers.pin_checkpoints(one.token_ids, one.namespace):
            assert self.world.memory[pin.slot] == self.state_at(one, pin.num_tokens)
            self.pins.append((pin, self.world.memory[pin.slot]))

    @precondition(lambda self: self.pins)
    @rule(number=index)
    def unpin(self, number):
        pin, _ = self.pins.pop(number % len(self.pins))
        pin.release()
        self.world.overwrite()

    @rule(number=index, steps=index, tokens=prompts, space=spaces, driver=drivers)
    def begin_load(self, number, steps, tokens, space, driver):
        one, step = self.someone(number, tokens, space, driver), self.tiers.step_tokens
        num_steps = (one.num_tokens - 1) // step
        if num_steps:
            num_tokens = step * (1 + steps % num_steps)
            target = self.tiers.begin_load(one, num_tokens)
            if target is not None:
                state = self.state_at(one, num_tokens)
                self.loads.append(Load(one, target, state, is_written=target.existing))
            self.world.overwrite()

    @precondition(lambda self: self.loads)
    @rule(number=index)
    def write(self, number):
        load = self.loads[number % len(self.loads)]
        self.world.memory[load.target.slot] = load.state
        load.is_written = True

    @precondition(lambda self: self.loads)
    @rule(number=index, ok=st.sampled_from([True, True, True, False]), nobody=st.booleans())
    def finish_load(self, number, ok, nobody):
        load = self.loads[number % len(self.loads)]
        if ok and not load.is_written:
            self.write(number)
        self.loads.remove(load)
        one, num_tokens = load.sequence, load.target.num_tokens
        before = one.kv_state.num_computed_tokens
        ended = self.tiers.finish_load(None if nobody else one, load.target, ok=ok)
        if ended:
            assert before < num_tokens == one.kv_state.num_computed_tokens
            assert ok
            self.world.expected[one] = load.state
        else:
            assert one.kv_state.num_computed_tokens == before
        self.world.overwrite()

    @rule()
    def resume(self):
        """A sequence that just began goes on from whatever was loaded since."""
        for one in self.world.held():
            for num_tokens in range(one.num_tokens, 0, -1):
                if self.tiers.resume(one, num_tokens):
                    self.world.expected[one] = self.state_at(one, num_tokens)
                    return

    @precondition(lambda self: StatesMachine.is_any(self) and not self.loads)
    @rule(tokens=prompts, space=spaces, driver=drivers, steps=index)
    def serve_loaded(self, tokens, space, driver, steps):
        """A whole load for a sequence that was just admitted."""
        one = self.new(tokens, space, driver)
        if self.world.allocate([one]):
            number = self.world.held().index(one)
            self.begin_load(number, steps, tokens, space, driver)
            if self.loads:
                self.finish_load(0, ok=True, nobody=False)

    @invariant()
    def what_the_copier_reads_and_wrote_stays(self):
        for pin, state in self.pins:
            assert self.world.memory[pin.slot] == state
        for load in self.loads:
            assert not load.is_written or self.world.memory[load.target.slot] == load.state

    def teardown(self):
        while self.pins:
            self.unpin(0)
        while self.loads:
            self.finish_load(0, ok=False, nobody=True)
        super().teardown()


class SplitStateTiersMachine(StateTiersMachine):
    """With live states apart from the slots."""

    IS_SPLIT = True


TestStateTiersMachine = StateTiersMachine.TestCase
TestStateTiersMachine.settings = settings(max_examples=100, stateful_step_count=30)
TestSplitStateTiersMachine = SplitStateTiersMachine.TestCase
TestSplitStateTiersMachine.settings = settings(max_examples=100, stateful_step_count=30)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestLongStateTiersMachine(StateTiersMachine.TestCase):
    settings = settings(max_examples=2500, stateful_step_count=80, deadline=None)
