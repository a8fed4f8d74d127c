"""Random histories of a host tier with a store behind it that fails, hangs and loses values.

Threads interleave as they like: what must hold, holds at any moment.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raykv.core import Namespace
from raykv.host.prefetches import Prefetches
from raykv.host.store_source import StoreSource, leading
from raykv.host.store_writer import StoreWriter
from raykv.store import DiskStore, GuardedStore, is_storable
from raykv.testing_stores import FaultyStore, StoreFaults

from .sources import KEYS, Clock, PatternSource
from .tier_world import BLOCK_BYTES, Loop, Tier, content_of, prompt_of, tokens_of, until

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=7)
namespaces = st.sampled_from(
    [Namespace()] * 3 + [Namespace(tenant="a"), Namespace(weights_version=1)]
)
picks = st.integers(0, 1 << 20)
MOODS = {
    "well": {},
    "failing": {"fails": 0.5},
    "hanging": {"hangs": 0.5},
    "slow": {"is_slow": 0.7},
    "losing": {"misses": 0.3},
    "bad": {"fails": 0.2, "hangs": 0.1, "is_slow": 0.3, "misses": 0.2},
}


class Tiers(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(3, 14), has_second=st.booleans(), seed=picks)
    def begin(self, num_blocks, has_second, seed):
        self.folder = Path(tempfile.mkdtemp())
        self.loop = Loop()
        self.clock = Clock()
        self.tier = tier = Tier(num_blocks)
        self.faults = StoreFaults(random.Random(seed), slow_s=0.003)
        self.disk = DiskStore(self.folder, 1 << 14)
        store = FaultyStore(self.disk, self.faults)
        self.store = GuardedStore(store, timeout_s=0.02, cooldown_s=0.01)
        self.source = StoreSource(self.store, KEYS)
        sources = [self.source, PatternSource(3, gap=(1,))][: 1 + has_second]
        parts = (tier.books, tier.slab, tier.lock)
        options = {"loop": self.loop.loop, "clock": self.clock}
        self.prefetches = Prefetches(*parts, sources, client_id="prefetches", **options)
        self.writer = StoreWriter(*parts, self.store, KEYS, client_id="writer", **options)
        self.computed = set()

    # -- ranks ---------------------------------------------------------------------------------

    @rule(marks=prompts, namespace=namespaces, is_noted=st.booleans())
    def compute(self, marks, namespace, is_noted):
        self.tier.compute(*marks, namespace=namespace)
        self.computed.add((tuple(marks), namespace))
        if is_noted:
            self.writer.note(tokens_of(*marks), namespace, len(marks))

    @rule(marks=prompts, namespace=namespaces)
    def note(self, marks, namespace):
        self.writer.note(tokens_of(*marks), namespace, len(marks))

    @rule(marks=prompts, namespace=namespaces)
    def load(self, marks, namespace):
        self.tier.num_right(*marks, namespace=namespace)

    @rule(marks=prompts, namespace=namespaces)
    def start(self, marks, namespace):
        prompt = prompt_of(*marks, namespace=namespace)
        assert self.prefetches.start(prompt) or not self.prefetches.is_running(prompt)

    @rule(marks=prompts, namespace=namespaces, timeout_s=st.sampled_from([0, 0.002, 20]))
    def wait(self, marks, namespace, timeout_s):
        prompt = prompt_of(*marks, namespace=namespace)
        self.prefetches.wait(prompt, timeout_s)
        assert not self.prefetches.is_running(prompt)
        self.tier.num_right(*marks, namespace=namespace)

    @rule(marks=prompts, namespace=namespaces)
    def give_up(self, marks, namespace):
        self.prefetches.give_up(prompt_of(*marks, namespace=namespace))

    @rule(marks=prompts, namespace=namespaces, mood=st.sampled_from(["failing", "losing"]))
    def another_fills_the_store_and_it_is_read(self, marks, namespace, mood):
        """With an empty host, so that reads are common that end somewhere in the middle."""
        tokens = tokens_of(*marks)
        keys = KEYS.keys(tokens, namespace)
        items = [(key, content_of(tokens, at, namespace)) for at, key in enumerate(keys)]
        self.loop.call(self.disk.put_many(items))
        self.reset()
        self.store_is(mood)
        self.start(marks, namespace)
        self.wait(marks, namespace, 20)

    # -- the world -----------------------------------------------------------------------------

    @rule(mood=st.sampled_from(sorted(MOODS)))
    def store_is(self, mood):
        for name in ("fails", "hangs", "is_slow", "misses"):
            setattr(self.faults, name, MOODS[mood].get(name, 0.0))

    @rule()
    def drain(self):
        assert self.writer.drain(30)

    @rule(marks=prompts, namespace=namespaces)
    def what_the_store_has_comes_back(self, marks, namespace):
        """Once all is well and the host is empty, as far as there is room."""
        self.store_is("well")
        self.drain()
        until(lambda: not self.prefetches.stats()["under_way"])
        self.reset()
        self.repair()
        prompt = prompt_of(*marks, namespace=namespace)
        keys = KEYS.keys(prompt.tokens, namespace) if is_storable(namespace) else []
        num_there = leading(self.loop.call(self.disk.contains_many(keys)))
        room = len(self.tier.books.blocks.ready) - 1

        def is_back():  # not always at once: on a busy machine calls run out of time
            self.clock.now_s += 10  # and nothing is remembered
            self.prefetches.start(prompt)
            self.prefetches.wait(prompt, 30)
            return self.tier.num_right(*marks, namespace=namespace) >= min(num_there, room)

        until(is_back)

    @rule(index=picks)
    def damage(self, index):
        """Only what readers may read: what is being written has no checksum yet."""
        with self.tier.lock:
            books = self.tier.books
            cached = books.manager.is_cached(np.arange(len(books.blocks.ready)))
            rows = np.flatnonzero(cached & books.blocks.ready)
            if len(rows):
                self.tier.damage(int(rows[index % len(rows)]))

    @rule()
    def repair(self):
        with self.tier.lock:
            self.tier.books.release_quarantine()

    @rule()
    def reset(self):
        self.tier.reset()

    @rule(client_id=st.sampled_from(["prefetches", "writer"]))
    def lease_ends(self, client_id):
        with self.tier.lock:
            client = self.tier.books.clients.find(client_id)
            if client is not None:
                client.expires_s = -1.0
                self.tier.books.expire(0.0)

    @invariant()
    def all_holds(self):
        self.tier.check()
        self.prefetches.check_integrity()
        self.writer.check_integrity()

    def teardown(self):
        if not hasattr(self, "tier"):
            return
        self.store_is("well")
        assert self.writer.drain(30)
        self.prefetches.close()
        self.writer.close()
        self.all_holds()
        stats = self.tier.books.stats()
        assert stats.storing == stats.pinned == 0
        assert stats.quarantined == len(self.tier.books.blocks.corrupt)
        for marks, namespace in self.computed:
            self.check_stored(marks, namespace)
        self.loop.call(self.store.close())
        self.loop.close()
        self.tier.slab.close()
        shutil.rmtree(self.folder)

    def check_stored(self, marks, namespace):
        """Whatever the store gives is right."""
        prompt = prompt_of(*marks, namespace=namespace)
        rows = np.zeros((len(marks), BLOCK_BYTES), np.uint8)
        read = self.source.read(prompt, 0, rows, np.arange(len(marks)), lambda _: None)
        num_read = self.loop.call(read)
        assert not num_read or is_storable(namespace)
        for at in range(num_read):
            assert (rows[at] == content_of(prompt.tokens, at, namespace)).all()


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
TestTiers = pytest.mark.timeout(1200)(Tiers.TestCase)
TestTiers.settings = settings(
    deadline=None, suppress_health_check=CHECKS, stateful_step_count=40, max_examples=100
)


class LongTiers(Tiers):
    """The same, for the night."""


TestLongTiers = pytest.mark.timeout(3600)(pytest.mark.nightly(LongTiers.TestCase))
TestLongTiers.settings = settings(TestTiers.settings, max_examples=2000, stateful_step_count=80)
