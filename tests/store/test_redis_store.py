"""The Redis store's own: expiry, damage, and servers that die, freeze and come back."""

from __future__ import annotations

import asyncio
import sys

import pytest
import redis

from raykv.errors import ConfigError, StoreError
from raykv.store import GuardedStore
from raykv.store.redis_store import RedisStore

from .helpers import get_one, key_of, names_found, put_names, value_of


def run_with(store, scenario):
    async def run():
        try:
            return await scenario(store)
        finally:
            await store.close()

    return asyncio.run(run())


@pytest.fixture
def client(shared_redis):
    with redis.Redis.from_url(shared_redis.url) as one:
        one.flushdb()
        yield one


def test_values_are_there_for_the_next_client(shared_redis, client):
    run_with(RedisStore(shared_redis.url), lambda store: put_names(store, range(5)))

    async def scenario(store):
        assert await names_found(store, range(6)) == list(range(5))

    run_with(RedisStore(shared_redis.url), scenario)


def test_an_expired_value_is_a_miss(shared_redis, client):
    async def scenario(store):
        await put_names(store, ["x"])
        assert await names_found(store, ["x"]) == ["x"]
        name = b"raykv:" + key_of("x")
        assert 0 < client.pttl(name) <= 60_500
        client.pexpire(name, 1)
        await asyncio.sleep(0.05)
        assert await names_found(store, ["x"]) == []
        assert await store.contains_many([key_of("x")]) == [False]
        assert store.stats().corrupt == 0

    run_with(RedisStore(shared_redis.url, ttl_s=60.5), scenario)


def test_without_a_time_to_live_nothing_expires(shared_redis, client):
    async def scenario(store):
        await put_names(store, ["x"])
        assert client.ttl(b"raykv:" + key_of("x")) == -1

    run_with(RedisStore(shared_redis.url), scenario)


def test_the_prefix_keeps_stores_apart(shared_redis, client):
    async def scenario(store):
        await put_names(store, ["x"])
        assert client.keys() == [b"a:" + key_of("x")]
        other = RedisStore(shared_redis.url, prefix="b:")
        assert await names_found(other, ["x"]) == []
        await other.close()

    run_with(RedisStore(shared_redis.url, prefix="a:"), scenario)


def test_a_damaged_value_is_a_miss_at_every_byte(shared_redis, client):
    async def scenario(store):
        name = b"raykv:" + key_of("x")
        await put_names(store, ["x"], 20)
        whole = client.get(name)
        damaged = [
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
            for place in range(len(whole))
        ]
        cut = [whole[:size] for size in range(len(whole))]
        for payload in [*damaged, *cut, whole + b"x"]:
            client.set(name, payload)
            assert await get_one(store, key_of("x"), 20) is None
        assert store.stats().corrupt == 2 * len(whole) + 1
        client.set(name, whole)
        assert await names_found(store, ["x"], 20) == ["x"]

    run_with(RedisStore(shared_redis.url), scenario)


def test_a_value_under_anothers_key_is_a_miss(shared_redis, client):
    async def scenario(store):
        await put_names(store, ["x"])
        client.rename(b"raykv:" + key_of("x"), b"raykv:" + key_of("y"))
        assert await get_one(store, key_of("y")) is None
        assert store.stats().corrupt == 1

    run_with(RedisStore(shared_redis.url), scenario)


def test_large_batches_go_in_pieces(shared_redis, client, monkeypatch):
    monkeypatch.setattr("raykv.store.redis_store._BATCH_BYTES", 250)

    async def scenario(store):
        items = [(key_of(i), value_of(i, size)) for i, size in enumerate([100] * 5 + [1000, 10])]
        assert await store.put_many(items) == [True] * 7
        into = [bytearray(len(value)) for _, value in items]
        assert await store.get_many([key for key, _ in items], into) == [True] * 7
        assert [bytes(buffer) for buffer in into] == [value for _, value in items]
        assert client.info("commandstats")["cmdstat_mget"]["calls"] == 5

    client.config_resetstat()
    run_with(RedisStore(shared_redis.url), scenario)


def test_a_full_server_refuses_and_that_is_no_error(own_redis):
    async def scenario(store):
        assert await put_names(store, range(5), 1000) == [True] * 5
        with redis.Redis.from_url(own_redis.url) as client:
            client.config_set("maxmemory", 1)
            assert await put_names(store, range(5, 8), 1000) == [False] * 3
            assert await names_found(store, range(8), 1000) == list(range(5))
            client.config_set("maxmemory", 0)
        assert await put_names(store, range(5, 8), 1000) == [True] * 3
        stats = store.stats()
        assert (stats.refused, stats.errors, stats.stored, stats.bytes) == (3, 0, 8, 8000)

    run_with(RedisStore(own_redis.url), scenario)


