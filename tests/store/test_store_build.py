"""Opening the store that a configuration names, and naming weights."""

from __future__ import annotations

import asyncio

import pytest

from raykv.config_host import StoreConfig
from raykv.errors import ConfigError, StoreError
from raykv.host.store_build import make_store, weights_digest, weights_name
from raykv.store import DiskStore

from .helpers import names_found, put_names


def test_each_tier_has_a_folder_of_its_own_that_outlives_it(tmp_path):
    config = StoreConfig(type="disk", path=str(tmp_path / "kv"), max_bytes=1 << 20)

    async def scenario():
        first, second = await make_store(config, "tier-0"), await make_store(config, "tier-1")
        with pytest.raises(StoreError, match="in use by process"):
            await make_store(config, "tier-0")
        await put_names(first, range(3))
        assert await names_found(second, range(3)) == []
        await first.close()
        await second.close()
        again = await make_store(config, "tier-0")
        assert await names_found(again, range(3)) == [0, 1, 2]
        await again.close()

    asyncio.run(scenario())


def test_its_settings_arrive(shared_redis, tmp_path):
    async def scenario():
        config = StoreConfig(type="redis", url=shared_redis.url, ttl_s=60)
        store = await make_store(config, "tier-0")
        assert await put_names(store, ["x"]) == [True]
        other = await make_store(config, "tier-1")
        assert await names_found(other, ["x"]) == ["x"]  # one server is everybody's
        await store.close()
        await other.close()

    asyncio.run(scenario())


def test_a_server_that_is_not_there_is_reported_later_and_slows_nothing():
    config = StoreConfig(type="redis", url="redis://127.0.0.1:1", max_failures=2, cooldown_s=60)

    async def scenario():
        store = await make_store(config, "tier-0")
        for _ in range(5):
            assert await names_found(store, ["x"]) == []
        assert "127.0.0.1:1 failed" in str(store.last_error)
        assert (store.stats().errors, store.stats().skipped) == (2, 3)
        await store.close()

    asyncio.run(scenario())


def test_what_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    config = StoreConfig(type="disk", path=str(tmp_path / "file"))
    with pytest.raises(StoreError, match="cannot hold a KV store"):
        asyncio.run(make_store(config, "tier-0"))
    with pytest.raises(ConfigError, match="max_bytes"):
        asyncio.run(make_store(config.model_copy(update={"max_bytes": 1}), "tier-0"))


def test_the_folder_is_read_beside_the_loop(tmp_path, monkeypatch):
    """A store of many gigabytes takes its time to open, and a tier has more to do."""
    config = StoreConfig(type="disk", path=str(tmp_path))
    seen = []

    async def scenario():
        loop = asyncio.get_running_loop()
        opened = DiskStore.__init__

        def slow(store, *args, **kwargs):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)
            seen.append("the loop went on")
            opened(store, *args, **kwargs)

        monkeypatch.setattr(DiskStore, "__init__", slow)
        store = await make_store(config, "tier-0")
        await store.close()

    asyncio.run(scenario())
    assert seen == ["the loop went on"]


# -- weights ---------------------------------------------------------------------------------------


def model(folder, **files):
    folder.mkdir()
    for name, content in {"config.json": "{}", "a.safetensors": "one", **files}.items():
        (folder / name).write_text(content)
    return folder


def test_a_digest_is_of_the_files_and_not_of_their_place(tmp_path):
    digest = weights_digest(model(tmp_path / "a"))
    assert len(digest) == 32
    assert weights_digest(model(tmp_path / "b", **{"notes.txt": "x"})) == digest
    others = [
        {"a.safetensors": "two"},
        {"a.safetensors": "one "},
        {"config.json": "{ }"},
        {"b.safetensors": "one"},
        {"a.bin": "one"},
    ]
    digests = {
        weights_digest(model(tmp_path / f"c{at}", **files)) for at, files in enumerate(others)
    }
    assert len(digests | {digest}) == len(others) + 1


def test_a_file_that_is_cut_in_two_is_another_model(tmp_path):
    split = [("1", "23"), ("12", "3")]
    digests = {
        weights_digest(model(tmp_path / first, **{"a.safetensors": first, "b.bin": second}))
        for first, second in split
    }
    assert len(digests) == 2


def test_a_given_name_wins_and_is_no_digest(tmp_path):
    folder = model(tmp_path / "a")
    named = StoreConfig(type="disk", path="x", weights_id="mine")
    unnamed = StoreConfig(type="disk", path="x")
    assert weights_name(named, folder) == weights_name(named, None) == b"id:mine"
    assert weights_name(unnamed, folder) == b"files:" + weights_digest(folder)


def test_weights_that_cannot_be_named_are_an_error(tmp_path):
    unnamed = StoreConfig(type="disk", path="x")
    with pytest.raises(ConfigError, match="weights_id"):
        weights_name(unnamed, None)
    with pytest.raises(ConfigError, match="holds no weights"):
        weights_name(unnamed, tmp_path)
    with pytest.raises(ConfigError, match="holds no weights"):
        weights_digest(tmp_path / "nowhere")
    folder = model(tmp_path / "a")
    (folder / "b.bin").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        weights_digest(folder)
