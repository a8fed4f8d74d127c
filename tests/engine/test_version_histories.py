"""Random histories of requests, updates of the weights and sleep; every token is known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.core.ledger import FREE
from raykv.engine import GenerationRequest
from raykv.errors import RequestError

from .test_engine import GARBAGE, assert_drained, namespaces, params, prompts
from .test_versions import make, update


class Histories(RuleBasedStateMachine):
    """Requests come and go while weights change and the engine sleeps; every token is known."""

    def __init__(self):
        super().__init__()
        self.live: dict[str, tuple[GenerationRequest, list[int], list[int]]] = {}
        self.names = itertools.count()
        self.pending = None

    @initialize(
        num_blocks=st.integers(6, 20),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, cache):
        self.engine = make(
            num_blocks + 20 // block_size,
            block_size,
            max_num_seqs=max_num_seqs,
            enable_prefix_cache=cache,
            budget=budget,
        )

    @rule(tokens=prompts, params=params, namespace=namespaces, insists=st.integers(0, 5))
    def submit(self, tokens, params, namespace, insists):
        if not insists:
            version = self.engine.kv.weights_version
            namespace = replace(namespace, weights_version=version)
        name = str(next(self.names))
        request = GenerationRequest(name, np.array(tokens, np.int32), params, namespace)
        self.engine.submit([request])
        self.live[name] = (request, [], [])

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.take(self.engine.step())

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def abort(self, index):
        self.engine.abort([list(self.live)[index % len(self.live)]])

    @rule(mode=st.sampled_from(["wait", "abort", "keep", "keep"]))
    def update(self, mode):
        if self.pending is not None:
            return
        version = self.engine.kv.weights_version + 1
        before = self.engine.scheduler.has_started
        update(self.engine, version, mode)
        if mode == "wait" and before:
            assert self.engine.kv.weights_version == version - 1
            self.pending = version
        else:
            assert self.engine.kv.weights_version == version

    @rule()
    def give_up_the_update(self):
        if self.pending is not None:
            self.engine.lifecycle.cancel_weights(self.pending)
            self.pending = None

    @rule(submits=st.booleans())
    def sleep(self, submits):
        if self.pending is not None:
            with pytest.raises(RequestError):
                self.engine.lifecycle.sleep(1)
            return
        self.engine.lifecycle.sleep(1)
        stats = self.engine.kv.rank_stats()
        assert stats.num_free_blocks == stats.num_total_blocks
        self.take(self.engine.step())
        self.engine.lifecycle.wake_up()

    @rule(back=st.integers(0, 2))
    def retire(self, back):
        self.engine.lifecycle.retire(max(0, self.engine.kv.weights_version - back))

    def take(self, deltas):
        engine, version = self.engine, self.engine.kv.weights_version
        for _, delta in deltas:
            request, tokens, versions = self.live[delta.request_id]
            if delta.error is not None:
                asked = request.namespace.weights_version
                assert asked not in {0, version}
                assert f"asks for weights version {asked}" in str(delta.error)
                assert tokens == []
            for token in delta.token_ids:
                whole = [*request.token_ids.tolist(), *tokens]
                assert token == engine.model.next_token(request, whole)
                assert delta.weights_version == version
                tokens.append(token)
                versions.append(version)
            if delta.output is not None:
                assert list(delta.output.token_ids) == tokens
                assert list(delta.output.weights_versions) == versions
                if versions:
                    assert delta.output.weights_version == versions[-1]
            if delta.is_last:
                del self.live[delta.request_id]

    @invariant()
    def books_balance(self):
        if not hasattr(self, "engine"):
            return
        if self.pending == self.engine.kv.weights_version:
            self.pending = None
        self.engine.check_integrity()
        manager, model = self.engine.kv.block_manager, self.engine.model
        free = np.flatnonzero(manager._ledger.counts == FREE)
        model.slots.reshape(-1, model.block_size)[free] = GARBAGE

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self.take(self.engine.step())
            self.books_balance()
        assert not self.live, "a request starves"
        assert_drained(self.engine)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.nightly
class TestLongHistories(Histories.TestCase):
    settings = settings(TestHistories.settings, max_examples=2000, stateful_step_count=80)
