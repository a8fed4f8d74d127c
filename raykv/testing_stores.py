"""Parts for tests of code that uses KV stores: faults on demand."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from raykv.errors import StoreError
from raykv.store.interface import Buffer, KVStore, StoreStats, check_targets

_CALL_FAULTS = ("fails", "hangs", "is_slow")


@dataclass
class StoreFaults:
    """What goes wrong with calls to a store, each with a probability per call.

    Attributes:
        rng: decides.
        fails: it raises a StoreError; of ``get_many``, after some buffers were filled.
        hangs: it does not end until it is cancelled.
        is_slow: it takes ``slow_s`` longer.
        slow_s: seconds.
        misses: of the values of a call, each is not found or not stored.
        counts: how often each came to pass.
    """

    rng: random.Random
    fails: float = 0.0
    hangs: float = 0.0
    is_slow: float = 0.0
    slow_s: float = 0.01
    misses: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def draw(self) -> str:
        """The fault of one call, mostly ``""``."""
        point = self.rng.random()
        for kind in _CALL_FAULTS:
            point -= getattr(self, kind)
            if point < 0:
                self.counts[kind] += 1
                return kind
        return ""

    def is_missed(self) -> bool:
        """Whether one value is missed."""
        is_missed = self.rng.random() < self.misses
        self.counts["misses"] += is_missed
        return is_missed


class FaultyStore(KVStore):
    """A store whose calls go wrong; see StoreFaults. It keeps to the rules of KVStore all the same.

    Args:
        store: a real one; closed with this.
        faults: what goes wrong; may be changed at any time.
    """

    def __init__(self, store: KVStore, faults: StoreFaults) -> None:
        self.faults = faults
        self._store = store

    async def put_many(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """See KVStore."""
        await self._suffer()
        is_missed = [self.faults.is_missed() for _ in items]
        kept = [item for item, is_gone in zip(items, is_missed, strict=True) if not is_gone]
        confirmed = iter(await self._store.put_many(kept))
        return [not is_gone and next(confirmed) for is_gone in is_missed]

    async def get_many(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[bool]:
        """See KVStore."""
        check_targets(keys, into)
        fault = self.faults.draw()
        is_missed = [self.faults.is_missed() for _ in keys]
        if fault == "fails":
            is_missed = [is_gone or at >= len(keys) // 2 for at, is_gone in enumerate(is_missed)]
        wanted = [at for at, is_gone in enumerate(is_missed) if not is_gone]
        if fault != "hangs":
            found = iter(
                await self._store.get_many([keys[at] for at in wanted], [into[at] for at in wanted])
            )
        await self._act(fault)
        return [not is_gone and next(found) for is_gone in is_missed]

    async def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See KVStore."""
        await self._suffer()
        there = await self._store.contains_many(keys)
        return [is_there and not self.faults.is_missed() for is_there in there]

    def stats(self) -> StoreStats:
        """See KVStore: the real store's, and the calls that failed."""
        return self._store.stats() + StoreStats(errors=self.faults.counts["fails"])

    async def close(self) -> None:
        """See KVStore; nothing goes wrong."""
        await self._store.close()

    async def _suffer(self) -> None:
        await self._act(self.faults.draw())

    async def _act(self, fault: str) -> None:
        match fault:
            case "fails":
                raise StoreError("the store fails, as this test wants it")
            case "hangs":
                await asyncio.Event().wait()
            case "is_slow":
                await asyncio.sleep(self.faults.slow_s)
