"""What a host tier gets blocks from, and puts them into: a store, and other nodes' tiers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from raykv.config import PoolConfig
from raykv.host.block_source import BlockSource, Prompt
from raykv.host.peer_source import PeerHandle, PeerSource
from raykv.host.prefetches import Prefetches
from raykv.host.store_build import make_store
from raykv.host.store_source import StoreSource
from raykv.host.store_writer import StoreWriter
from raykv.host.tickets import Offer
from raykv.host.tier_books import TierBooks
from raykv.host.transport import Transport
from raykv.store import KVKeys, model_fingerprint

T = TypeVar("T")

_END_S = 5.0
_DRAIN_S = 5.0  # for what was noted last to reach the store


class TierSources:
    """Runs prefetches and write-behind of one host tier, on an event loop in a thread of its own.

    Methods may be called from any thread; those that say that they wait, not with the lock held.

    Args:
        config: the pool's, with ``host``.
        books: of the host tier, with its memory.
        lock: held around every use of the books.
        folder_name: of this tier's disk store.
        transport: reads other nodes' blocks; None if there are no other nodes.
        peers: the other nodes' tiers now.

    Raises:
        ConfigError: the store's settings make no sense.
        StoreError: the store's folder cannot be used.
    """

    def __init__(
        self,
        config: PoolConfig,
        books: TierBooks,
        lock: threading.RLock,
        *,
        folder_name: str,
        transport: Transport | None,
        peers: Callable[[], Sequence[PeerHandle]],
    ) -> None:
        assert config.host is not None, "it is a host tier's"
        blocks, slab, kind = books.blocks, books.slab, books.kind
        self._peers = peers
        self._writer: StoreWriter | None = None
        self._keys: KVKeys | None = None
        self._sources: list[BlockSource] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="raykv-tier-io", daemon=True
        )
        self._thread.start()
        try:
            if transport is not None:
                size, block_bytes = config.block_size, slab.block_bytes
                self._sources.append(
                    PeerSource(peers, transport, block_size=size, block_bytes=block_bytes)
                )
            if config.store is not None:
                store = self._run(make_store(config.store, folder_name))
                name = model_fingerprint(kind.layout, kind.weights or b"")
                self._keys = keys = KVKeys(name, config.block_size)
                self._sources.append(StoreSource(store, keys))
                self._writer = StoreWriter(
                    blocks, slab, lock, store, keys, loop=self._loop, client_id="writer"
                )
        except BaseException:
            self._end_loop()
            raise
        self._prefetches = Prefetches(
            blocks, slab, lock, self._sources, loop=self._loop, client_id="prefetches",
            with_checksums=config.host.checksum_rate > 0,
        )  # fmt: skip

    @property
    def has_any(self) -> bool:
        """Whether there is anybody to ask."""
        return self._writer is not None or bool(self._peers())

    def is_coming(self, prompt: Prompt) -> bool:
        """Begin to get what the host lacks of a prompt; whether that is under way. Never blocks."""
        return self.has_any and self._prefetches.start(prompt)

    def wait(self, prompt: Prompt, timeout_s: float) -> bool:
        """Wait for what was begun, and give up the rest; see Prefetches.wait."""
        return self._prefetches.wait(prompt, timeout_s)

    def note(self, offer: Offer, num_blocks: int) -> None:
        """A rank has stored the leading blocks of an offer: keep them in the store, too."""
        if self._writer is not None and num_blocks:
            self._writer.note(offer.tokens, offer.namespace, num_blocks)

    def reset(self) -> None:
        """Find nothing any more of what was stored before, and drop what is under way."""
        if self._keys is not None:
            self._keys.renew()
        self._prefetches.reset()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was noted had its turn; whether it took no longer than this."""
        return self._writer is None or self._writer.drain(timeout_s)

    def stats(self) -> dict[str, Any]:
        """Counters: ``prefetches``, with its sources, and ``writer`` where there is a store."""
        counts = {"prefetches": self._prefetches.stats()}
        return counts if self._writer is None else counts | {"writer": self._writer.stats()}

    def check_integrity(self) -> None:
        """Check what is under way against the books.

        Raises:
            IntegrityError: something disagrees.
        """
        self._prefetches.check_integrity()
        if self._writer is not None:
            self._writer.check_integrity()

    def close(self) -> None:
        """End what is under way, and the thread; waits."""
        self._prefetches.close()
        if self._writer is not None:
            self._writer.drain(_DRAIN_S)
            self._writer.close()
        for source in self._sources:
            self._run(source.close())
        self._end_loop()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()
