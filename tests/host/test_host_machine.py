"""The host tier under random histories of processes that store, load, fall silent and come late.

Processes whose lease is over go on reading and writing, until they are dead or report.
"""

from __future__ import annotations

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

from raykv.core import Namespace
from raykv.host.tickets import LoadOutcome

from .host_world import LEASE_S, World

picks = st.integers(0, 11)
prompts = st.one_of(
    st.builds(
        lambda head, tail: [0] * head + tail, st.integers(0, 12), st.lists(picks, max_size=2)
    ),
    st.lists(st.integers(0, 1), max_size=14),
)
namespaces = st.sampled_from([Namespace()] * 4 + [Namespace(weights_version=1)])


class HostTiers(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 3),
        with_checksums=st.booleans(),
        eviction=st.sampled_from(["lru", "lru", "lrfu"]),
        has_eager_zombies=st.booleans(),
    )
    def begin(self, num_blocks, block_size, with_checksums, eviction, has_eager_zombies):
        self.has_eager_zombies = has_eager_zombies
        self.world = World(num_blocks, block_size, with_checksums=with_checksums, eviction=eviction)
        self.world.start()
        self.world.start()

    # -- picking -------------------------------------------------------------------------------

    def processes(self):
        return list(self.world.processes.values())

    def with_lease(self):
        return [process for process in self.processes() if self.world.has_lease(process)]

    def stores(self, *, stale):
        return [
            (process, store)
            for process in self.processes()
            for store in (process.stale_stores if stale else process.stores)
        ]

    def loads(self):
        return [
            (process, load, stale)
            for process in self.processes()
            for stale, loads in ((False, process.loads), (True, process.stale_loads))
            for load in loads
        ]

    # -- processes -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.processes()) < 5)
    @rule()
    def start(self):
        self.world.start()

    @precondition(lambda self: self.processes())
    @rule(index=picks)
    def join_again(self, index):
        process = self.processes()[index % len(self.processes())]
        self.world.tier.join(process.client_id, process.pid, self.world.now_s)

    @rule(silent=st.sets(picks, max_size=2), seconds=st.sampled_from([1.0, LEASE_S, LEASE_S + 1]))
    def pass_time(self, silent, seconds):
        alive = [process for i, process in enumerate(self.processes()) if i not in silent]
        self.world.pass_time(seconds, alive)

    @precondition(lambda self: self.processes())
    @rule(index=picks)
    def leave(self, index):
        process = self.processes()[index % len(self.processes())]
        self.world.tier.leave(process.client_id)
        process.lose_lease()

    @precondition(lambda self: self.processes())
    @rule(index=picks)
    def die(self, index):
        self.world.kill(self.processes()[index % len(self.processes())])

    # -- storing -------------------------------------------------------------------------------

    @precondition(lambda self: self.with_lease())
    @rule(index=picks, tokens=prompts, more=st.lists(prompts, max_size=2), namespace=namespaces)
    def offer(self, index, tokens, more, namespace):
        process = self.with_lease()[index % len(self.with_lease())]
        stores = self.world.offer(process, tokens, *more, namespace=namespace)
        if not more:
            ticket = stores[0].ticket
            num_given = ticket.first_block + len(ticket.host_ids)
            if num_given < len(tokens) // self.world.block_size:
                own = 0 if ticket.id else ticket.first_block
                assert self.world.tier.manager.num_available_blocks <= own, "too few were given"

    @precondition(lambda self: self.with_lease())
    @rule(index=picks, tokens=prompts, namespace=namespaces)
    def put(self, index, tokens, namespace):
        """What was stored can be found, unless others are still storing what it builds on."""
        process = self.with_lease()[index % len(self.with_lease())]
        before = self.world.tier.stats()
        store = self.world.put(process, tokens, namespace=namespace)
        after = self.world.tier.stats()
        assert after.orphaned == before.orphaned
        assert after.stored_total == before.stored_total + len(store.names)
        load = self.world.find(process, [*tokens, 1], namespace=namespace)
        first = store.ticket.first_block
        assert len(load.names) < first or len(load.names) >= first + len(store.names)
        if load.names:
            self.world.report_loaded(process, load, [LoadOutcome.CANCELLED] * len(load.names))

    @precondition(lambda self: self.stores(stale=False))
    @rule(index=picks, num_blocks=st.integers(1, 9))
    def write(self, index, num_blocks):
        stores = self.stores(stale=False)
        self.world.write(stores[index % len(stores)][1], num_blocks)

    @precondition(lambda self: self.stores(stale=False))
    @rule(index=picks, num_ok=st.integers(0, 14))
    def stored(self, index, num_ok):
        stores = self.stores(stale=False)
        self.world.report_stored(*stores[index % len(stores)], num_ok)

    @precondition(lambda self: self.stores(stale=True))
    @rule()
    def write_late(self):
        for _, store in self.stores(stale=True):
            self.world.scribble(store)

    @precondition(lambda self: self.stores(stale=True))
    @rule(index=picks)
    def report_late(self, index):
        stores, before = self.stores(stale=True), self.world.tier.stats()
        self.world.report_stored(*stores[index % len(stores)])
        after = self.world.tier.stats()
        assert after.expired == before.expired + 1
        assert after.stored_total == before.stored_total

    # -- loading -------------------------------------------------------------------------------

    @precondition(lambda self: self.with_lease())
    @rule(index=picks, tokens=prompts, num_device_blocks=st.integers(0, 3), namespace=namespaces)
    def find(self, index, tokens, num_device_blocks, namespace):
        process = self.with_lease()[index % len(self.with_lease())]
        self.world.find(process, tokens, num_device_blocks, namespace)

    @precondition(lambda self: self.loads())
    @rule(index=picks)
    def copy(self, index):
        _, load, _ = self.loads()[index % len(self.loads())]
        self.world.copy(load)

    @precondition(lambda self: self.with_lease() and self.world.findable())
    @rule(index=picks, where=picks, copies=st.booleans())
    def find_what_is_there(self, index, where, copies):
        findable = sorted(self.world.findable())
        process = self.with_lease()[index % len(self.with_lease())]
        block_id = findable[where % len(findable)]
        tokens, namespace = self.world.tier.manager._cache.content(block_id)
        load = self.world.find(process, [*tokens.tolist(), 1], namespace=namespace)
        if copies:
            self.world.copy(load)

    @precondition(lambda self: any(load.copied for _, load, _ in self.loads()))
    @rule(index=picks)
    def loaded(self, index):
        loads = [entry for entry in self.loads() if entry[1].copied]
        process, load, is_stale = loads[index % len(loads)]
        outcomes = self.world.outcomes(load)
        assert is_stale or LoadOutcome.STALE not in outcomes, "what is pinned was reassigned"
        self.world.report_loaded(process, load, outcomes)
        if not is_stale:
            bad = load.ticket.host_ids[[o == LoadOutcome.CORRUPT for o in outcomes]]
            assert not self.world.findable() & set(bad.tolist())

    # -- the rest ------------------------------------------------------------------------------

    @precondition(lambda self: self.world.with_checksums and self.world.findable())
    @rule(index=picks)
    def damage(self, index):
        findable = sorted(self.world.findable())
        self.world.damage(findable[index % len(findable)])

    @precondition(
        lambda self: self.world.with_checksums and self.world.findable() and self.with_lease()
    )
    @rule(index=picks, where=picks)
    def read_what_was_damaged(self, index, where):
        """It is found once more, and then never again, nor what is behind it."""
        world, findable = self.world, sorted(self.world.findable())
        process = self.with_lease()[index % len(self.with_lease())]
        block_id = findable[where % len(findable)]
        tokens, namespace = world.tier.manager._cache.content(block_id)
        prompt = [*tokens.tolist(), 1]
        world.damage(block_id)
        outcomes = world.get(process, prompt, namespace=namespace)
        if len(outcomes) * world.block_size == len(tokens):  # else somebody still stores before it
            assert outcomes[-1] == LoadOutcome.CORRUPT
            first_bad = outcomes.index(LoadOutcome.CORRUPT)
            assert len(world.get(process, prompt, namespace=namespace)) == first_bad

    @rule()
    def release_quarantine(self):
        self.world.tier.release_quarantine()

    @rule()
    def reset(self):
        self.world.tier.reset()
        assert self.world.findable() == set()

    @rule(version=st.integers(0, 1))
    def retire(self, version):
        self.world.tier.retire(version)

    @invariant()
    def all_holds(self):
        if self.has_eager_zombies:  # those without a lease write whenever they can
            for _, store in self.stores(stale=True):
                self.world.scribble(store)
        for _, load, _ in self.loads():  # those who copied before, and those who copy now
            self.world.outcomes(load)
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
TestHostTiers = pytest.mark.timeout(1200)(HostTiers.TestCase)
TestHostTiers.settings = settings(
    deadline=None, suppress_health_check=CHECKS, stateful_step_count=50, max_examples=150
)


class LongHostTiers(HostTiers):
    """The same, for the night."""


TestLongHostTiers = pytest.mark.timeout(3600)(pytest.mark.nightly(LongHostTiers.TestCase))
TestLongHostTiers.settings = settings(
    TestHostTiers.settings, max_examples=3000, stateful_step_count=120
)
