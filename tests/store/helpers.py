"""Keys and values that say whose they are."""

from __future__ import annotations

import hashlib


def key_of(name):
    return hashlib.blake2b(str(name).encode(), digest_size=32).digest()


def value_of(name, num_bytes=100):
    """Bytes that depend on the name and the length alone."""
    return hashlib.shake_128(str(name).encode()).digest(num_bytes)


async def get_one(store, key, num_bytes=100):
    """The value, or None; None means that the buffer is as it was, too."""
    into = bytearray(b"\xee" * num_bytes)
    (is_hit,) = await store.get_many([key], [into])
    if not is_hit:
        assert into == b"\xee" * num_bytes
    return bytes(into) if is_hit else None


async def put_names(store, names, num_bytes=100):
    return await store.put_many([(key_of(name), value_of(name, num_bytes)) for name in names])


async def names_found(store, names, num_bytes=100):
    """Which of the names' values are there; a wrong one fails the test."""
    into = [bytearray(num_bytes) for _ in names]
    hits = await store.get_many([key_of(name) for name in names], into)
    found = [name for name, is_hit in zip(names, hits, strict=True) if is_hit]
    for name, value, is_hit in zip(names, into, hits, strict=True):
        assert value == (value_of(name, num_bytes) if is_hit else bytes(num_bytes))
    return found