def test_an_answer_that_is_an_error_is_a_store_error(shared_redis, client):
    async def scenario(store):
        client.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], commands=["+get"])
        for call in (store.put_many([(b"k", b"v")]), get_one(store, b"k")):
            with pytest.raises(StoreError, match="permission"):
                await call
        assert store.stats().errors == 2

    run_with(RedisStore(shared_redis.url.replace("//", "//reader:x@")), scenario)


# -- servers that die, freeze and come back --------------------------------------------------------


def test_a_killed_server_is_an_error_until_it_is_back(own_redis):
    async def scenario(store):
        await put_names(store, [1])
        own_redis.kill()
        for call in (put_names(store, [2]), names_found(store, [1]), store.contains_many([b"k"])):
            with pytest.raises(StoreError, match=f"127.0.0.1:{own_redis.port} failed"):
                await call
        assert store.stats().errors == 3
        own_redis.start()
        assert await names_found(store, [1]) == []  # it kept nothing
        assert await put_names(store, [1]) == [True]
        assert await names_found(store, [1]) == [1]
        assert store.stats().errors == 3

    run_with(RedisStore(own_redis.url), scenario)


def test_connections_that_died_unnoticed_cost_no_call(own_redis):
    async def scenario(store):
        await asyncio.gather(*(put_names(store, [name]) for name in range(8)))  # a few connections
        own_redis.kill()
        own_redis.start()
        answers = await asyncio.gather(*(put_names(store, [name]) for name in range(8)))
        assert answers == [[True]] * 8
        assert store.stats().errors == 0

    run_with(RedisStore(own_redis.url), scenario)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_behind_a_guard_calls_are_misses_in_time_and_later_hits_again(own_redis, is_killed):
    async def scenario(guard):
        assert await put_names(guard, range(5)) == [True] * 5
        own_redis.kill() if is_killed else own_redis.freeze()
        for _ in range(20):
            assert await names_found(guard, range(5)) == []
            assert await put_names(guard, [7]) == [False]
            assert await guard.contains_many([key_of(1)]) == [False]
        assert not guard.is_available
        assert isinstance(guard.last_error, StoreError)
        stats = guard.stats()
        assert stats.errors == 3  # each waited 1 s at most, and the others not at all
        assert stats.skipped == 57
        assert stats.timeouts == (0 if is_killed else 3)
        own_redis.start() if is_killed else own_redis.thaw()
        await asyncio.sleep(1.1)
        assert await put_names(guard, range(5)) == [True] * 5
        assert guard.is_available
        assert await names_found(guard, range(5)) == list(range(5))

    store = RedisStore(own_redis.url, timeout_s=30)
    run_with(GuardedStore(store, timeout_s=1, max_failures=3, cooldown_s=1), scenario)


def test_answers_that_come_too_late_are_never_taken_for_others(own_redis):
    """A client that reused a connection with an answer under way would read that one first."""

    async def scenario(guard):
        await put_names(guard, range(40))
        for start in (0, 10):
            own_redis.freeze()
            into = [bytearray(100) for _ in range(3)]
            assert await guard.get_many([key_of(start + i) for i in range(3)], into) == [False] * 3
            own_redis.thaw()
            names = range(start + 3, start + 6)
            assert await names_found(guard, names) == list(names)
            assert into == [bytes(100)] * 3
        assert guard.stats().corrupt == 0

    store = RedisStore(own_redis.url, timeout_s=30)
    run_with(GuardedStore(store, timeout_s=1, max_failures=100), scenario)


def test_a_server_that_is_silent_ends_a_bare_call_too(own_redis):
    async def scenario(store):
        await put_names(store, [1])
        own_redis.freeze()
        with pytest.raises(StoreError, match="Timeout"):
            await names_found(store, [1])
        own_redis.thaw()
        assert await names_found(store, [1]) == [1]

    run_with(RedisStore(own_redis.url, timeout_s=0.7), scenario)


# -- settings --------------------------------------------------------------------------------------


def test_settings_that_make_no_sense_are_refused():
    for arguments in (("http://x",), ("redis://x:port",)):
        with pytest.raises(ConfigError, match="the URL of the KV store makes no sense"):
            RedisStore(*arguments)
    for options in ({"ttl_s": 0}, {"ttl_s": -1}, {"timeout_s": 0}):
        with pytest.raises(ConfigError, match="must be"):
            RedisStore("redis://localhost", **options)


def test_the_password_is_never_shown():
    async def scenario(store):
        with pytest.raises(StoreError) as caught:
            await store.contains_many([b"k"])
        assert "secret" not in str(caught.value)
        assert "127.0.0.1:1 failed" in str(caught.value)

    run_with(RedisStore("redis://user:secret@127.0.0.1:1/0"), scenario)


def test_without_redis_py_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ConfigError, match=r"pip install 'raykv\[redis\]'"):
        RedisStore("redis://localhost")


def test_a_closed_store_says_so(shared_redis):
    async def scenario(store):
        await store.close()
        with pytest.raises(StoreError, match="is closed"):
            await store.contains_many([b"k"])

    run_with(RedisStore(shared_redis.url), scenario)
