"""A local pool and one over messages, driven side by side: nothing may tell them apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv import BlockManagerPool, Namespace, PoolConfig, Sequence
from raykv.errors import RequestError
from raykv.testing import loopback_pool

# Two tokens and blocks of one to three of them: prefixes collide and pools run full in no time.
tokens = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.builds(lambda n, tail: [0] * n + tail, st.integers(1, 10), st.lists(st.integers(0, 1))),
)
namespaces = st.sampled_from(
    [Namespace()] * 3 + [Namespace(tenant="a"), Namespace(lora="a"), Namespace(weights_version=1)]
)
index = st.integers(0, 10**6)


class PoolMachine(RuleBasedStateMachine):
    """Each sequence is a pair of twins, one per pool."""

    @initialize(
        dp_size=st.integers(1, 3),
        num_blocks=st.integers(2, 12),
        block_size=st.integers(1, 3),
        num_single_blocks=st.integers(2, 7),
        policy=st.sampled_from(["available_blocks", "free_blocks", "cache_aware"]),
        disagg_pd=st.booleans(),
    )
    def start(self, policy, **values):
        config = PoolConfig(routing={"policy": policy}, hash_seed=b"seed", **values)
        self.pools = [BlockManagerPool.local(config), loopback_pool(config)]
        self.twins = []

    def teardown(self):
        if not hasattr(self, "pools"):
            return
        for pool, sequences in zip(self.pools, zip(*self.twins, strict=True), strict=False):
            pool.deallocate(sequences)
        for pool in self.pools:
            pool.get_swap_block_transfer_infos()
            pool.ack_swaps()
            total = pool.stats().total
            assert total.num_used_blocks == 0
            assert total.num_available_blocks == total.num_total_blocks
            pool.check_integrity()
            pool.close()

    def both(self, name, *pairs, **kwargs):
        """Call a method of both pools; a pair goes one to each. Returns what both answered."""
        outcomes = []
        for side, pool in enumerate(self.pools):
            try:
                outcomes.append(getattr(pool, name)(*(pair[side] for pair in pairs), **kwargs))
            except RequestError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    def pick(self, number):
        return self.twins[number % len(self.twins)]

    def pick_some(self, numbers):
        chosen = list({id(twin): twin for twin in map(self.pick, numbers)}.values())
        return [twin[0] for twin in chosen], [twin[1] for twin in chosen]

    @rule(token_ids=tokens, namespace=namespaces)
    def arrive(self, token_ids, namespace):
        self.twins.append(tuple(Sequence(token_ids, namespace=namespace) for _ in range(2)))

    @precondition(lambda self: self.twins)
    @rule(number=index, num_tokens=st.one_of(st.none(), st.integers(1, 14)))
    def allocate(self, number, num_tokens):
        self.both("allocate", self.pick(number), num_tokens=num_tokens)

    @precondition(lambda self: self.twins)
    @rule(numbers=st.lists(index, min_size=1, max_size=5))
    def allocate_list(self, numbers):
        self.both("allocate", self.pick_some(numbers))

    @precondition(lambda self: self.twins)
    @rule(number=index)
    def allocate_shared(self, number):
        self.both("allocate_shared", self.pick(number))

    @precondition(lambda self: self.twins)
    @rule(number=index, share=st.floats(0, 1))
    def compute(self, number, share):
        first = self.pick(number)[0]
        if self.owes_a_copy(first):
            return
        for sequence in self.pick(number):
            state = sequence.kv_state
            covered = min(state.num_blocks * state.block_size, sequence.num_tokens)
            state.num_computed_tokens += int((covered - state.num_computed_tokens) * share)

    def owes_a_copy(self, sequence):
        """Whether it must not write before it is allocated."""
        state = sequence.kv_state
        if not state.num_blocks:
            return False
        manager = self.pools[0].ranks[sequence.dp_rank].kv.block_manager
        at = state.num_computed_tokens // state.block_size
        return bool((manager.use_counts(state.block_ids[at : at + 1]) > 1).any())

    @precondition(lambda self: self.twins)
    @rule(numbers=st.lists(index, min_size=1, max_size=5), token=st.integers(0, 1))
    def decode(self, numbers, token):
        pair = self.pick_some(numbers)
        for sequences in pair:
            for sequence in sequences:
                sequence.append(token)
        self.both("allocate", pair)

    @precondition(lambda self: self.twins)
    @rule(number=index, num_tokens=st.one_of(st.none(), st.integers(0, 14)))
    def cache(self, number, num_tokens):
        self.both("cache", self.pick(number), num_tokens=num_tokens)

    @precondition(lambda self: self.twins)
    @rule(numbers=st.lists(index, min_size=1, max_size=4), keep=st.booleans())
    def deallocate(self, numbers, keep):
        self.both("deallocate" if keep else "deallocate_without_cache", self.pick_some(numbers))

    @precondition(lambda self: self.twins)
    @rule(number=index, token=st.one_of(st.none(), st.integers(0, 1)))
    def fork(self, number, token):
        """With a token, the child writes at once: mostly to a block that both use."""
        self.compute(number=number, share=1)
        self.twins.append(tuple(sequence.fork() for sequence in self.pick(number)))
        if token is not None:
            for sequence in self.twins[-1]:
                sequence.append(token)
            self.both("allocate", self.twins[-1])

    @rule(ack=st.booleans())
    def swap(self, ack):
        self.both("get_swap_block_transfer_infos")
        if ack:
            self.both("ack_swaps")

    @precondition(lambda self: self.twins)
    @rule(number=index)
    def explain(self, number):
        pair, reports = self.pick(number), []
        for side, pool in enumerate(self.pools):
            if pair[side].single_block_id is None:
                with pytest.raises(RequestError):
                    pool.explain(pair[side])
                continue
            report = pool.explain(pair[side])
            assert report.num_hit_tokens <= pair[side].kv_state.num_computed_tokens
            names = [twin[side].seq_id for twin in self.twins]
            who = None if report.seq_id is None else names.index(report.seq_id)
            reports.append(replace(report, seq_id=who))
        assert reports == [] or reports[0] == reports[1]

    @rule()
    def reset_prefix_cache(self):
        self.both("reset_prefix_cache")

    @rule(step=st.integers(0, 2), mode=st.sampled_from(["wait", "keep"]))
    def update_weights(self, step, mode):
        """What the driver has computed and not told yet is published by the update."""
        version = self.pools[0].weights_version()[0] + step
        outcomes = []
        for pool in self.pools:
            try:
                outcomes.append(pool.update_weights(version, mode=mode))
            except RequestError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        self.both("weights_version")

    @rule(version=st.integers(0, 3))
    def retire(self, version):
        counts = [pool.retire(version) for pool in self.pools]
        assert counts[0] == counts[1]

    @rule(level=st.integers(1, 2))
    def sleep(self, level):
        if self.both("sleep", (level, level)) is None:
            self.both("wake_up")

    @invariant()
    def twins_are_alike(self):
        if not hasattr(self, "pools"):
            return
        for pair in self.twins:
            seen = [
                (
                    s.dp_rank,
                    s.single_block_id,
                    s.kv_state.block_ids.tolist(),
                    s.kv_state.num_shared_blocks,
                    s.kv_state.num_computed_tokens,
                    s.slot_ids().tolist(),
                )
                for s in pair
            ]
            assert seen[0] == seen[1]
        assert self.pools[0].stats() == self.pools[1].stats()
        for pool in self.pools:
            pool.check_integrity()
        for _, sequence in self.twins:
            if sequence.single_block_id is not None:
                kv = self.pools[1].ranks[sequence.dp_rank].host._kv
                theirs = kv._rows.sequences[sequence.single_block_id]
                assert np.array_equal(theirs.kv_state.block_ids, sequence.kv_state.block_ids)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.nightly
class TestLongPoolMachine(PoolMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=80, deadline=None)
