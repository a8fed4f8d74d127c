"""What a driver believes of a rank's cache: bounded, closed under prefixes, and put right."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raykv.errors import IntegrityError
from raykv.prefix_digest import PrefixDigest


def names_of(row):
    """Names as a hasher gives them: one per block, each for all blocks up to it."""
    return [bytes(row[: i + 1]) for i in range(len(row))]


def make(capacity, *rows):
    digest = PrefixDigest(capacity)
    for row in rows:
        digest.note(names_of(row))
    return digest


def known(digest, row):
    return digest.num_known(names_of(row))


def test_the_longest_known_prefix_counts():
    digest = make(10, [1, 2, 3], [1, 2, 4, 5])
    assert len(digest) == 5
    assert known(digest, [1, 2, 3, 9]) == 3
    assert known(digest, [1, 2, 4, 5]) == 4
    assert known(digest, [1, 9, 3]) == 1
    assert known(digest, [2, 3]) == known(digest, []) == 0


def test_what_was_noted_longest_ago_goes_first_and_the_deepest_of_it_first():
    digest = make(5, [1, 2, 3], [4, 5])
    digest.note(names_of([6]))
    assert [known(digest, row) for row in ([1, 2, 3], [4, 5], [6])] == [2, 2, 1]
    digest.note(names_of([1]))
    digest.note(names_of([7, 8]))
    assert [known(digest, row) for row in ([1, 2, 3], [4, 5], [6], [7, 8])] == [1, 1, 1, 2]


def test_of_a_prompt_longer_than_the_rank_the_first_blocks_are_kept():
    digest = make(3, [1, 2, 3, 4, 5])
    assert len(digest) == known(digest, [1, 2, 3, 4, 5]) == 3
    digest.note(names_of([6]))
    assert known(digest, [1, 2, 3]) == 2


def test_what_followed_a_trimmed_block_stays_forgotten_when_the_block_returns():
    digest = make(20, [1, 2, 3], [1, 2, 4])
    digest.trim(names_of([1, 2, 3]), 1)
    assert [known(digest, row) for row in ([1, 2, 3], [1, 2, 4])] == [1, 1]
    digest.note(names_of([1, 2, 3]))
    assert [known(digest, row) for row in ([1, 2, 3], [1, 2, 4])] == [3, 2]
    digest.note(names_of([1, 2, 4]))
    assert known(digest, [1, 2, 4]) == 3


def test_a_digest_out_of_order_is_found():
    digest = make(3, [1, 2])
    digest._births[b"x"] = 9
    with pytest.raises(IntegrityError, match="birth"):
        digest.check_integrity()
    digest._births[b"y"] = 1
    with pytest.raises(IntegrityError, match="4 names, but 3"):
        digest.check_integrity()


rows = st.lists(st.integers(0, 1), max_size=6)


class DigestMachine(RuleBasedStateMachine):
    """In step with a list of prefixes, each marked as lost or not; the front is dropped first."""

    @initialize(capacity=st.integers(1, 8))
    def start(self, capacity):
        self.digest = PrefixDigest(capacity)
        self.capacity = capacity
        self.order = []
        self.lost = set()

    @rule(row=rows)
    def note(self, row):
        self.digest.note(names_of(row))
        prefixes = names_of(row)[: self.capacity]
        for prefix in reversed(prefixes):
            if prefix in self.order:
                self.order.remove(prefix)
            self.order.append(prefix)
            self.lost.discard(prefix)
        while len(self.order) > self.capacity:
            self.lost.discard(self.order.pop(0))

    @rule(row=rows, num_blocks=st.integers(0, 6))
    def trim(self, row, num_blocks):
        self.digest.trim(names_of(row), num_blocks)
        for prefix in names_of(row)[num_blocks:]:
            if prefix in self.order:
                self.order.remove(prefix)
            self.lost.discard(prefix)
            self.lost |= {other for other in self.order if other.startswith(prefix)}

    @rule(row=rows)
    def look_up(self, row):
        count = 0
        for prefix in names_of(row):
            if prefix not in self.order or prefix in self.lost:
                break
            count += 1
        assert known(self.digest, row) == count

    @invariant()
    def holds(self):
        if hasattr(self, "digest"):
            self.digest.check_integrity()
            assert list(self.digest._births) == self.order
            for prefix in set(self.order) - self.lost:
                assert known(self.digest, list(prefix)) == len(prefix), "closed under prefixes"


TestDigestMachine = DigestMachine.TestCase
TestDigestMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
