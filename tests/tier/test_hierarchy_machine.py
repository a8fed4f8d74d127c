"""Random histories of a pool with a host tier: whatever goes wrong, no sequence reads wrong KV."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raykv import Namespace, Sequence
from raykv.errors import RankUnavailableError, RequestError

from .machine_world import MachineWorld
from .tier_world import wait_until

tokens = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.builds(lambda n, tail: [0] * n + tail, st.integers(1, 8), st.lists(st.integers(0, 1))),
)
picks = st.integers(0, 10**6)


def if_any(deed):
    """Nothing where there is no sequence. No precondition, for timing may decide who got memory."""

    @functools.wraps(deed)
    def do(self, **arguments):
        if self.world.sequences:
            deed(self, **arguments)

    return do


class HierarchyMachine(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from(["local", "loopback"]),
        dp_size=st.integers(1, 2),
        num_blocks=st.integers(3, 10),
        num_host_blocks=st.integers(3, 14),
        block_size=st.integers(1, 3),
        word_faults=st.sampled_from([0.0, 0.0, 0.1]),
        seed=picks,
    )
    def begin(self, kind, num_host_blocks, seed, word_faults, **sizes):
        self.world = MachineWorld(
            kind,
            seed,
            word_faults=word_faults,
            host={"num_blocks": num_host_blocks},
            num_single_blocks=6,
            ray={"call_timeout_s": 0.02},
            **sizes,
        )
        self.pool = self.world.pool

    def teardown(self):
        if hasattr(self, "world"):
            try:
                self.world.drain()
            finally:
                self.world.close()

    def pick(self, number):
        return self.world.sequences[number % len(self.world.sequences)]

    # -- sequences ------------------------------------------------------------------------------

    @rule(token_ids=tokens)
    def arrive(self, token_ids):
        version = self.pool.weights_version()[0]
        sequence = Sequence(token_ids, namespace=Namespace(weights_version=version))
        with contextlib.suppress(RequestError):  # longer than the rank
            if self.pool.allocate(sequence):
                self.world.sequences.append(sequence)
                self.world.note(sequence)
        self.world.swap()

    def may_compute(self, sequence):
        return not sequence.is_loading or id(sequence) not in self.world.asked

    @rule(number=picks, more=st.lists(st.integers(0, 1), max_size=3), share=st.floats(0, 1))
    @if_any
    def compute(self, number, more, share):
        """While a load is planned too, as long as it was not started."""
        sequence = self.pick(number)
        state = sequence.kv_state
        sequence.extend(more)
        with contextlib.suppress(RequestError):
            if self.pool.allocate(sequence) and self.may_compute(sequence):
                self.world.swap()
                missing = sequence.num_tokens - state.num_computed_tokens
                self.world.write(sequence, state.num_computed_tokens + round(missing * share))
        self.world.swap()

    @rule(number=picks)
    @if_any
    def cache(self, number):
        self.pool.cache(self.pick(number))

    @rule(number=picks)
    @if_any
    def fork(self, number):
        parent = self.pick(number)
        child = parent.fork()
        if child.single_block_id is not None:
            self.world.note(parent)
            self.world.born[id(child)] = self.world.born[id(parent)]
            num_computed = child.kv_state.num_computed_tokens
            self.world.eras[id(child)] = self.world.eras[id(parent)][:num_computed]
            self.world.sequences.append(child)

    @rule(number=picks, publish=st.booleans())
    @if_any
    def end(self, number, publish):
        sequence = self.pick(number)
        self.world.forget(sequence)
        (self.pool.deallocate if publish else self.pool.deallocate_without_cache)(sequence)

    @rule(prompts=st.lists(tokens, min_size=1, max_size=4), evict=st.booleans())
    def live(self, prompts, evict):
        """Whole lives, one after the other, in which nothing goes wrong that has not already."""
        for token_ids in prompts:
            if evict:
                self._evict(None)
            num_before = len(self.world.sequences)
            self.arrive(token_ids=token_ids)
            if len(self.world.sequences) > num_before:
                self.move(steps=[None] * 4)
                self.compute(number=num_before, more=[], share=1)
                self.end(number=num_before, publish=True)
            self.move(steps=[None] * 4)

    @rule(token_ids=tokens, starts=st.booleans())
    def begin_load(self, token_ids, starts):
        """One that only the host has."""
        self.live(prompts=[token_ids], evict=False)
        self._evict(None)
        self.arrive(token_ids=[*token_ids, 0])
        if starts:
            self.transfer()

    @rule(token_ids=tokens)
    def begin_offload(self, token_ids):
        num_before = len(self.world.sequences)
        self.arrive(token_ids=token_ids)
        if len(self.world.sequences) > num_before:
            self.compute(number=num_before, more=[], share=1)
            self.end(number=num_before, publish=True)
        self.transfer()
        self.transfer()

    # -- moving ---------------------------------------------------------------------------------

    @rule()
    def transfer(self):
        self.world.asked |= {id(sequence) for sequence in self.world.sequences}
        self.pool.transfer_blocks()

    @rule(
        steps=st.lists(
            st.sampled_from([None, "fail", "short", "late", "corrupt", None, None, None]),
            min_size=1,
            max_size=5,
        )
    )
    def move(self, steps):
        """Copies go on, each with its fault."""
        for fault in steps:
            self.transfer()
            for rank in range(len(self.pool.ranks)):
                self.world.copy(rank, fault)

    # -- what happens to all --------------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            ["reset", "update", "retire", "sleep", "freeze", "thaw", "thaw", "kill", "restart",
             "restart", "restart", "expire", "lose", "wait", "wait", "evict", "evict", "evict"]
        ),
        number=picks,
    )  # fmt: skip
    def happen(self, what, number):
        getattr(self, f"_{what}")(number)

    def _evict(self, _):
        """The devices needed all that nobody held."""
        for rank in range(len(self.pool.ranks)):
            self.world.kv_of(rank).block_manager.reset_prefix_cache()

    def _wait(self, number):
        self.world.offset_s += [1.0, 60.0, 150.0][number % 3]

    def _reset(self, _):
        tier = self.world.tier
        if tier.is_frozen or tier.is_dead:
            with pytest.raises(RankUnavailableError):
                self.pool.reset_prefix_cache()
        else:
            self.pool.reset_prefix_cache()
            self.world.era += 1

    def _update(self, number):
        mode = ["wait", "keep"][number % 2]
        self.pool.update_weights(self.pool.weights_version()[0] + 1, mode=mode)
        self.world.era += 1

    def _retire(self, _):
        with contextlib.suppress(RankUnavailableError):
            self.pool.retire(max(0, self.pool.weights_version()[0] - 1))

    def _sleep(self, _):
        self.world.open()
        with contextlib.suppress(RequestError):
            self.pool.sleep()
        self.pool.wake_up()
        self.world.open(is_open=False)

    def _freeze(self, _):
        self.world.tier.freeze()

    def _thaw(self, _):
        self.world.tier.thaw()

    def _kill(self, _):
        self.world.tier.kill()

    def _restart(self, _):
        if self.world.tier.is_dead:
            self.world.tier.restart()

    def _expire(self, _):
        """The tier has heard of no rank for long."""
        books, tier = self.world.books, self.world.tier
        if books is not None and not tier.is_dead:
            with tier.host._lock:
                books.expire(float("inf"))

    def _lose(self, number):
        """The driver and a rank have not heard of each other for long."""
        if not self.world.hosts:
            return
        rank = self.pool.ranks[number % len(self.pool.ranks)]
        mine = [one for one in self.world.sequences if one.dp_rank == rank.dp_rank]
        rank.lose("for a test")
        for sequence in mine:
            self.world.forget(sequence)
            self.pool.deallocate(sequence)
        self.pool.monitor.beat()
        wait_until(lambda: rank.lost is None)

    @invariant()
    def all_is_well(self):
        if not hasattr(self, "world"):
            return
        self.world.check(*self.world.sequences)
        for sequence in self.world.sequences:
            kv = self.world.kv_of(sequence.dp_rank)
            theirs = kv._rows.sequences[sequence.single_block_id]
            assert np.array_equal(theirs.kv_state.block_ids, sequence.kv_state.block_ids)
            assert theirs.is_loading <= sequence.is_loading


TestHierarchyMachine = HierarchyMachine.TestCase
TestHierarchyMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestLongHierarchyMachine(HierarchyMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=80, deadline=None)
