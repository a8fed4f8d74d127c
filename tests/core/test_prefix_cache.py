"""The tree of runs on its own: match, insert, evict, contains, len.

``Shelf`` plays the manager: it takes ids, holds them and gives them back, as the ledger books it.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core import Namespace, PrefixCache
from raykv.core.ledger import REF, USE, Ledger
from raykv.errors import IntegrityError

from .helpers import run_of


class Shelf:
    """A prefix cache and the books it needs."""

    def __init__(self, num_blocks=16, block_size=2):
        self.ledger = Ledger(num_blocks)
        self.cache = PrefixCache(self.ledger, block_size)
        self.block_size = block_size

    def insert(self, tokens, **kwargs):
        """Publishes new ids for the whole of the tokens; they stay held."""
        num_blocks = len(tokens) // self.block_size
        assert num_blocks <= self.ledger.num_free
        ids = self.ledger.take(num_blocks)
        self.cache.insert(tokens, ids, **kwargs)
        return ids

    def release(self, ids):
        gone = self.ledger.subtract(np.asarray(ids, np.int32), USE + REF)
        cached = self.cache.run_of[gone] >= 0
        if cached.any():
            self.cache.unprotect(gone[cached])
        self.ledger.give_back(gone[~cached])

    def publish(self, tokens, **kwargs):
        ids = self.insert(tokens, **kwargs)
        self.release(ids)
        return ids.tolist()

    def evict(self, num_blocks):
        ids = self.cache.evict(num_blocks)
        self.ledger.give_back(ids)
        self.check()
        return ids.tolist()

    def match(self, tokens, **kwargs):
        return self.cache.match(tokens, **kwargs).tolist()

    def check(self):
        self.ledger.check_integrity()
        self.cache.check_integrity()


def test_an_empty_cache_matches_nothing():
    shelf = Shelf()
    assert len(shelf.cache) == 0
    assert shelf.match(run_of(2, 1, 2)) == shelf.match([]) == []
    assert not shelf.cache.contains(run_of(2, 1))
    assert not shelf.cache.contains([])


def test_insert_counts_full_blocks_only():
    shelf = Shelf()
    ids = shelf.ledger.take(2)
    assert shelf.cache.insert([*run_of(2, 1, 2), 3], ids) == 2
    assert len(shelf.cache) == 2
    assert shelf.match([*run_of(2, 1, 2), 3]) == [1, 2]
    shelf.check()


def test_a_match_changes_nothing():
    shelf = Shelf()
    shelf.publish(run_of(2, 1, 2))
    shelf.publish(run_of(2, 3))
    before = shelf.cache.num_evictable, len(shelf.cache), shelf.ledger.counts.copy()
    assert shelf.match(run_of(2, 1, 2)) == [1, 2]
    after = shelf.cache.num_evictable, len(shelf.cache), shelf.ledger.counts
    assert after[:2] == before[:2]
    assert np.array_equal(after[2], before[2])
    assert shelf.evict(2) == [2, 1]  # the order did not change either


def test_the_match_is_a_copy():
    shelf = Shelf()
    shelf.publish(run_of(2, 1, 2))
    shelf.cache.match(run_of(2, 1, 2))[:] = 0
    assert shelf.match(run_of(2, 1, 2)) == [1, 2]


def test_contains_asks_for_every_full_block():
    shelf = Shelf()
    shelf.publish(run_of(2, 1, 2, 3))
    contains = shelf.cache.contains
    assert contains(run_of(2, 1))
    assert contains(run_of(2, 1, 2, 3))
    assert contains([*run_of(2, 1, 2, 3), 4])
    assert not contains(run_of(2, 1, 2, 3, 4))
    assert not contains(run_of(2, 2))
    assert not contains([1])
    assert not contains(run_of(2, 1), namespace=Namespace(tenant="a"))


def test_reinserting_the_same_or_a_shorter_prefix_adds_nothing():
    shelf = Shelf()
    ids = shelf.insert(run_of(2, 1, 2, 3))
    others = shelf.ledger.take(3)
    for num_blocks in (3, 2, 1, 0):
        tokens = run_of(2, 1, 2, 3)[: 2 * num_blocks]
        assert shelf.cache.insert(tokens, ids[:num_blocks]) == 0
        assert shelf.cache.insert(tokens, others[:num_blocks]) == 0
    assert len(shelf.cache) == 3
    assert shelf.match(run_of(2, 1, 2, 3)) == ids.tolist()
    shelf.check()


def test_a_longer_insertion_adds_only_what_is_new():
    shelf = Shelf()
    head = shelf.insert(run_of(2, 1, 2))
    tail = shelf.ledger.take(4)
    assert shelf.cache.insert(run_of(2, 1, 2, 3, 4), tail) == 2
    assert shelf.match(run_of(2, 1, 2, 3, 4)) == [*head, *tail[2:]]
    shelf.check()


@pytest.mark.parametrize("steps", [[1] * 9, [3, 1, 5], [2, 7], [9]])
def test_a_run_that_grows_in_place_matches_at_every_length(steps):
    shelf = Shelf()
    tokens = list(range(18))
    ids, done = shelf.ledger.take(9), 0
    for step in steps:
        assert shelf.cache.insert(tokens[: 2 * (done + step)], ids[: done + step]) == step
        done += step
        for num_blocks in range(done + 1):
            assert shelf.match(tokens[: 2 * num_blocks]) == ids[:num_blocks].tolist()
    assert shelf.match(tokens) == ids.tolist()
    shelf.check()


@pytest.mark.parametrize("at", range(6))
def test_a_branch_may_begin_at_any_block(at):
    shelf = Shelf()
    trunk = run_of(2, 1, 2, 3, 4, 5)
    branch = trunk[: 2 * at] + run_of(2, 8, 9)
    trunk_ids = shelf.insert(trunk)
    branch_ids = shelf.insert(branch)
    assert shelf.match(trunk) == trunk_ids.tolist()
    assert shelf.match(branch) == [*trunk_ids[:at], *branch_ids[at:]]
    assert len(shelf.cache) == 7
    shelf.check()


def test_branches_that_share_their_first_tokens_within_a_block_are_apart():
    shelf = Shelf(block_size=4)
    ids = [shelf.insert([1, 2, 3, last])[0] for last in (4, 5, 6)]
    assert [shelf.match([1, 2, 3, last]) for last in (4, 5, 6, 7)] == [*([i] for i in ids), []]


def test_insert_copies_the_tokens():
    shelf = Shelf()
    tokens = np.array(run_of(2, 1, 2), np.int32)
    ids = shelf.ledger.take(2)
    shelf.cache.insert(tokens, ids)
    ids_before = ids.tolist()
    tokens[:] = 9
    ids[:] = 0
    assert shelf.match(run_of(2, 1, 2)) == ids_before
    assert shelf.match(tokens) == []
    shelf.check()


def test_an_id_cached_for_other_tokens_is_refused_and_nothing_changes():
    shelf = Shelf()
    ids = shelf.insert(run_of(2, 1, 2))
    with pytest.raises(ValueError, match="1"):
        shelf.cache.insert(run_of(2, 5), ids[:1])
    with pytest.raises(ValueError):
        shelf.cache.insert(run_of(2, 1, 2, 3), ids[[0, 1, 1]])
    with pytest.raises(ValueError):
        shelf.cache.insert(run_of(2, 5), ids[:1], namespace=Namespace(tenant="a"))
    assert len(shelf.cache) == 2
    assert not shelf.cache.contains(run_of(2, 5))
    shelf.check()


def test_evict_takes_the_deepest_of_the_oldest_first():
    shelf = Shelf()
    old = shelf.publish(run_of(2, 1, 2, 3))
    new = shelf.publish(run_of(2, 4, 5))
    assert shelf.evict(2) == [old[2], old[1]]
    assert shelf.match(run_of(2, 1, 2, 3)) == old[:1]
    assert shelf.evict(2) == [old[0], new[1]]
    assert shelf.evict(1) == new[:1]
    assert len(shelf.cache) == shelf.cache.num_evictable == 0


def test_evict_zero_evicts_nothing():
    shelf = Shelf()
    shelf.publish(run_of(2, 1))
    assert shelf.evict(0) == []
    assert len(shelf.cache) == 1


def test_held_blocks_and_their_ancestors_are_not_evictable():
    shelf = Shelf()
    ids = shelf.insert(run_of(2, 1, 2, 3, 4))
    assert shelf.cache.num_evictable == 0
    shelf.release(ids[[0, 1, 3]])
    assert shelf.cache.num_evictable == 1
    assert shelf.evict(1) == [ids[3]]
    shelf.release(ids[2:3])
    assert shelf.cache.num_evictable == 3
    assert shelf.evict(3) == ids[2::-1].tolist()


def test_a_parent_run_is_kept_while_a_branch_is_held():
    shelf = Shelf()
    trunk = shelf.insert(run_of(2, 1, 2, 3))
    branch = shelf.insert(run_of(2, 1, 2, 8))  # holds two ids that are not cached
    shelf.release(trunk)
    assert shelf.cache.num_evictable == 1  # the trunk's last block only
    assert shelf.evict(1) == [trunk[2]]
    shelf.release(branch)
    assert shelf.cache.num_evictable == 3
    assert shelf.evict(3) == [branch[2], trunk[1], trunk[0]]


def test_a_run_cut_back_to_a_branch_grows_beside_it():
    """The new tail starts where the branch hangs; neither may be found behind the other."""
    shelf = Shelf(num_blocks=24)
    trunk = run_of(2, 1, 2, 3, 4)
    branch = run_of(2, 1, 2, 8, 9)
    trunk_ids = shelf.publish(trunk)
    branch_ids = shelf.publish(branch)  # its first two ids went back to the free list
    assert shelf.evict(2) == [trunk_ids[3], trunk_ids[2]]
    other = run_of(2, 1, 2, 5, 9)
    other_ids = shelf.insert(other).tolist()
    assert shelf.match(trunk) == trunk_ids[:2]
    assert shelf.match(branch) == trunk_ids[:2] + branch_ids[2:]
    assert shelf.match(other) == trunk_ids[:2] + other_ids[2:]
    shelf.check()


@pytest.mark.parametrize("num_evicted", range(1, 8))
def test_a_run_that_shrank_gives_memory_back_and_grows_again(num_evicted):
    shelf = Shelf(num_blocks=300)
    tokens = list(range(128))
    ids = shelf.publish(tokens)
    shelf.evict(8 * num_evicted)
    left = 64 - 8 * num_evicted
    assert shelf.match(tokens) == ids[:left]
    again = shelf.insert(tokens).tolist()
    assert shelf.match(tokens) == ids[:left] + again[left:]
    other = tokens[: 2 * left] + [500] * 8
    shelf.insert(other)
    assert shelf.match(tokens) == ids[:left] + again[left:]
    assert len(shelf.match(other)) == left + 4
    shelf.check()


def test_an_integrity_error_tells_of_broken_books():
    shelf = Shelf()
    shelf.publish(run_of(2, 1, 2))
    shelf.check()
    shelf.cache.num_evictable += 1
    with pytest.raises(IntegrityError):
        shelf.cache.check_integrity()


def test_an_integrity_error_tells_of_a_stretch_queued_under_anothers_stamp():
    shelf = Shelf()
    shelf.publish(run_of(2, 1))
    shelf.publish(run_of(2, 2))
    shelf.check()
    shelf.cache._order._stamps.reverse()
    with pytest.raises(IntegrityError, match="misses a stretch"):
        shelf.cache.check_integrity()


# Few tokens and many rows: the tree is compared with a list of prefixes.
rows = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12)


@given(rows=rows, queries=rows, block_size=st.integers(1, 3))
def test_the_match_is_the_longest_prefix_ever_inserted(rows, queries, block_size):
    shelf = Shelf(num_blocks=200, block_size=block_size)
    known = {}
    for row in rows:
        ids = shelf.insert(row)
        for index, block_id in enumerate(ids.tolist()):
            known.setdefault(tuple(row[: (index + 1) * block_size]), block_id)
    assert len(shelf.cache) == len(known)
    for query in queries + rows:
        expected = []
        for end in range(block_size, len(query) + 1, block_size):
            if tuple(query[:end]) not in known:
                break
            expected.append(known[tuple(query[:end])])
        assert shelf.match(query) == expected
    shelf.check()
