"""Host checkpoints under random histories of processes that store, load, fall silent, come late.

Processes that were ended go on reading and writing, until they are dead or report.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raykv.core import Namespace
from raykv.host.tickets import LoadOutcome

from .host_state_world import StatesWorld

picks = st.integers(0, 11)
prompts = st.one_of(
    st.builds(
        lambda head, tail: [0] * head + tail, st.integers(0, 12), st.lists(picks, max_size=2)
    ),
    st.lists(st.integers(0, 1), max_size=14),
)
namespaces = st.sampled_from([Namespace()] * 4 + [Namespace(weights_version=1)])


class HostStatesMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(2, 9),
        block_size=st.integers(1, 3),
        with_checksums=st.booleans(),
        has_eager_zombies=st.booleans(),
    )
    def begin(self, num_slots, block_size, with_checksums, has_eager_zombies):
        self.has_eager_zombies = has_eager_zombies
        self.world = StatesWorld(num_slots, block_size, with_checksums=with_checksums)
        self.world.start()
        self.world.start()

    def process(self, index):
        processes = list(self.world.processes.values())
        return processes[index % len(processes)] if processes else self.world.start()

    @rule(index=picks)
    def end(self, index):
        self.world.end(self.process(index))

    @rule(index=picks)
    def die(self, index):
        self.world.kill(self.process(index))

    @rule(index=picks, tokens=prompts, namespace=namespaces, one=st.booleans())
    def offer(self, index, tokens, namespace, one):
        size = self.world.block_size
        ends = (len(tokens) // size * size,) if one and len(tokens) >= size else ()
        self.world.offer(self.process(index), tokens, *ends, namespace=namespace)

    @rule(index=picks, tokens=prompts, namespace=namespaces, more=st.integers(1, 3))
    def put(self, index, tokens, namespace, more):
        """What was just stored is found."""
        world, process, size = self.world, self.process(index), self.world.block_size
        stop = len(tokens) // size * size
        if not stop:
            return
        stored = world.put(process, tokens, stop, namespace=namespace)
        load = world.find(process, [*tokens, *[1] * more], namespace, max_tokens=stop)
        assert not stored or load.ticket.num_tokens == stop
        if load is not None:
            world.report_loaded(process, load, LoadOutcome.CANCELLED)

    @precondition(lambda self: self.world.stores(stale=False))
    @rule(index=picks)
    def write(self, index):
        stores = self.world.stores(stale=False)
        self.world.write(stores[index % len(stores)][1])

    @precondition(lambda self: self.world.stores(stale=False))
    @rule(index=picks, ok=st.booleans())
    def stored(self, index, ok):
        stores = self.world.stores(stale=False)
        self.world.report_stored(*stores[index % len(stores)], ok=ok)

    @precondition(lambda self: self.world.stores(stale=True))
    @rule(index=picks)
    def report_late(self, index):
        stores, before = self.world.stores(stale=True), self.world.books.stats()
        self.world.report_stored(*stores[index % len(stores)])
        after = self.world.books.stats()
        assert after.expired == before.expired + 1
        assert after.stored_total == before.stored_total

    @rule(
        index=picks,
        tokens=prompts,
        namespace=namespaces,
        min_tokens=st.integers(0, 6),
        step_blocks=st.integers(1, 2),
    )
    def find(self, index, tokens, namespace, min_tokens, step_blocks):
        world, size = self.world, self.world.block_size
        step = step_blocks * size
        names = set(world.findable().values())
        deepest = max(
            (
                end
                for end in range(step, len(tokens), step)
                if end > min_tokens and (namespace, tuple(tokens[:end])) in names
            ),
            default=None,
        )
        load = world.find(
            self.process(index), tokens, namespace, min_tokens=min_tokens, step_tokens=step
        )
        assert deepest == (None if load is None else load.ticket.num_tokens)

    @precondition(lambda self: self.world.loads())
    @rule(index=picks)
    def copy(self, index):
        self.world.copy(self.world.loads()[index % len(self.world.loads())][1])

    @precondition(lambda self: self.world.findable())
    @rule(index=picks, where=picks, copies=st.booleans())
    def find_what_is_there(self, index, where, copies):
        findable = sorted(self.world.findable().items())
        _, (namespace, tokens) = findable[where % len(findable)]
        load = self.world.find(self.process(index), [*tokens, 1], namespace)
        assert load.ticket.num_tokens == len(tokens)
        if copies:
            self.world.copy(load)

    @precondition(lambda self: any(load.copied for _, load, _ in self.world.loads()))
    @rule(index=picks)
    def loaded(self, index):
        loads = [entry for entry in self.world.loads() if entry[1].copied]
        process, load, is_stale = loads[index % len(loads)]
        outcome = self.world.outcome(load)
        assert is_stale or outcome != LoadOutcome.STALE, "what is pinned was reassigned"
        self.world.report_loaded(process, load, outcome)
        if not is_stale and outcome == LoadOutcome.CORRUPT:
            assert load.ticket.host_slot not in self.world.findable()

    @precondition(lambda self: self.world.with_checksums and self.world.findable())
    @rule(index=picks)
    def damage(self, index):
        findable = sorted(self.world.findable())
        self.world.damage(findable[index % len(findable)])

    @precondition(lambda self: self.world.with_checksums and self.world.findable())
    @rule(index=picks, where=picks)
    def read_what_was_damaged(self, index, where):
        """It is found once more, and then never again."""
        world, process = self.world, self.process(index)
        findable = sorted(world.findable().items())
        slot, (namespace, tokens) = findable[where % len(findable)]
        world.damage(slot)
        for is_there in (True, False):
            got = world.get(process, [*tokens, 1], namespace, min_tokens=len(tokens) - 1)
            assert got == ((len(tokens), LoadOutcome.CORRUPT) if is_there else None)

    @rule()
    def release_quarantine(self):
        self.world.books.release_quarantine()

    @rule()
    def reset(self):
        self.world.books.reset()
        assert not self.world.findable()

    @rule(version=st.integers(0, 1))
    def retire(self, version):
        self.world.books.retire(version)

    @invariant()
    def all_holds(self):
        if self.has_eager_zombies:  # those that were ended write whenever they can
            for _, store in self.world.stores(stale=True):
                self.world.write(store)
        for _, load, _ in self.world.loads():
            self.world.outcome(load)
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
TestHostStates = pytest.mark.timeout(1200)(HostStatesMachine.TestCase)
TestHostStates.settings = settings(
    deadline=None, suppress_health_check=CHECKS, stateful_step_count=50, max_examples=150
)


class LongHostStatesMachine(HostStatesMachine):
    """The same, for the night."""


TestLongHostStates = pytest.mark.timeout(3600)(pytest.mark.nightly(LongHostStatesMachine.TestCase))
TestLongHostStates.settings = settings(
    TestHostStates.settings, max_examples=3000, stateful_step_count=120
)
