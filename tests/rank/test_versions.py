"""Weights versions and sleep of a rank's books, over a memory that says what lies in each slot."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from raykv.config import PoolConfig
from raykv.core import Namespace, Sequence
from raykv.engine.lifecycle import Lifecycle
from raykv.errors import IntegrityError, RequestError
from raykv.rank import RankKV

SIZE = 4
MEMORY = {"device": "cpu", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}


def make_rank(num_blocks=20, block_size=SIZE, kind=RankKV, **config):
    return kind(PoolConfig(num_blocks=num_blocks, block_size=block_size, **config))


class Unmarked(RankKV):
    """The negative control: sequences that span an update are not marked."""

    def begin_version(self, version):
        super().begin_version(version)
        self._rows.stale.clear()


class World:
    """A rank, and what its worker has written: per slot all that the K/V there depends on."""

    def __init__(self, kv):
        self.kv = kv
        self.slots = {}  # block id -> per offset the chain of (token, version) computed up to there

    def admit(self, tokens, version=None):
        """A sequence of the user's, in the namespace of the version that is served, or a given."""
        version = self.kv.weights_version if version is None else version
        sequence = Sequence(tokens, namespace=Namespace(weights_version=version))
        if self.kv.allocate(sequence):
            self.check_hit(sequence)
        return sequence

    def check_hit(self, sequence):
        """Whatever was found is what the namespace's weights alone would compute."""
        version, stop = sequence.namespace.weights_version, sequence.kv_state.num_computed_tokens
        tokens = sequence.token_ids.tolist()
        if stop:
            found = self.read(sequence, stop - 1)
            assert found == tuple((token, version) for token in tokens[:stop])

    def read(self, sequence, position):
        index, offset = divmod(position, self.kv.block_size)
        return self.slots[int(sequence.kv_state.block_ids[index])][offset]

    def compute(self, sequence, count=None):
        """Give it memory for all its tokens, then compute some under the weights of now."""
        state = sequence.kv_state
        left = sequence.num_tokens - state.num_computed_tokens
        if not left or not self.kv.allocate(sequence):
            return False
        self.copy()
        state = sequence.kv_state
        start = state.num_computed_tokens
        for position in range(start, start + min(left, count or left)):
            before = self.read(sequence, position - 1) if position else ()
            index, offset = divmod(position, self.kv.block_size)
            slots = self.slots.setdefault(int(state.block_ids[index]), {})
            token = int(sequence.token_ids[position])
            slots[offset] = (*before, (token, self.kv.weights_version))
            state.num_computed_tokens = position + 1
        return True

    def copy(self):
        [swaps] = self.kv.get_swap_block_transfer_infos()
        for source, target in swaps:
            self.slots[target] = dict(self.slots.get(source, {}))
        self.kv.ack_swaps()

    def num_found(self, tokens, version):
        """Tokens of a prompt that another sequence would find now; they are checked."""
        probe = self.admit([*tokens, 77], version)
        count = probe.kv_state.num_computed_tokens
        self.kv.deallocate_without_cache(probe)
        return count


@pytest.fixture(params=[RankKV])
def world(request):
    world = World(make_rank(kind=request.param))
    yield world
    world.kv.check_integrity()


def spanning(world, num_before=10, num_after=10):
    """A sequence that was computed in part before an update and in part after it."""
    sequence = world.admit(list(range(num_before + num_after)))
    world.compute(sequence, num_before)
    world.kv.begin_version(1)
    world.compute(sequence)
    return sequence


# -- sequences across an update --------------------------------------------------------------------


def test_what_was_computed_before_is_published_and_nothing_of_it_afterwards(world):
    sequence = spanning(world)
    tokens = sequence.token_ids.tolist()
    world.kv.cache(sequence)
    assert world.num_found(tokens, 0) == 8, "two full blocks were computed before"
    assert world.num_found(tokens, 1) == 0
    world.kv.deallocate(sequence)
    assert world.num_found(tokens, 0) == 8
    assert world.num_found(tokens, 1) == 0


@pytest.mark.parametrize("num_before", [3, 10])
def test_nothing_is_published_under_the_new_version_whatever_the_namespace_says(world, num_before):
    sequence = spanning(world, num_before)
    sequence.namespace = Namespace(weights_version=1)
    world.kv.deallocate(sequence)
    assert world.num_found(sequence.token_ids.tolist(), 1) == 0


@pytest.mark.parametrize(("version", "num_before"), [(0, 10), (1, 3)])
def test_without_the_mark_old_and_new_are_mixed(version, num_before):
    """The negative control of the tests here."""
    world = World(make_rank(kind=Unmarked))
    sequence = spanning(world, num_before)
    sequence.namespace = Namespace(weights_version=version)
    world.kv.deallocate(sequence)
    with pytest.raises(AssertionError):
        world.num_found(sequence.token_ids.tolist(), version)


def test_a_sequence_that_is_admitted_anew_is_one_of_the_new_version(world):
    sequence = spanning(world)
    world.kv.deallocate(sequence)
    sequence.namespace = Namespace(weights_version=1)
    assert world.kv.allocate(sequence)
    assert sequence.kv_state.num_computed_tokens == 0
    world.compute(sequence)
    world.kv.deallocate(sequence)
    assert world.num_found(sequence.token_ids.tolist(), 1) == 20
    assert world.num_found(sequence.token_ids.tolist(), 0) == 8


