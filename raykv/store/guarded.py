"""Keeps a slow or dead store from slowing anything else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

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

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

# For a cancelled call to end. A well-behaved one does before the event loop looks at its timers.
_GRACE_S = 0.1


class CircuitBreaker:
    """Whether to ask somebody who may be failing.

    Closed: ask. After ``max_failures`` in a row it opens: nobody asks for ``cooldown_s``. Then one
    probe is let through; if that succeeds it closes, else it stays open for as long again.

    Args:
        max_failures: failures in a row that open it.
        cooldown_s: seconds until a probe.
        clock: seconds that only grow.

    Raises:
        ConfigError: a number makes no sense.
    """

    def __init__(
        self, max_failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_failures < 1 or cooldown_s < 0:
            raise ConfigError(
                f"max_failures is {max_failures} and cooldown_s {cooldown_s}, but must be at least"
                " 1 and 0 seconds"
            )
        self._max_failures = max_failures
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._num_failures = 0
        self._opened_s: float | None = None
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """Whether failures have opened it, and no probe has succeeded since."""
        return self._opened_s is not None

    def admits(self) -> bool:
        """Whether to ask now. Who is told so reports ``succeed``, ``fail`` or ``forget``."""
        if self._opened_s is None:
            return True
        if self._is_probing or self._clock() - self._opened_s < self._cooldown_s:
            return False
        self._is_probing = True
        return True

    def succeed(self) -> None:
        """Who was asked has answered."""
        self._num_failures = 0
        self._opened_s = None
        self._is_probing = False

    def fail(self) -> None:
        """Who was asked has failed."""
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self._opened_s = self._clock()
            self._is_probing = False

    def forget(self) -> None:
        """Who asked does not wait for the answer: that says nothing."""
        self._is_probing = False


class GuardedStore(KVStore):
    """Any store, made safe for the serving path: it answers in time and raises no StoreError.

    A call that fails or takes longer than ``timeout_s`` is answered with misses (nothing stored,
    nothing there), counted, and its reason kept in ``last_error``. After ``max_failures`` such
    calls in a row the store is left alone for ``cooldown_s``: calls are answered at once, until a
    probe succeeds. Bad arguments still raise ValueError.

    A store that breaks the rules, as its call goes on though it was cancelled, gets no further
    calls until that one has ended. Its buffers are not safe meanwhile.

    Args:
        store: what to guard; closed with the guard.
        timeout_s: seconds for one call.
        max_failures: failed calls in a row after which the store is left alone.
        cooldown_s: seconds for which it is.
        clock: seconds that only grow.

    Attributes:
        last_error: why the last call that failed did; None if none has.

    Raises:
        ConfigError: a number makes no sense.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        timeout_s: float = 1.0,
        max_failures: int = 3,
        cooldown_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s is {timeout_s}, but must be more than 0 seconds")
        self.last_error: StoreError | None = None
        self._store = store
        self._timeout_s = timeout_s
        self._breaker = CircuitBreaker(max_failures, cooldown_s, clock)
        self._counts = StoreCounts()
        self._lingering: set[asyncio.Task[object]] = set()

    @property
    def is_available(self) -> bool:
        """Whether the store is asked, as far as is known; False while it is left alone."""
        return not self._breaker.is_open

    async def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """See KVStore; what fails is not stored."""
        check_items(items)
        confirmed = await self._ask(lambda: self._store.put_many(items))
        if confirmed is None:
            self._counts.add(refused=len(items))
            return [False] * len(items)
        return confirmed

    async def get_many(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[bool]:
        """See KVStore; what fails is a miss, and then a part of ``into`` may have been filled."""
        check_targets(keys, into)
        found = await self._ask(lambda: self._store.get_many(keys, into))
        if found is None:
            self._counts.add(misses=len(keys))
            return [False] * len(keys)
        return found

    async def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See KVStore; what fails is not there."""
        check_keys(keys)
        found = await self._ask(lambda: self._store.contains_many(keys))
        return [False] * len(keys) if found is None else found

    def stats(self) -> StoreStats:
        """The store's counts and the guard's together."""
        return self._store.stats() + self._counts.stats()

    async def close(self) -> None:
        """See KVStore; waits no longer than for another call, and raises nothing."""
        await self._limited(self._store.close)

    async def _ask(self, call: Callable[[], Coroutine[object, object, _Result]]) -> _Result | None:
        """The store's answer, or None if there is none."""
        if self._lingering or not self._breaker.admits():
            self._counts.add(skipped=1)
            return None
        try:
            answer = await self._limited(call)
        except BaseException:
            self._breaker.forget()
            raise
        was_open = self._breaker.is_open
        if answer is None:
            self._breaker.fail()
        else:
            self._breaker.succeed()
        if was_open != self._breaker.is_open:
            self._tell()
        return answer

    def _tell(self) -> None:
        if self._breaker.is_open:
            _log.warning("the KV store is left alone, requests go on: %s", self.last_error)
        else:
            _log.warning("the KV store answers again")

    async def _limited(
        self, call: Callable[[], Coroutine[object, object, _Result]]
    ) -> _Result | None:
        task = asyncio.ensure_future(call())
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:  # cancelled ourselves, too: the buffers are the caller's again after this
            if not task.done():
                task.cancel()
                await self._wait_for_end(task)
        if task.cancelled() or task in self._lingering:
            self._counts.add(errors=1, timeouts=1)
            self.last_error = StoreError(
                f"the KV store did not answer within {self._timeout_s} s: it is slow or gone;"
                " raise timeout_s if it is only slow"
            )
            return None
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, StoreError):
            self.last_error = error  # counted by the store
        else:
            self._counts.add(errors=1)
            self.last_error = StoreError(f"the KV store failed: {type(error).__name__}: {error}")
            self.last_error.__cause__ = error
        return None

    async def _wait_for_end(self, task: asyncio.Task[_Result]) -> None:
        await asyncio.wait({task}, timeout=_GRACE_S)
        if not task.done():
            self._lingering.add(task)
            task.add_done_callback(self._lingering.discard)
        elif not task.cancelled():
            task.exception()  # or asyncio complains that nobody looked at it
