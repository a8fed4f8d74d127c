"""A run on its own: its blocks, and the stretches of it that may be evicted.

The stretches are compared with a list of one stamp per block: when it lost its last holder, None
while it has one.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.core.namespace import DEFAULT
from raykv.core.runs import Root, Run

SIZE = 2


def tokens_of(num_blocks, start=0):
    """Distinct int32 tokens, seen as a prompt's are."""
    return np.arange(SIZE * start, SIZE * (start + num_blocks), dtype=np.int32).data


def new_run(num_blocks) -> Run:
    tokens = tokens_of(num_blocks)
    run = Run(Root(("", "", 0)), (0, tokens[:SIZE].tobytes(), ()), 0, 0)
    run.append(tokens, np.arange(1, num_blocks + 1), ())
    run.protected = num_blocks
    return run


class Stretches(RuleBasedStateMachine):
    """Holders come and go, the run grows while it is held and is cut from its end."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks):
        self.run = new_run(num_blocks)
        self.stamps = [None] * num_blocks
        self.clock = 0

    def num_held(self):
        return self.stamps.count(None)

    def choose(self, data, low, high):
        return data.draw(st.integers(low, high))

    @precondition(lambda self: self.num_held())
    @rule(data=st.data())
    def let_go(self, data):
        start = self.choose(data, 0, self.num_held() - 1)
        self.clock += 1
        self.stamps[start:] = [self.clock if s is None else s for s in self.stamps[start:]]
        self.run.let_go(start, self.clock)

    @precondition(lambda self: self.num_held() < len(self.stamps))
    @rule(data=st.data())
    def take_back(self, data):
        stop = self.choose(data, self.num_held() + 1, len(self.stamps))
        self.stamps[:stop] = [None] * stop
        self.run.take_back(stop)

    @precondition(lambda self: self.num_held() < len(self.stamps))
    @rule(data=st.data())
    def shrink(self, data):
        length = self.choose(data, self.num_held(), len(self.stamps) - 1)
        cut = self.run.shrink(length)
        assert cut.tolist() == list(range(len(self.stamps), length, -1))
        del self.stamps[length:]

    @precondition(lambda self: self.stamps and self.num_held() == len(self.stamps) < 20)
    @rule(num_blocks=st.integers(1, 8))
    def append(self, num_blocks):
        length = len(self.stamps)
        ids = np.arange(length + 1, length + num_blocks + 1)
        self.run.append(tokens_of(num_blocks, length), ids, ())
        self.run.protected = self.run.length
        self.stamps += [None] * num_blocks

    @precondition(lambda self: not self.stamps)
    @rule(num_blocks=st.integers(1, 8))
    def begin_again(self, num_blocks):
        self.start(num_blocks)

    @invariant()
    def the_stretches_are_right(self):
        evictable = [(at, s) for at, s in enumerate(self.stamps) if s is not None]
        blocks = [list(same) for _, same in groupby(evictable, key=lambda pair: pair[1])]
        tails = [same[0] for same in reversed(blocks)]
        assert self.run.tails() == tails
        assert self.run.protected == self.num_held()
        if tails:
            assert self.run.deepest_tail() == tails[0]
        else:
            assert self.run.deepest_tail()[0] == self.run.length
        live = {stamp for _, stamp in tails}
        assert {s for s in range(self.clock + 2) if self.run.has_tail(s)} == live

    @invariant()
    def the_blocks_are_right(self):
        length = len(self.stamps)
        assert self.run.length == length
        assert self.run.ids[:length].tolist() == list(range(1, length + 1))
        blocks = [self.run.block(at) for at in range(length)]
        assert b"".join(blocks) == tokens_of(length).tobytes()
        assert self.run.block_size == SIZE


TestStretches = Stretches.TestCase


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_the_first_blocks_tokens_are_kept_once(num_blocks):
    """Only in the key, which the parent needs to find the run."""
    run = new_run(num_blocks)
    assert run.block(0) is run.key[1]
    assert bytes(run.rest) == tokens_of(num_blocks)[SIZE:].tobytes()


@pytest.mark.parametrize("first_differing", range(1, 5))
@pytest.mark.parametrize("place", range(SIZE))
def test_common_blocks_end_before_the_first_difference(first_differing, place):
    run, prompt = new_run(4), np.array(tokens_of(6))
    prompt[SIZE * first_differing + place] = -1
    # Three blocks of something else stand before the run.
    row = np.concatenate((np.full(3 * SIZE, 7, np.int32), prompt)).data
    assert run.common_blocks(row, 3, 9, SIZE, DEFAULT) == first_differing
    for stop in range(4, 4 + first_differing):
        assert run.common_blocks(row, 3, stop, SIZE, DEFAULT) == stop - 3


def test_one_released_stretch_takes_no_object_of_its_own():
    """Most runs are released whole, once; only further stretches are listed."""
    run = new_run(4)
    run.let_go(0, 1)
    assert run.older_tails == []
    run.take_back(2)
    run.let_go(0, 2)
    assert run.older_tails == [(2, 1)]
