"""A KV store in Redis, or in whatever speaks its protocol; needs the extra ``redis``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from xxhash import xxh3_64_intdigest

from raykv.errors import ConfigError, StoreError
from raykv.store.interface import (
    Buffer,
    KVStore,
    StoreCounts,
    StoreStats,
    check_items,
    check_keys,
    check_targets,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

_Item = TypeVar("_Item")
_TRAILER = struct.Struct("<Q")
# What goes in one round trip: enough to hide its latency, little enough that hashing and copying
# it does not hold up the event loop for long.
_BATCH_BYTES = 8 << 20


class RedisStore(KVStore):
    """Keeps values in a Redis server that many pools may share.

    Behind each value lies the xxh3 (64 bits) of the value, seeded with its key: a damaged value, or
    one that belongs to another key, is a miss. Expired values are misses; reading does not prolong
    them, putting does. Without ``ttl_s`` set the server's ``maxmemory`` and an eviction policy, or
    it refuses values once it is full.

    A lost connection is a StoreError, counted; every later call tries to connect again. Put a
    ``GuardedStore`` around it. Nothing connects before the first call.

    Args:
        url: such as ``redis://host:6379/0``, ``rediss://`` for TLS, ``unix://`` for a socket.
        ttl_s: seconds until a value expires; None: never.
        prefix: goes before every key.
        timeout_s: seconds to wait for the server in connecting, and in each answer.

    Raises:
        ConfigError: redis-py is not installed, or the URL or a number makes no sense.
    """

    def __init__(
        self,
        url: str,
        ttl_s: float | None = None,
        prefix: str = "raykv:",
        *,
        timeout_s: float = 2.0,
    ) -> None:
        if ttl_s is not None and ttl_s < 0.001:
            raise ConfigError(f"ttl_s is {ttl_s}, but must be at least 0.001 seconds, or None")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s is {timeout_s}, but must be more than 0 seconds")
        self._client = _client(url, timeout_s)
        place = self._client.connection_pool.connection_kwargs  # without the password
        self._place = place.get("path") or f"{place.get('host')}:{place.get('port')}"
        self._ttl_ms = None if ttl_s is None else int(ttl_s * 1000)
        self._prefix = prefix.encode()
        self._counts = StoreCounts()
        self._is_closed = False

    async def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """See KVStore."""
        confirmed: list[bool] = []
        for batch in _batches(check_items(items), lambda item: len(item[1])):
            confirmed += await self._put_batch(batch)
        return confirmed

    async def get_many(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[bool]:
        """See KVStore."""
        found: list[bool] = []
        for batch in _batches(check_targets(keys, into), lambda item: len(item[1])):
            names = [self._prefix + key for key, _ in batch]
            with self._translated():
                payloads: list[Any] = await self._client.mget(names)
            found += [
                self._take(key, payload, target)
                for (key, target), payload in zip(batch, payloads, strict=True)
            ]
        self._counts.add(hits=sum(found), misses=len(found) - sum(found))
        return found

    async def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See KVStore."""
        check_keys(keys)
        with self._translated():
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.exists(self._prefix + key)
            return [bool(count) for count in await pipeline.execute()]

    def stats(self) -> StoreStats:
        """See KVStore; ``bytes`` are those that were written from here, expired or not."""
        return self._counts.stats()

    async def close(self) -> None:
        """See KVStore."""
        self._is_closed = True
        await self._client.aclose()

    async def _put_batch(self, batch: list[tuple[bytes, memoryview]]) -> list[bool]:
        from redis.exceptions import OutOfMemoryError  # noqa: PLC0415 - an extra

        with self._translated():
            pipeline = self._client.pipeline(transaction=False)
            for key, value in batch:
                # A copy, made before anything is awaited: the value may change once this call is
                # cancelled, while the socket is still being written.
                payload = b"".join((value, _TRAILER.pack(_checksum(key, value))))
                pipeline.set(self._prefix + key, payload, px=self._ttl_ms)
            answers = await pipeline.execute(raise_on_error=False)
            confirmed = []
            for (_, value), answer in zip(batch, answers, strict=True):
                is_full = isinstance(answer, OutOfMemoryError)
                if isinstance(answer, Exception) and not is_full:
                    raise answer
                confirmed.append(not is_full)
                self._counts.add(
                    refused=is_full, stored=not is_full, bytes=0 if is_full else len(value)
                )
            return confirmed

    def _take(self, key: bytes, payload: bytes | None, target: memoryview) -> bool:
        if payload is None:
            return False
        value, trailer = memoryview(payload)[: -_TRAILER.size], payload[-_TRAILER.size :]
        is_right = len(value) == len(target) and trailer == _TRAILER.pack(_checksum(key, value))
        if is_right and len(target):
            target[:] = value
        self._counts.add(corrupt=not is_right)
        return is_right

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Within, redis-py's errors become StoreErrors."""
        from redis.exceptions import RedisError  # noqa: PLC0415 - an extra

        if self._is_closed:
            raise StoreError(f"the store at {self._place} is closed: open another one")
        try:
            yield
        except (RedisError, OSError) as error:
            self._counts.add(errors=1)
            raise StoreError(
                f"the KV store at {self._place} failed ({type(error).__name__}: {error}): check"
                " that the server runs and is reachable"
            ) from error


def _client(url: str, timeout_s: float) -> Redis:
    try:
        from redis.asyncio import Redis  # noqa: PLC0415 - an extra
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.exceptions import ConnectionError as RedisConnectionError  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            "RedisStore needs redis-py, which is not installed: pip install 'raykv[redis]'"
        ) from None
    # Once more and at once, as a pooled connection may have died unnoticed. More waiting than that
    # is for the guard to decide.
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    try:
        return Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=retry
        )
    except ValueError as error:
        raise ConfigError(f"the URL of the KV store makes no sense: {error}") from None


def _checksum(key: bytes, value: memoryview) -> int:
    return xxh3_64_intdigest(value, seed=xxh3_64_intdigest(key))


def _batches(items: list[_Item], size: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Cut a list where a batch's sizes would exceed the limit; a large item goes alone."""
    batch: list[Any] = []
    total = 0
    for item in items:
        if batch and total + size(item) > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
