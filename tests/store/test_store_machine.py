"""Random histories of a store in step with a dictionary."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raykv.store import DiskStore, GuardedStore
from raykv.store.records import record_bytes
from raykv.store.redis_store import RedisStore

from .helpers import key_of, value_of

names = st.lists(st.integers(0, 15), max_size=6)
SEGMENT_BYTES = 2048


class Stores(RuleBasedStateMachine):
    """Values under a name have one of two lengths, so that keys and lengths both can be wrong."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.present: dict[int, int] = {}  # what must be found: length by name
        self.maybe: dict[int, set[int]] = {}  # what may be: lengths that were ever stored
        self.num_asked = 0
        self.store = self.call(self.open())

    async def open(self):
        return DiskStore(self.folder, 1 << 20, segment_bytes=SEGMENT_BYTES)

    def call(self, coroutine):
        return self.runner.run(coroutine)

    def written(self, name, num_bytes, *, was_there):
        if not was_there:
            self.present[name] = num_bytes

    @rule(names=names, num_bytes=st.sampled_from([40, 700]))
    def put(self, names, num_bytes):
        items = [(key_of(name), value_of((name, num_bytes), num_bytes)) for name in names]
        there = self.call(self.store.contains_many([key for key, _ in items]))
        assert self.call(self.store.put_many(items)) == [True] * len(names)
        done = set()
        for name, was_there in zip(names, there, strict=True):
            self.maybe.setdefault(name, set()).add(num_bytes)
            self.written(name, num_bytes, was_there=was_there or name in done)
            done.add(name)

    @rule(names=names, guess=st.sampled_from([40, 700]))
    def get(self, names, guess):
        lengths = [self.present.get(name, guess) for name in names]
        into = [bytearray(length) for length in lengths]
        hits = self.call(self.store.get_many([key_of(name) for name in names], into))
        self.num_asked += len(names)
        for name, length, value, is_hit in zip(names, lengths, into, hits, strict=True):
            assert is_hit or name not in self.present
            if is_hit:
                assert length in self.maybe[name]
                assert value == value_of((name, length), length)
            else:
                assert value == bytes(length)

    @rule(names=names)
    def look(self, names):
        there = self.call(self.store.contains_many([key_of(name) for name in names]))
        for name, is_there in zip(names, there, strict=True):
            assert is_there or name not in self.present
            assert not is_there or name in self.maybe

    @invariant()
    def counts_agree(self):
        stats = self.store.stats()
        assert stats.hits + stats.misses == self.num_asked
        assert stats.errors == stats.skipped == stats.refused == 0

    def teardown(self):
        self.call(self.store.close())
        self.runner.close()
        shutil.rmtree(self.folder)


class Disks(Stores):
    @rule()
    def reopen(self):
        self.call(self.store.close())
        self.store = self.call(self.open())
        self.num_asked = 0

    @invariant()
    def books_balance(self):
        self.disk().check_integrity()

    def disk(self):
        return self.store


class SmallDisks(Disks):
    """Room for four segments: of what was written, the newest two segments' worth must stay."""

    def __init__(self):
        self.order: list[tuple[int, int]] = []
        super().__init__()

    async def open(self):
        return DiskStore(self.folder, 4 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)

    def written(self, name, num_bytes, *, was_there):
        super().written(name, num_bytes, was_there=was_there)
        if was_there:
            return
        self.order.append((name, record_bytes(32, num_bytes)))
        left = 2 * SEGMENT_BYTES
        kept = set()
        for name_, size in reversed(self.order):
            left -= size
            if left < 0:
                break
            kept.add(name_)
        self.present = {name: size for name, size in self.present.items() if name in kept}

    @invariant()
    def size_is_bounded(self):
        used = sum(path.stat().st_size for path in self.folder.glob("*.kv"))
        assert self.store.stats().bytes == used <= 4 * SEGMENT_BYTES


class DamagedDisks(Disks):
    """Bits flip and ends go missing: any value may be lost, but none is ever wrong."""

    @precondition(lambda self: self.maybe)
    @rule(data=st.data(), flip=st.integers(1, 255), is_cut=st.booleans())
    def damage(self, data, flip, is_cut):
        self.call(self.store.close())
        path = data.draw(st.sampled_from(sorted(self.folder.glob("*.kv"))))
        content = bytearray(path.read_bytes())
        if content:
            place = data.draw(st.integers(0, len(content) - 1))
            if is_cut:
                del content[place:]
            else:
                content[place] ^= flip
            path.write_bytes(content)
        self.store = self.call(self.open())
        self.num_asked = 0

    def written(self, name, num_bytes, *, was_there):
        pass


class GuardedDisks(Disks):
    async def open(self):
        return GuardedStore(await super().open(), timeout_s=60)

    def disk(self):
        return self.store._store


class Redises(Stores):
    url = ""
    is_guarded = False

    async def open(self):
        store = RedisStore(self.url, prefix=f"{self.folder}:", timeout_s=60)
        return GuardedStore(store, timeout_s=60) if self.is_guarded else store

    def written(self, name, num_bytes, *, was_there):
        self.present[name] = num_bytes  # the last one stays


FEW = settings(max_examples=30, stateful_step_count=30)


def machine_test(machine):
    case = machine.TestCase
    case.settings = FEW
    return case


TestDisks = machine_test(Disks)
TestSmallDisks = machine_test(SmallDisks)
TestDamagedDisks = machine_test(DamagedDisks)
TestGuardedDisks = machine_test(GuardedDisks)


@pytest.mark.parametrize("is_guarded", [False, True], ids=["bare", "guarded"])
def test_redis(shared_redis, is_guarded):
    machine = type("TheseRedises", (Redises,), {"url": shared_redis.url, "is_guarded": is_guarded})
    case = machine.TestCase()
    case.settings = FEW
    case.runTest()
