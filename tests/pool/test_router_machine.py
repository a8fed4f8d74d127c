"""The router through any history: requests come, go on, end; ranks fill up and are lost."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv import Sequence
from raykv.core.kv_cache_manager import NO_ROOM, Room

from .test_routing import make_request, make_router, output_of, send

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
index = st.integers(0, 10**6)


class RouterMachine(RuleBasedStateMachine):
    """The books are recomputed after each step, and come to nothing with the last request."""

    @initialize(
        policy=st.sampled_from(["available_blocks", "free_blocks", "cache_aware"]),
        num_ranks=st.integers(1, 3),
        num_blocks=st.integers(2, 9),
    )
    def start(self, policy, num_ranks, num_blocks):
        self.router = make_router(policy, num_ranks, num_blocks=num_blocks, block_size=2)
        self.total = num_blocks - 1
        self.num_ranks = num_ranks
        self.open = []

    def rooms(self, data):
        rooms = st.builds(
            lambda free, more, singles: Room(min(free + more, self.total), free, singles),
            st.integers(0, self.total),
            st.integers(0, self.total),
            st.integers(0, 2),
        )
        return [data.draw(rooms | st.just(NO_ROOM)) for _ in range(self.num_ranks)]

    @rule(data=st.data(), row=prompts, max_tokens=st.integers(1, 8))
    def arrive(self, data, row, max_tokens):
        rooms, tokens = self.rooms(data), np.array(row, np.int32)
        charge = send(self.router, tokens, max_tokens, rooms)
        self.check_usable(rooms, charge.rank)
        assert charge.num_hit_tokens < len(row)
        self.open.append((charge, make_request(tokens, max_tokens)))

    @rule(data=st.data(), rows=st.lists(prompts, min_size=1, max_size=4), settles=st.booleans())
    def allocate(self, data, rows, settles):
        rooms = self.rooms(data)
        choice = self.router.begin(rooms)
        ranks = [choice.take(Sequence(row), len(row)) for row in rows]
        self.check_usable(rooms, ranks[0])
        if settles:
            choice.settle()

    def check_usable(self, rooms, rank):
        if any(room.num_free_single_blocks > 0 for room in rooms):
            assert rooms[rank].num_free_single_blocks > 0
        elif any(room != NO_ROOM for room in rooms):
            assert rooms[rank] != NO_ROOM

    @precondition(lambda self: self.open)
    @rule(number=index, num_tokens=st.integers(0, 9))
    def go_on(self, number, num_tokens):
        self.router.credit(self.open[number % len(self.open)][0], num_tokens, is_last=False)

    @precondition(lambda self: self.open)
    @rule(number=index, produced=prompts, cached=st.integers(0, 12), is_lost=st.booleans())
    def end(self, number, produced, cached, is_lost):
        charge, request = self.open.pop(number % len(self.open))
        self.router.credit(charge, 1, is_last=True)
        if not is_lost:
            self.router.learn(charge, request, output_of(*produced, cached=cached))

    @rule(number=index)
    def lose_cache(self, number):
        self.router.forget(number % self.num_ranks)

    @invariant()
    def books_balance(self):
        if not hasattr(self, "router"):
            return
        self.router.check_integrity()
        assert min(self.router.debits + self.router.work) >= 0
        assert len(self.router._open) == len(self.open)
        if not self.open:
            assert self.router.debits == self.router.work == [0] * self.num_ranks


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
