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

# Mostly one long run of tokens: whatever one sequence leaves, the others find.
prompts = st.one_of(
    *[st.integers(1, 14).map(lambda n: [0] * n)] * 6,
    st.builds(lambda n, tail: [0] * n + tail, st.integers(1, 12), st.lists(st.integers(0, 1))),
)
index = st.integers(0, 10**6)
drivers = st.sampled_from(DRIVERS)
spaces = st.sampled_from([{}] * 20 + [{"tenant": "a"}, {"lora": "a"}, {"multimodal": ((3, b"x"),)}])
# What a worker does for its driver before it computes: all there is to copy; the same, and it says
# so later; what was fetched earlier, and the rest later.
copying = st.sampled_from(["copy", "copy", "unsaid", "late"])


class StatesMachine(RuleBasedStateMachine):
    """See the module; ``IS_SPLIT`` as with compressed checkpoints."""

    IS_SPLIT = False

    @initialize(
        num_blocks=st.integers(8, 40),
        block_size=st.integers(1, 3),
        stride_blocks=st.integers(1, 3),
        num_seqs=st.integers(2, 4),
        num_more_slots=st.integers(0, 5),
        match=st.sampled_from(["contiguous", "deepest"]),
        rules=st.sampled_from([(True,) * 4] * 3) | st.tuples(*[st.booleans()] * 4),
    )
    def start(self, num_blocks, block_size, stride_blocks, num_seqs, num_more_slots, match, rules):
        names = ("at_stride", "at_prompt_end", "at_generation_end", "at_branch")
        kv = make_rank(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=num_seqs,
            num_slots=num_seqs + 1 + num_more_slots,
            stride_tokens=stride_blocks * block_size,
            match=match if rules[0] else "deepest",
            **dict(zip(names, rules, strict=True)),
        )
        self.world = StateWorld(kv, split=self.IS_SPLIT)
        self.kv = kv
        self.versions = 0
        self.serve(tokens=[0] * 7, space={}, driver="", generated=[0] * 4, keep=False)

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
        before = (
            cache.num_live_slots,
            cache.num_pending,
            cache.num_checkpoints,
            list(cache.slots._recent),
            list(cache.slots._spare),
        )
        if not self.world.allocate([*running, *new]):
            assert before == (
                cache.num_live_slots,
                cache.num_pending,
                cache.num_checkpoints,
                list(cache.slots._recent),
                list(cache.slots._spare),
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
    @rule(number=index, how=copying, publish=st.booleans(), copy=st.booleans())
    def compute(self, number, how, publish, copy):
        """Up to the next checkpoint, or the end."""
        sequence = self.pick(number)
        if not self.world.allocate([sequence]):
            return
        stop = self.kv.next_checkpoint(sequence) or sequence.num_tokens
        self.world.compute(sequence, stop - sequence.kv_state.num_computed_tokens, how=how)
        if publish:
            self.kv.cache(sequence)
        if copy:
            self.world.copy(sequence.driver_id)

    @precondition(is_any)
    @rule(number=index, count=st.integers(1, 5), how=copying, publish=st.booleans())
    def compute_some(self, number, count, how, publish):
        """A worker that does not care where checkpoints are due."""
        sequence = self.pick(number)
        if self.world.allocate([sequence]):
            self.world.compute(sequence, count, how=how)
            if publish:
                self.kv.cache(sequence)

    @precondition(is_any)
    @rule(number=index, token=st.sampled_from([0, 0, 0, 1]), hows=st.lists(copying, max_size=6))
    def decode(self, number, token, hows):
        sequence = self.pick(number)
        for how in hows:
            if sequence.kv_state.num_computed_tokens == sequence.num_tokens:
                if sequence.num_tokens >= self.kv.config.max_tokens_per_sequence:
                    return
                sequence.append(token)
            if not self.world.allocate([sequence]):
                return
            self.world.compute(sequence, how=how)
            self.kv.checkpoint([sequence])

    @rule(
        tokens=prompts,
        space=spaces,
        driver=drivers,
        generated=st.lists(st.integers(0, 1)),
        keep=st.booleans(),
    )
    def serve(self, tokens, space, driver, generated, keep):
        """A whole life, if there is room for it, or the first part of one."""
        sequence = self.new(tokens, space, driver)
        if self.world.allocate([sequence]):
            self.world.prefill(sequence)
            number = self.world.held().index(sequence)
            for token in generated:
                self.decode(number=number, token=token, hows=["copy"])
            if not keep:
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

    # -- what ends prefixes ---------------------------------------------------------------------

    @rule(how=st.sampled_from(["reset", "version", "retire", "sleep", "driver"]), number=index)
    def end(self, how, number):
        """One rule for all, or nothing would ever be hit."""
        if how == "reset":
            self.world.reset()
        elif how == "version":
            self.versions += 1
            self.kv.begin_version(self.versions)
        elif how == "retire":
            self.kv.linear_state.retire(self.versions - number % 3)
        elif how == "driver":
            self.world.forget_driver(DRIVERS[number % 2])
        else:
            self.sleep()

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
