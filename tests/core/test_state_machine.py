"""The real managers in step with the reference, over random histories.

Every step compares every counter, every handle and every reference count, and calls
``check_integrity()``. Teardown gives everything back and requires that nothing was lost.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from raykv.core import Block, BlockManagerImpl, Blocks, ConcurrentBlockManagerImpl
from raykv.errors import DoubleFreeError

from . import strategies
from .reference import (
    ExpectedDoubleFreeError,
    ExpectedValueError,
    Handle,
    NamespaceFields,
    ReferenceManager,
)
from .strategies import real_namespace

MAX_SEQUENCES = 4
MAX_HANDLES = 6
picks = st.integers(0, 11)


@dataclass
class Pair:
    """One handle, in both worlds."""

    real: Blocks
    model: Handle


@dataclass
class Running:
    """A sequence: its tokens, and the handle of the blocks that hold them."""

    tokens: list[int]
    namespace: NamespaceFields
    pair: Pair


class Managers(RuleBasedStateMachine):
    """Rules of two sorts: single calls with any handle, and sequences that live as real ones do."""

    manager_class = BlockManagerImpl
    eviction = "lru"

    def __init__(self):
        super().__init__()
        self.handles: list[Pair] = []
        self.dead: list[Pair] = []
        self.sequences: list[Running] = []

    @initialize(num_blocks=strategies.num_blocks, block_size=strategies.block_size)
    def start(self, num_blocks, block_size):
        self.block_size = block_size
        self.real = self.manager_class(num_blocks, block_size, eviction=self.eviction)
        self.model = ReferenceManager(num_blocks, block_size, is_lru=self.eviction == "lru")

    # -- helpers -------------------------------------------------------------------------------

    def pairs(self) -> list[Pair]:
        return self.handles + [sequence.pair for sequence in self.sequences]

    def pick(self, index) -> Pair:
        pairs = self.pairs()
        return pairs[index % len(pairs)]

    def take(self, index) -> Pair:
        """Removes a loose handle from the list."""
        return self.handles.pop(index % len(self.handles))

    def keep(self, real: Blocks, model: Handle) -> Pair:
        """Checks that a new handle is the expected one; a crowd is thinned, oldest first."""
        pair = Pair(real, model)
        assert real.ids.tolist() == model.ids
        self.handles.append(pair)
        if len(self.handles) > MAX_HANDLES:
            self.release_pair(self.handles.pop(0))
        return pair

    def release_pair(self, pair: Pair):
        pair.real.release()
        self.model.release(pair.model)

    def allocate_pair(self, num_blocks) -> Pair | None:
        before = set(self.model.free), set(self.model.evictable())
        real = self.real.allocate(num_blocks)
        if real is None:
            assert not self.model.can_allocate(num_blocks), f"refused {num_blocks} of {before}"
            return None
        return Pair(real, self.model.allocate(real.ids.tolist()))

    def match_pair(self, tokens, namespace, existing: Pair | None = None) -> Pair:
        real = self.real.allocate_shared(
            tokens,
            existing=None if existing is None else existing.real,
            namespace=real_namespace(namespace),
        )
        model = self.model.allocate_shared(
            tokens, None if existing is None else existing.model, namespace
        )
        assert real.ids.tolist() == model.ids
        return Pair(real, model)

    def concat_pairs(self, pairs: list[Pair]) -> Pair:
        return Pair(
            Blocks.concat([pair.real for pair in pairs]),
            self.model.concat([pair.model for pair in pairs]),
        )

    def cache_pair(self, tokens, pair: Pair, namespace: NamespaceFields):
        try:
            expected = self.model.cache(tokens, pair.model, namespace)
        except ExpectedValueError:
            with pytest.raises(ValueError):
                self.publish_real(tokens, pair.real, real_namespace(namespace))
        else:
            assert self.publish_real(tokens, pair.real, real_namespace(namespace)) == expected

    def publish_real(self, tokens, blocks: Blocks, namespace) -> int:
        return self.real.cache(tokens, blocks, namespace=namespace)

    def deallocate_pair(self, pair: Pair):
        try:
            self.model.deallocate(pair.model)
        except ExpectedDoubleFreeError:
            with pytest.raises(DoubleFreeError):
                self.real.deallocate(pair.real)
        else:
            self.real.deallocate(pair.real)

    # -- single calls --------------------------------------------------------------------------

    @rule(num_blocks=st.one_of(st.integers(0, 4), st.integers(0, 25)))
    def allocate(self, num_blocks):
        pair = self.allocate_pair(num_blocks)
        if pair is not None:
            self.keep(pair.real, pair.model)

    @rule(spare=st.integers(0, 1))
    def allocate_and_return_all_there_is(self, spare):
        available = len(self.model.free) + len(self.model.evictable())
        pair = self.allocate_pair(available + spare)
        assert (pair is None) == (spare > 0)
        if pair is not None:
            self.release_pair(pair)

    @rule(tokens=strategies.token_ids, namespace=strategies.namespace_fields)
    def match(self, tokens, namespace):
        pair = self.match_pair(tokens, namespace)
        self.keep(pair.real, pair.model)

    @precondition(lambda self: self.pairs())
    @rule(index=picks, tokens=strategies.token_ids, namespace=strategies.namespace_fields)
    def match_beyond_existing(self, index, tokens, namespace):
        pair = self.match_pair(tokens, namespace, existing=self.pick(index))
        self.keep(pair.real, pair.model)

    @precondition(lambda self: self.pairs())
    @rule(index=picks, tokens=strategies.token_ids, namespace=strategies.namespace_fields)
    def publish_any_tokens(self, index, tokens, namespace):
        self.cache_pair(tokens, self.pick(index), namespace)

    @precondition(lambda self: self.pairs())
    @rule(index=picks)
    def share(self, index):
        pair = self.pick(index)
        self.keep(pair.real.share(), self.model.share(pair.model))

    @precondition(lambda self: self.pairs())
    @rule(index=picks)
    def pin(self, index):
        pair = self.pick(index)
        self.keep(pair.real.pin(), self.model.pin(pair.model))

    @precondition(lambda self: self.pairs())
    @rule(index=picks, start=st.integers(-3, 8), stop=st.one_of(st.none(), st.integers(-3, 12)))
    def cut(self, index, start, stop):
        pair = self.pick(index)
        self.keep(pair.real[start:stop], self.model.slice(pair.model, slice(start, stop)))

    @precondition(lambda self: len(self.handles) >= 2)
    @rule(first=picks, second=picks)
    def concat(self, first, second):
        one = self.take(first)
        other = self.take(second)
        try:
            model = self.model.concat([one.model, other.model])
        except ExpectedValueError:
            with pytest.raises(ValueError):
                Blocks.concat([one.real, other.real])
            self.handles += [one, other]
        else:
            real = Blocks.concat([one.real, other.real])
            assert len(one.real) == len(other.real) == 0
            self.keep(real, model)
            self.dead = [one, other]

    @precondition(lambda self: self.handles)
    @rule(index=picks)
    def deallocate(self, index):
        self.deallocate_pair(self.handles[index % len(self.handles)])

    @precondition(lambda self: self.handles)
    @rule(index=picks)
    def release(self, index):
        pair = self.take(index)
        self.release_pair(pair)
        self.dead = [pair]

    @precondition(lambda self: self.handles)
    @rule(index=picks)
    def drop(self, index):
        self.model.release(self.take(index).model)

    @precondition(lambda self: self.handles)
    @rule(index=picks)
    def drop_in_a_cycle(self, index):
        pair = self.take(index)
        self.model.release(pair.model)
        cycle = [pair]
        cycle.append(cycle)
        del pair, cycle
        gc.collect(0)

    @precondition(lambda self: self.handles)
    @rule(index=picks)
    def leave_with_block(self, index):
        pair = self.take(index)
        with pair.real as inside:
            assert inside is pair.real
        self.model.release(pair.model)

    @precondition(lambda self: self.dead)
    @rule(tokens=strategies.token_ids)
    def use_a_released_handle(self, tokens):
        for pair in self.dead:
            assert len(pair.real) == 0
            pair.real.release()
            with pytest.raises(DoubleFreeError):
                self.real.deallocate(pair.real)
            assert self.real.cache(tokens, pair.real) == 0

    @rule()
    def reset(self):
        assert self.real.reset_prefix_cache() == self.model.reset_prefix_cache()

    @rule(ids=st.sets(st.integers(0, 24), max_size=3))
    def forget(self, ids):
        self.forget_pair({i for i in ids if i < self.model.num_blocks})

    @rule(
        tokens=strategies.token_ids, namespace=strategies.namespace_fields, start=st.integers(-2, 3)
    )
    def forget_an_end_that_is_held(self, tokens, namespace, start):
        whole = self.match_pair(tokens, namespace)
        part = slice(start, None)
        end = self.keep(whole.real[part], self.model.slice(whole.model, part))
        self.release_pair(whole)
        self.forget_pair(set(end.model.ids))

    def forget_pair(self, ids: set[int]):
        gone = self.real.forget(sorted(ids)).tolist()
        assert len(gone) == len(set(gone))
        assert set(gone) == self.model.forget(ids)

    @rule(version=st.integers(0, 1))
    def retire(self, version):
        assert self.real.retire(version) == self.model.retire(version)

    @rule()
    def free_what_is_not_ours(self):
        for block_id in range(-1, self.model.num_blocks + 1):
            known = 0 < block_id < self.model.num_blocks
            with pytest.raises(DoubleFreeError if known else ValueError):
                self.real.free(block_id)
        with pytest.raises((DoubleFreeError, ValueError)):
            self.real.free_many(range(1, self.model.num_blocks))

    # -- sequences -----------------------------------------------------------------------------

    def missing(self, tokens, pair: Pair) -> int:
        return -(-len(tokens) // self.block_size) - len(pair.model.ids)

    def admit(self, tokens, namespace, hit: Pair) -> Running | None:
        fresh = self.allocate_pair(self.missing(tokens, hit))
        while fresh is None and (self.handles or self.sequences):
            self.make_room()
            fresh = self.allocate_pair(self.missing(tokens, hit))
        if fresh is None:
            self.release_pair(hit)
            return None
        sequence = Running(list(tokens), namespace, self.concat_pairs([hit, fresh]))
        self.sequences.append(sequence)
        if len(self.sequences) > MAX_SEQUENCES:
            self.release_pair(self.sequences.pop(0).pair)
        return sequence

    def make_room(self):
        """Gives back the oldest loose handle or, published, the oldest sequence."""
        if self.handles:
            self.release_pair(self.handles.pop(0))
            return
        sequence = self.sequences.pop(0)
        self.cache_pair(sequence.tokens, sequence.pair, sequence.namespace)
        self.release_pair(sequence.pair)

    def match_for_admission(self, tokens, namespace) -> Pair:
        """Leaves at least one token to compute, as callers do."""
        reusable = max(0, len(tokens) - 1) // self.block_size * self.block_size
        return self.match_pair(tokens[:reusable], namespace)

    @rule(tokens=strategies.token_ids, namespace=strategies.namespace_fields)
    def start_sequence(self, tokens, namespace):
        self.admit(tokens, namespace, self.match_for_admission(tokens, namespace))

    @rule(tokens=strategies.token_ids, namespace=strategies.namespace_fields)
    def start_twins_side_by_side(self, tokens, namespace):
        """Both match before either publishes, so both compute the same content."""
        hits = [self.match_for_admission(tokens, namespace) for _ in range(2)]
        twins = [self.admit(tokens, namespace, hit) for hit in hits]
        for twin in twins:
            if twin is not None and twin in self.sequences:
                self.cache_pair(twin.tokens, twin.pair, namespace)

    @precondition(lambda self: self.sequences)
    @rule(index=picks, more=strategies.more_tokens, publish=st.booleans())
    def generate(self, index, more, publish):
        sequence = self.sequences[index % len(self.sequences)]
        tokens = sequence.tokens + more
        fresh = self.allocate_pair(max(0, self.missing(tokens, sequence.pair)))
        if fresh is None:
            return
        if sequence.pair.model.kind == fresh.model.kind:
            sequence.pair = self.concat_pairs([sequence.pair, fresh])
            sequence.tokens = tokens
        else:
            self.release_pair(fresh)
        if publish:
            self.cache_pair(sequence.tokens, sequence.pair, sequence.namespace)

    @precondition(lambda self: self.sequences)
    @rule(index=picks, num_tokens=st.integers(0, 30))
    def publish(self, index, num_tokens):
        sequence = self.sequences[index % len(self.sequences)]
        self.cache_pair(sequence.tokens[:num_tokens], sequence.pair, sequence.namespace)

    @precondition(lambda self: self.sequences)
    @rule(index=picks)
    def fork(self, index):
        parent = self.sequences[index % len(self.sequences)]
        pair = Pair(parent.pair.real.share(), self.model.share(parent.pair.model))
        self.sequences.append(Running(list(parent.tokens), parent.namespace, pair))
        if len(self.sequences) > MAX_SEQUENCES:
            self.release_pair(self.sequences.pop(0).pair)

    @precondition(lambda self: self.sequences)
    @rule(index=picks)
    def extend_the_hit(self, index):
        """A sequence that holds some blocks asks for what the cache has beyond them."""
        sequence = self.sequences[index % len(self.sequences)]
        longer = self.match_pair(sequence.tokens, sequence.namespace, existing=sequence.pair)
        self.release_pair(sequence.pair)
        sequence.pair = longer

    @precondition(lambda self: self.sequences)
    @rule(index=picks, order=st.permutations(["cache", "deallocate", "release"]))
    def finish(self, index, order):
        """Publish, give back logically and physically: the order does not matter."""
        sequence = self.sequences.pop(index % len(self.sequences))
        steps = {
            "cache": lambda: self.cache_pair(sequence.tokens, sequence.pair, sequence.namespace),
            "deallocate": lambda: self.deallocate_pair(sequence.pair),
            "release": lambda: self.release_pair(sequence.pair),
        }
        for step in order:
            steps[step]()

    @precondition(lambda self: self.sequences)
    @rule(index=picks)
    def abort(self, index):
        sequence = self.sequences.pop(index % len(self.sequences))
        self.model.release(sequence.pair.model)

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def books_balance(self):
        self.real.check_integrity()

    @invariant()
    def counters_agree(self):
        expected = self.model.counters()
        assert {name: getattr(self.real, name) for name in expected} == expected
        total = expected["num_total_blocks"]
        assert self.real.kv_cache_utilization == expected["num_used_blocks"] / total

    @invariant()
    def handles_agree(self):
        ref_counts = self.model.ref_counts()
        for pair in self.pairs():
            assert pair.real.ids.tolist() == pair.model.ids
            assert pair.real.ref_counts.tolist() == [ref_counts[i] for i in pair.model.ids]
        for pair in self.pairs()[:1]:
            for block in pair.real:
                assert isinstance(block, Block)
                assert block.ref_count == ref_counts[block.id]

    def teardown(self):
        while self.handles or self.sequences:
            pair = self.handles.pop() if self.handles else self.sequences.pop().pair
            self.release_pair(pair)
        self.real.check_integrity()
        assert self.real.num_used_blocks == 0
        assert self.real.num_available_blocks == self.real.num_total_blocks
        everything = self.real.allocate(self.real.num_total_blocks)
        assert sorted(everything.ids.tolist()) == list(range(1, self.model.num_blocks))
        assert self.real.num_blocks_in_prefix_cache == 0
        everything.release()
        self.real.check_integrity()
        assert self.real.num_free_blocks == self.real.num_total_blocks


class ConcurrentManagers(Managers):
    """The thread-safe manager owes the same answers."""

    manager_class = ConcurrentBlockManagerImpl


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
SHORT = settings(deadline=None, suppress_health_check=CHECKS, stateful_step_count=50)
LONG = settings(SHORT, max_examples=3000, stateful_step_count=150)

TestBlockManagerImpl = pytest.mark.timeout(1200)(Managers.TestCase)  # shrinking takes its time
TestBlockManagerImpl.settings = settings(SHORT, max_examples=200)
TestConcurrentBlockManagerImpl = pytest.mark.timeout(1200)(ConcurrentManagers.TestCase)
TestConcurrentBlockManagerImpl.settings = settings(SHORT, max_examples=80)


class LongManagers(Managers):
    """The same, for the night."""


class LongConcurrentManagers(ConcurrentManagers):
    """The same, for the night."""


TestLongBlockManagerImpl = pytest.mark.timeout(3600)(pytest.mark.nightly(LongManagers.TestCase))
TestLongBlockManagerImpl.settings = LONG
TestLongConcurrentBlockManagerImpl = pytest.mark.timeout(3600)(
    pytest.mark.nightly(LongConcurrentManagers.TestCase)
)
TestLongConcurrentBlockManagerImpl.settings = settings(LONG, max_examples=500)