@pytest.mark.parametrize("when", ["before", "after"])
def test_forks_of_a_spanning_sequence_publish_nothing(world, when):
    sequence = world.admit(list(range(12)))
    world.compute(sequence, 10)
    children = [sequence.fork()] if when == "before" else []
    world.kv.begin_version(1)
    children += [sequence.fork()] if when == "after" else []
    children.append(children[0].fork())
    for number, child in enumerate(children):
        child.extend([50 + number] * 6)
        assert world.compute(child)
        assert world.kv.is_outdated(child)
        child.namespace = Namespace(weights_version=1)
        world.kv.deallocate(child)
    world.kv.deallocate(sequence)
    for child in children:
        assert world.num_found(child.token_ids.tolist(), 0) == 8
        assert world.num_found(child.token_ids.tolist(), 1) == 0


def test_a_row_without_blocks_belongs_to_the_version_of_its_namespace(world):
    """It holds no old KV, yet would publish new KV under the old name."""
    sequence = Sequence(range(9))
    world.kv.allocate_shared(sequence)
    assert sequence.single_block_id is not None
    world.kv.begin_version(1)
    world.compute(sequence)
    child = sequence.fork()
    world.kv.deallocate([sequence, child])
    assert world.num_found(range(9), 0) == 0


def test_a_wrong_claim_stops_no_update(world):
    liar, honest = world.admit(range(9)), world.admit(range(20, 29))
    world.compute(honest)
    liar.kv_state.num_computed_tokens = 99
    world.kv.begin_version(1)
    liar.kv_state.num_computed_tokens = 0
    assert world.kv.is_outdated(liar)
    assert world.num_found(range(20, 29), 0) == 8
    world.kv.deallocate([liar, honest])


def test_rows_are_not_marked_for_ever(world):
    world.kv.deallocate(spanning(world))
    fresh = world.admit(range(100, 112))
    assert not world.kv.is_outdated(fresh)
    world.compute(fresh)
    world.kv.deallocate(fresh)
    assert world.num_found(range(100, 112), 1) == 12


def test_the_audit_sees_a_mark_that_outlived_its_sequence():
    kv = make_rank()
    kv._rows.stale.add(3)
    with pytest.raises(IntegrityError, match="stale"):
        kv.check_integrity()


# -- random histories ------------------------------------------------------------------------------


class Versions(RuleBasedStateMachine):
    """Sequences come, grow, fork and go, the weights change in between, and the rank sleeps."""

    kind = RankKV

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.integers(1, 4),
        cache=st.sampled_from([True, True, True, False]),
        eviction=st.sampled_from(["lru", "lrfu"]),
    )
    def start(self, num_blocks, block_size, cache, eviction):
        kv = make_rank(
            num_blocks,
            block_size,
            self.kind,
            max_num_seqs=6,
            enable_prefix_cache=cache,
            eviction=eviction,
            memory=MEMORY,
        )
        self.limit = kv.config.max_tokens_per_sequence
        self.world, self.cycle, self.live = World(kv), Lifecycle(kv), []

    def pick(self, number):
        return self.live[number % len(self.live)]

    @rule(length=st.integers(1, 14), tail=st.lists(st.integers(0, 1), max_size=3))
    def arrive(self, length, tail):
        sequence = self.world.admit(([0] * length + tail)[: self.limit])
        if sequence.single_block_id is not None:
            self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9), count=st.integers(1, 9))
    def compute(self, number, count):
        self.world.compute(self.pick(number), count)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9), token=st.integers(0, 1))
    def decode(self, number, token):
        sequence = self.pick(number)
        if sequence.num_tokens < self.limit:
            sequence.append(token)
            self.world.compute(sequence)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9))
    def publish(self, number):
        self.world.kv.cache(self.pick(number))

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9), keep=st.booleans(), back=st.booleans())
    def release(self, number, keep, back):
        sequence, kv = self.pick(number), self.world.kv
        (kv.deallocate if keep else kv.deallocate_without_cache)(sequence)
        sequence.namespace = Namespace(weights_version=kv.weights_version)
        if back and kv.allocate(sequence):  # as after a preemption
            self.world.check_hit(sequence)
        else:
            self.live.remove(sequence)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9))
    def fork(self, number):
        child = self.pick(number).fork()
        if child.single_block_id is not None:
            self.live.append(child)

    @rule(step=st.integers(1, 3))
    def update(self, step):
        version = self.world.kv.weights_version + step
        self.cycle.prepare_weights(version, None, "keep")
        self.cycle.apply_weights(version)

    @rule(back=st.integers(0, 2))
    def retire(self, back):
        self.cycle.retire(max(0, self.world.kv.weights_version - back))

    @rule()
    def reset(self):
        self.world.kv.reset_prefix_cache()

    @rule()
    def sleep(self):
        if any(sequence.single_block_id is not None for sequence in self.live):
            with pytest.raises(RequestError):
                self.cycle.sleep(1)
            return
        self.cycle.sleep(1)
        self.cycle.wake_up()
        self.world.slots.clear()

    @rule(length=st.integers(1, 14), tail=st.lists(st.integers(0, 1), max_size=3))
    def look(self, length, tail):
        """Whatever is found under any version is what that version computes."""
        for version in range(self.world.kv.weights_version + 1):
            self.world.num_found(([0] * length + tail)[: self.limit - 1], version)

    @invariant()
    def books_balance(self):
        if hasattr(self, "world"):
            self.world.kv.check_integrity()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.kv.deallocate(self.live)
            self.world.copy()
            stats = self.world.kv.rank_stats()
            assert stats.num_available_blocks == stats.num_total_blocks


TestVersions = Versions.TestCase
TestVersions.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class UnmarkedVersions(Versions):
    """The negative control."""

    kind = Unmarked


def test_the_histories_see_a_missing_mark():
    plan = settings(
        max_examples=400, derandomize=True, database=None, deadline=None, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(UnmarkedVersions, settings=plan)


@pytest.mark.nightly
class TestLongVersions(Versions.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=100, deadline=None)
