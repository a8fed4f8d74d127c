"""Stores to test: on disk, in Redis, bare and guarded."""

from __future__ import annotations

import asyncio
import random

import pytest

from raykv.host.prefetches import Prefetches
from raykv.store import DiskStore, GuardedStore
from raykv.store.redis_store import RedisStore
from raykv.testing_stores import FaultyStore, StoreFaults

from .servers import RedisServer
from .sources import Clock
from .tier_world import Loop, Tier


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory):
    """One server for all tests that only use it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path):
    """A server that the test may kill and freeze."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["disk", "redis", "guarded disk", "guarded redis"])
def with_store(request, tmp_path):
    """Run a coroutine function with a fresh store."""
    if request.param.endswith("redis"):
        url = request.getfixturevalue("shared_redis").url

    async def run(scenario):
        if request.param.endswith("redis"):
            store = RedisStore(url, prefix=f"{tmp_path}:", timeout_s=30)
        else:
            store = DiskStore(tmp_path / "store", 1 << 20)
        if request.param.startswith("guarded"):
            store = GuardedStore(store, timeout_s=30)
        try:
            return await scenario(store)
        finally:
            await store.close()

    return lambda scenario: asyncio.run(run(scenario))


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def tier():
    tier = Tier()
    yield tier
    tier.check()
    tier.slab.close()


@pytest.fixture
def disk(loop, tmp_path):
    """A guarded store on the disk, whose calls the test may let go wrong by ``disk.faults``."""
    faults = StoreFaults(random.Random(1))
    store = GuardedStore(
        FaultyStore(DiskStore(tmp_path / "store", 1 << 20), faults), timeout_s=0.3, cooldown_s=0.3
    )
    store.faults = faults
    yield store
    loop.call(store.close())


@pytest.fixture
def begin(loop, tier):
    """Make prefetches of the tier from sources; closed and checked at the end."""
    made = []

    def begin(*sources, on=tier, **options):
        options = {"client_id": "prefetches", "clock": Clock(), **options}
        made.append(Prefetches(on.books, on.slab, on.lock, sources, loop=loop.loop, **options))
        return made[-1]

    yield begin
    for prefetches in made:
        prefetches.check_integrity()
        prefetches.close()
        assert prefetches.stats()["under_way"] == 0
        prefetches.check_integrity()
