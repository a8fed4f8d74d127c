"""Stores to test: on disk, in Redis, bare and guarded."""

from __future__ import annotations

import asyncio

import pytest

from raykv.store import DiskStore, GuardedStore
from raykv.store.redis_store import RedisStore

from .servers import RedisServer


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
