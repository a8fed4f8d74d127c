"""What every store promises, bare or guarded."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from .helpers import get_one, key_of, names_found, put_names, value_of


def test_what_was_stored_can_be_found(with_store):
    async def scenario(store):
        assert await put_names(store, range(10)) == [True] * 10
        assert await store.contains_many([key_of(3), key_of("x"), key_of(9)]) == [True, False, True]
        assert await names_found(store, [9, "x", 0, 0, 5]) == [9, 0, 0, 5]
        stats = store.stats()
        assert (stats.hits, stats.misses, stats.stored) == (4, 1, 10)
        assert (stats.refused, stats.corrupt, stats.errors) == (0, 0, 0)
        assert stats.bytes >= 1000

    with_store(scenario)


def test_an_unknown_key_is_a_miss(with_store):
    async def scenario(store):
        assert await get_one(store, key_of("x")) is None
        assert await store.get_many([], []) == []
        assert await store.put_many([]) == []
        assert await store.contains_many([]) == []

    with_store(scenario)


def test_a_value_of_another_length_is_a_miss_and_is_replaced_by_the_next_one(with_store):
    async def scenario(store):
        for count, num_bytes in enumerate((0, 99, 101, 1000)):
            await put_names(store, [count])
            assert await get_one(store, key_of(count), num_bytes) is None
            assert store.stats().corrupt == count + 1
            await put_names(store, [count], 50)
            assert await names_found(store, [count], 50) == [count]

    with_store(scenario)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "uint8", "int64"])
def test_arrays_go_in_and_out_as_they_are(with_store, dtype):
    async def scenario(store):
        array = np.arange(24).astype(dtype).reshape(2, 3, 4)
        into = np.zeros((4, 6), dtype)
        assert await store.put_many([(b"k", array)]) == [True]
        assert await store.get_many([b"k"], [into]) == [True]
        assert into.tobytes() == array.tobytes()

    with_store(scenario)


def test_keys_and_values_of_any_bytes_and_many_lengths(with_store):
    async def scenario(store):
        items = [(bytes([i] * (i + 1)), value_of(i, i)) for i in range(255)]
        assert await store.put_many(items) == [True] * 255
        assert [await get_one(store, key, len(value)) for key, value in items] == [
            value for _, value in items
        ]

    with_store(scenario)


def test_the_callers_value_is_its_own_afterwards(with_store):
    async def scenario(store):
        value = bytearray(value_of("x"))
        await store.put_many([(key_of("x"), value)])
        value[:] = bytes(100)
        assert await names_found(store, ["x"]) == ["x"]

    with_store(scenario)


def test_putting_again_leaves_one_of_both_values(with_store):
    async def scenario(store):
        for value in (b"a" * 100, b"b" * 100):
            assert await store.put_many([(b"k", value), (b"k", value)]) == [True, True]
            assert await get_one(store, b"k") in (b"a" * 100, b"b" * 100)

    with_store(scenario)


def test_many_calls_at_once(with_store):
    async def scenario(store):
        async def one(start):
            names = range(start, start + 20)
            assert await put_names(store, names) == [True] * 20
            return await names_found(store, names) == list(names)

        assert all(await asyncio.gather(*(one(start) for start in range(0, 200, 10))))

    with_store(scenario)


BAD_KEYS = [b"", b"k" * 257, "text", None]


@pytest.mark.parametrize("key", BAD_KEYS, ids=["empty", "long", "text", "none"])
def test_bad_keys_are_refused_and_change_nothing(with_store, key):
    async def scenario(store):
        for call in (
            store.put_many([(b"good", b"x"), (key, b"x")]),
            store.get_many([key], [bytearray(1)]),
            store.contains_many([key]),
        ):
            with pytest.raises(ValueError, match="must be a bytes object"):
                await call
        assert await store.contains_many([b"good"]) == [False]

    with_store(scenario)


def test_bad_buffers_are_refused(with_store):
    async def scenario(store):
        gaps = np.zeros((4, 4), np.uint8)[:, ::2]
        with pytest.raises(ValueError, match="has gaps"):
            await store.put_many([(b"k", gaps)])
        with pytest.raises(ValueError, match="has gaps"):
            await store.get_many([b"k"], [gaps])
        with pytest.raises(ValueError, match="read-only"):
            await store.get_many([b"k"], [b"x"])
        with pytest.raises(ValueError, match="2 keys do not pair with 1"):
            await store.get_many([b"k", b"l"], [bytearray(1)])

    with_store(scenario)


def test_closing_twice_is_fine(with_store):
    async def scenario(store):
        await put_names(store, ["x"])
        await store.close()

    with_store(scenario)
