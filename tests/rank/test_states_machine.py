"""Histories of recurrent state on one rank, over a memory that says what lies where.

Two drivers with a worker each, which fetch, do and acknowledge copies at any time, at most too
late; what nobody holds is overwritten at once. After each step every sequence's state is exactly
that of its computed tokens, and every checkpoint that of the prefix it names.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.core import Namespace, Sequence
from raykv.errors import RequestError

from .state_world import StateWorld, make_rank

DRIVERS = ["", "other"]

# Long runs of one token meet in the cache, the tails make them branch.
prompts = st.one_of(
    st.builds(lambda n, tail: [0] * n + tail, st.integers(1, 12), st.lists(st.integers(0, 1))),
    st.integers(1, 12).map(lambda n: [0] * n),
)
index = st.integers(0, 10**6)
drivers = st.sampled_from(DRIVERS)
spaces = st.sampled_from([{}] * 6 + [{"tenant": "a"}, {"lora": "a"}, {"multimodal": ((3, b"x"),)}])


class StatesMachine(RuleBasedStateMachine):
    """See the module; ``IS_SPLIT`` as with compressed checkpoints."""

    IS_SPLIT = False

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.integers(1, 3),
        stride_blocks=st.integers(1, 3),
        num_seqs=st.integers(2, 5),
        num_more_slots=st.integers(0, 6),
        match=st.sampled_from(["contiguous", "deepest"]),
        rules=st.tuples(*[st.booleans()] * 4) | st.just((True,) * 4),
    )
    def start(self, num_blocks, block_size, stride_blocks, num_seqs, num_more_slots, match, rules):
        names = ("at_stride", "at_prompt_end", "at_generation_end", "at_branch")
        kv = make_rank(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=num_seqs,
            num_slots=num_seqs + 1 + num_more_slots,
            stride_tokens=stride_blocks * block_size,
            match=match,
            **dict(zip(names, rules, strict=True)),
        )
        self.world = StateWorld(kv, split=self.IS_SPLIT)
        self.kv = kv
        self.versions = 0

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for sequence in self.world.held():
            self.world.release(sequence)
            self.world.check()
        for driver in DRIVERS:
            self.world.copy(driver)
        self.world.check()
        self.world.check_drained()

    def is_any(self):
        return hasattr(self, "world") and bool(self.world.held())

    def pick(self, number):
        held = self.world.held()
        return held[number % len(held)]

    def cut(self, tokens):
        return tokens[: self.kv.config.max_tokens_per_sequence]

    def new(self, tokens, space, driver):
        version = self.kv.weights_version
        sequence = Sequence(self.cut(tokens), namespace=Namespace(weights_version=version, **space))
        sequence.driver_id = driver
        return sequence

    # -- sequences ------------------------------------------------------------------------------

    @rule(tokens=prompts, space=spaces, driver=drivers)
    def admit(self, tokens, space, driver):
        self.world.allocate([self.new(tokens, space, driver)])

    @rule(prompts=st.lists(prompts, min_size=1, max_size=4), space=spaces, driver=drivers)
    def admit_list(self, prompts, space, driver):
        """With those that run, so that hits, growth and live slots are one request."""
        running = [one for one in self.world.held() if one.driver_id == driver]
        new = [self.new(tokens, space, driver) for tokens in prompts]
        cache = self.kv.linear_state
        before = cache.num_live_slots, cache.num_pending, cache.num_checkpoints, list(cache.slots._recent)
        if not self.world.allocate([*running, *new]):
            assert before == (
                cache.num_live_slots, cache.num_pending, cache.num_checkpoints, list(cache.slots._recent)
            )
            assert all(one.single_block_id is one.linear_state_slot is None for one in new)

    @rule(tokens=prompts, space=spaces, driver=drivers)
    def admit_shared(self, tokens, space, driver):
        sequence = self.new(tokens, space, driver)
        self.kv.allocate_shared(sequence)
        if sequence.single_block_id is not None:
            self.world.begin(sequence)
            self.world.overwrite()

    @precondition(is_any)
    @rule(number=index, ack=st.booleans(), publish=st.booleans(), copy=st.booleans())
    def compute(self, number, ack, publish, copy):
        """Up to the next checkpoint, or the end."""
        sequence = self.pick(number)
        if not self.world.allocate([sequence]):
            return
        stop = self.kv.next_checkpoint(sequence) or sequence.num_tokens
        self.world.compute(sequence, stop - sequence.kv_state.num_computed_tokens, ack=ack)
        if publish:
            self.kv.cache(sequence)
        if copy:
            self.world.copy(sequence.driver_id)

    @precondition(is_any)
    @rule(number=index, count=st.integers(1, 5), publish=st.booleans())
    def compute_some(self, number, count, publish):
        """A worker that does not care where checkpoints are due, nor for copies that may wait."""
        sequence = self.pick(number)
        if not self.world.allocate([sequence]):
            return
        self.world.compute(sequence, count)
        if publish:
            self.kv.cache(sequence)

    @precondition(is_any)
    @rule(number=index, token=st.integers(0, 1), ack=st.booleans(), count=st.integers(1, 5))
    def decode(self, number, token, ack, count):
        sequence = self.pick(number)
        for _ in range(count):
            if sequence.num_tokens >= self.kv.config.max_tokens_per_sequence:
                return
            if sequence.kv_state.num_computed_tokens == sequence.num_tokens:
                sequence.append(token)
            if not self.world.allocate([sequence]):
                return
            self.world.compute(sequence, ack=ack)
            self.kv.checkpoint([sequence])

    @rule(tokens=prompts, space=spaces, driver=drivers, generated=st.lists(st.integers(0, 1)))
    def serve(self, tokens, space, driver, generated):
        """A whole life, if there is room for it."""
        sequence = self.new(tokens, space, driver)
        if self.world.allocate([sequence]):
            self.world.prefill(sequence)
            number = self.world.held().index(sequence)
            for token in generated:
                self.decode(number=number, token=token, ack=True, count=1)
            self.world.release(sequence)

    @precondition(is_any)
    @rule(number=index)
    def fork(self, number):
        self.world.fork(self.pick(number))

    @precondition(is_any)
    @rule(number=index, publish=st.booleans())
    def release(self, number, publish):
        self.world.release(self.pick(number), publish=publish)

    @precondition(is_any)
    @rule(number=index)
    def explain(self, number):
        report = self.kv.explain(self.pick(number))
        assert report.num_hit_tokens <= report.token_position

    # -- copies ---------------------------------------------------------------------------------

    @rule(driver=drivers)
    def take(self, driver):
        self.world.take(driver)

    @rule(driver=drivers)
    def execute(self, driver):
        self.world.execute(driver)

    @rule(driver=drivers)
    def acknowledge(self, driver):
        self.world.execute(driver)
        self.world.acknowledge(driver)

    @rule(driver=drivers)
    def copy(self, driver):
        self.world.copy(driver)

    @rule(driver=drivers)
    def save(self, driver):
        """As the engine does after a step, where the device fails."""
        self.world.fail_save(driver)

    @rule(driver=drivers)
    def forget_driver(self, driver):
        self.world.forget_driver(driver)

    # -- what ends prefixes ---------------------------------------------------------------------

    @rule()
    def reset(self):
        self.world.reset()

    @rule()
    def begin_version(self):
        self.versions += 1
        self.kv.begin_version(self.versions)

    @rule(back=st.integers(0, 2))
    def retire(self, back):
        self.kv.linear_state.retire(self.versions - back)

    @rule()
    def sleep(self):
        try:
            self.kv.sleep()
        except RequestError:
            return
        self.world.check_drained()
        assert self.kv.linear_state.num_checkpoints == 0
        self.world.num_resets += 1
        self.kv.wake_up()

    @invariant()
    def every_state_is_what_it_must_be(self):
        if hasattr(self, "world"):
            self.world.check()


class SplitStatesMachine(StatesMachine):
    """With live states apart from the slots."""

    IS_SPLIT = True


TestStatesMachine = StatesMachine.TestCase
TestStatesMachine.settings = settings(max_examples=150, stateful_step_count=30)
TestSplitStatesMachine = SplitStatesMachine.TestCase
TestSplitStatesMachine.settings = settings(max_examples=150, stateful_step_count=30)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestLongStatesMachine(StatesMachine.TestCase):
    settings = settings(max_examples=2500, stateful_step_count=80, deadline=None)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestLongSplitStatesMachine(SplitStatesMachine.TestCase):
    settings = settings(max_examples=2500, stateful_step_count=80, deadline=None)
