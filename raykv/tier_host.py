"""The whole host tier of a node in one object: books, memory, and who lives."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

import numpy as np

from raykv.config import PoolConfig
from raykv.errors import ConfigError, RankUnavailableError
from raykv.host_stats import HostTierStats
from raykv.host_tickets import NO_TICKET, LoadTicket, StoreTicket
from raykv.host_tier import HostTier
from raykv.memory.host_slab import HostSlab
from raykv.tier_messages import TierAnswer, TierCall, TierInfo

_LOOKS_PER_LEASE = 4
_NOTHING = np.empty(0, np.int32), np.empty(0, np.uint64)
_NO_STORE = StoreTicket(NO_TICKET, 0, *_NOTHING)
_NO_LOAD = LoadTicket(NO_TICKET, 0, *_NOTHING, np.empty(0, np.uint64))


class TierHost:
    """Answers the ranks of a node. A plain class; ``raykv.actors`` makes it an actor.

    Its methods may be called from any thread. The memory is made when the first rank joins, who
    knows how large a block is.

    Args:
        config: the pool's, with ``host``.
        clock: seconds, for leases.

    Attributes:
        epoch: counts the resets; a tier that starts again counts on from later.
    """

    def __init__(self, config: PoolConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert config.host is not None, "a host tier is asked for"
        self.config = config
        self.host_config = config.host
        self.epoch = self._first_epoch = time.time_ns()
        self._clock = clock
        self._lock = threading.RLock()
        self._books: HostTier | None = None
        self._slab: HostSlab | None = None
        self._processes: dict[int, int] = {}  # pidfds, by pid, of other processes
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="raykv-tier-watch", daemon=True)
        self._watcher.start()

    # -- ranks ----------------------------------------------------------------------------------

    def join(self, client_id: str, pid: int, block_bytes: int, replaces: str = "") -> TierInfo:
        """Let a rank's process store and load.

        Args:
            client_id: its name, which no other process has ever had.
            pid: its process, on this node.
            block_bytes: bytes of its blocks.
            replaces: a name that it had before, and writes nothing under any more.

        Raises:
            ConfigError: the memory cannot be had, or the rank's blocks are of another size than
                those of the first one.
        """
        with self._lock:
            books, slab = self._made(block_bytes)
            books.unmapped(replaces)
            books.join(client_id, pid, self._clock())
            if pid != os.getpid() and pid not in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    self._processes[pid] = os.pidfd_open(pid)
            return TierInfo(self.epoch, self._first_epoch, slab.descriptor)

    def renew(self, client_id: str) -> bool:
        """Note a sign of life; whether the client is known."""
        with self._lock:
            return self._books is not None and self._books.renew(client_id, self._clock())

    def exchange(self, call: TierCall) -> TierAnswer:
        """Take what a rank reports, give what it asks for.

        Raises:
            RankUnavailableError: it has no lease: it never joined, or was silent for too long.
            ValueError: a report does not fit its ticket, or an offer or ask makes no sense.
        """
        with self._lock:
            books = self._open()
            if not books.renew(call.client_id, self._clock()):
                raise RankUnavailableError(
                    f"the host tier does not know client {call.client_id}: join again"
                )
            if call.stored:
                books.stored(call.client_id, call.stored)
            if call.loaded:
                books.loaded(call.client_id, call.loaded)
            if call.epoch != self.epoch:  # what it has is from before a reset
                stores = [_NO_STORE] * len(call.offers)
                return TierAnswer(self.epoch, stores, [_NO_LOAD] * len(call.asks))
            stores = books.offer(call.client_id, call.offers) if call.offers else []
            wants = [ask.want for ask in call.asks]
            loads: list[LoadTicket | None] = []
            if wants:
                loads += books.find(call.client_id, wants)
            return TierAnswer(self.epoch, stores, loads)

    def unmapped(self, client_id: str) -> None:
        """A rank writes nothing any more under this name; what it left under way is over."""
        with self._lock:
            if self._books is not None:
                self._books.unmapped(client_id)

    # -- drivers --------------------------------------------------------------------------------

    def reset(self) -> tuple[int, int]:
        """Forget everything.

        Returns:
            The new epoch, which ranks take over when they have forgotten theirs, and how many
            blocks were cached.
        """
        with self._lock:
            self.epoch += 1
            return self.epoch, 0 if self._books is None else self._books.reset()

    def retire(self, weights_version: int) -> int:
        """See ``BlockManager.retire``."""
        with self._lock:
            return 0 if self._books is None else self._books.retire(weights_version)

    def stats(self) -> HostTierStats:
        """Count blocks."""
        with self._lock:
            return self._open().stats()

    def pid(self) -> int:
        """The process that the tier lives in."""
        return os.getpid()

    def check_integrity(self) -> None:
        """Check the books, and that nobody wrote the slab's header or padding.

        Raises:
            IntegrityError: something disagrees.
        """
        with self._lock:
            if self._books is not None and self._slab is not None:
                self._books.check_integrity()
                self._slab.check_integrity()

    def close(self) -> None:
        """Let go of the memory; ranks that have it mapped keep it. Idempotent."""
        self._closed.set()
        with self._lock:
            if self._slab is not None:
                self._slab.close()
            for pidfd in self._processes.values():
                os.close(pidfd)
            self._processes.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _made(self, block_bytes: int) -> tuple[HostTier, HostSlab]:
        config = self.host_config
        if self._closed.is_set():
            raise RankUnavailableError("the host tier was closed: make a new pool")
        if self._books is None or self._slab is None:
            slab = HostSlab.create(config.num_blocks, block_bytes)
            if config.populate:
                slab.populate()
            self._books = HostTier(
                config.num_blocks,
                self.config.block_size,
                slab.generations,
                lease_s=config.lease_s,
                eviction=config.eviction,
                hash_seed=self.config.hash_seed,
            )
            self._slab = slab
        if self._slab.block_bytes != block_bytes:
            raise ConfigError(
                f"a rank with blocks of {block_bytes} bytes cannot share a host tier with ranks"
                f" whose blocks have {self._slab.block_bytes}: give all the same model and dtype"
            )
        return self._books, self._slab

    def _open(self) -> HostTier:
        if self._books is None or self._closed.is_set():
            raise RankUnavailableError("the host tier has no memory yet, or was closed: join again")
        return self._books

    def _watch(self) -> None:
        interval_s = min(self.host_config.lease_s / _LOOKS_PER_LEASE, 0.5)
        while not self._closed.wait(interval_s):
            with self._lock:
                if self._books is not None and not self._closed.is_set():
                    self._bury()
                    self._books.expire(self._clock())

    def _bury(self) -> None:
        """Take back what processes held that have ended."""
        assert self._books is not None, "the caller has looked"
        poll = select.poll()
        for pidfd in self._processes.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        for pid in [pid for pid, pidfd in self._processes.items() if pidfd in ended]:
            os.close(self._processes.pop(pid))
            for client_id in self._books.clients.of_process(pid):
                self._books.confirmed_dead(client_id)
