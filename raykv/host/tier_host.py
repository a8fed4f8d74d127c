"""The whole host tier of a node in one object: books, memory, sources, and who lives."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.config import PoolConfig
from raykv.core.namespace import Namespace
from raykv.errors import RankUnavailableError
from raykv.host.block_source import Prompt
from raykv.host.messages import Ask, BlockKind, TierAnswer, TierCall, TierInfo
from raykv.host.peer_source import PeerHandle
from raykv.host.sources import TierSources
from raykv.host.state_stats import HostStatesStats
from raykv.host.state_tickets import StateLoad, StateTicket
from raykv.host.stats import HostTierStats
from raykv.host.tickets import (
    NO_TICKET,
    LoadResult,
    LoadTicket,
    Offer,
    StoreResult,
    StoreTicket,
    Want,
)
from raykv.host.tier_books import NO_LOAD, TierBooks
from raykv.host.transport import RowRequest, TcpServer, TcpTransport, Transport, take_rows

_LOOKS_PER_LEASE = 4
_MAX_OFFERED = 10_000
_NO_STORE = StoreTicket(NO_TICKET, 0, np.empty(0, np.int32), np.empty(0, np.uint64))


class TierHost:
    """Answers the ranks of a node. A plain class; ``raykv.actors`` makes it an actor.

    Its methods may be called from any thread. The memory is made when the first rank joins, who
    knows how large a block is.

    Args:
        config: the pool's, with ``host``.
        index: which of the pool's tiers it is; equal after a restart, so that its store is found.
        transport: how to read other nodes' blocks; by default as ``host.transport`` says.
        clock: seconds, for leases.

    Attributes:
        epoch: counts the resets; a tier that starts again counts on from later.
    """

    def __init__(
        self,
        config: PoolConfig,
        index: int = 0,
        *,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.host is not None, "a host tier is asked for"
        self.config = config
        self.host_config = config.host
        self.epoch = self._first_epoch = time.time_ns()
        self._index = index
        self._transport = transport
        self._clock = clock
        self._lock = threading.RLock()
        self._books: TierBooks | None = None
        self._sources: TierSources | None = None
        self._server: TcpServer | None = None
        self._peers: list[PeerHandle] = []
        self._offered: dict[int, Offer] = {}  # what a store may want, by ticket
        self._processes: dict[int, int] = {}  # pidfds, by pid, of other processes
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="raykv-tier-watch", daemon=True)
        self._watcher.start()

    # -- ranks ----------------------------------------------------------------------------------

    def join(self, client_id: str, pid: int, kind: BlockKind, replaces: str = "") -> TierInfo:
        """Let a rank's process store and load.

        Args:
            client_id: its name, which no other process has ever had.
            pid: its process, on this node.
            kind: what its blocks are.
            replaces: a name that it had before, and writes nothing under any more.

        Raises:
            ConfigError: the memory or the store cannot be had, or the rank's blocks are others than
                those of the first one.
            StoreError: the store's folder cannot be used.
        """
        with self._lock:
            books = self._made(kind)
            books.unmapped(replaces)
            books.blocks.join(client_id, pid, self._clock())
            if pid != os.getpid() and pid not in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    self._processes[pid] = os.pidfd_open(pid)
            states = None if books.states_slab is None else books.states_slab.descriptor
            return TierInfo(self.epoch, self._first_epoch, books.slab.descriptor, states)

    def renew(self, client_id: str) -> bool:
        """Note a sign of life; whether the client is known."""
        with self._lock:
            return self._books is not None and self._books.blocks.renew(client_id, self._clock())

    def exchange(self, call: TierCall) -> TierAnswer:
        """Take what a rank reports, give what it asks for.

        Raises:
            RankUnavailableError: it has no lease: it never joined, or was silent for too long.
            ValueError: a report does not fit its ticket, or an offer or ask makes no sense.
        """
        with self._lock:
            books, client_id = self._open(), call.client_id
            if not books.blocks.renew(client_id, self._clock()):
                raise RankUnavailableError(
                    f"the host tier does not know client {client_id}: join again"
                )
            self._note_stored(books, client_id, call.stored)
            books.blocks.loaded(client_id, call.loaded)
            books.report_states(client_id, call.states_stored, call.states_loaded)
            if call.epoch != self.epoch:  # what it has is from before a reset
                return self._nothing(call)
            stores = self._offer(books, client_id, call.offers)
            state_stores = books.offer_states(client_id, call.state_offers)
            has_sources = self._sources is not None and self._sources.has_any
            for tokens, namespace in call.expected if has_sources else ():
                self._is_coming(self._prompt(tokens, namespace))
            found = [self._find(books, client_id, ask) for ask in call.asks]
            loads, state_loads = [load for load, _ in found], [state for _, state in found]
            return TierAnswer(self.epoch, stores, loads, state_stores, state_loads, has_sources)

    def unmapped(self, client_id: str) -> None:
        """A rank writes nothing any more under this name; what it left under way is over."""
        with self._lock:
            if self._books is not None:
                self._books.unmapped(client_id)

    # -- other nodes ----------------------------------------------------------------------------

    def serve(self, host: str) -> str:
        """Let those who know the pool's seed read this tier's memory; see TcpServer.

        Args:
            host: the address of this node to listen on.

        Returns:
            Where.

        Raises:
            RankUnavailableError: there is no memory yet.
        """
        with self._lock:
            books = self._open()
            if self._server is None:
                self._server = TcpServer(books.slab, self._secret, host)
            return self._server.address

    def set_peers(self, peers: list[PeerHandle]) -> None:
        """Know the other nodes' tiers."""
        self._peers = peers

    def lend(self, peer: str, want: Want) -> LoadTicket:
        """Let another node's tier read what is here of a prompt, until ``give_back``."""
        with self._lock:
            books, client_id = self._open(), f"peer-{peer}"
            books.blocks.join(client_id, os.getpid(), self._clock())
            return books.find(client_id, want)

    def give_back(self, peer: str, result: LoadResult) -> None:
        """Another node's tier has read what it was lent; see HostTier.loaded."""
        with self._lock:
            self._open().blocks.loaded(f"peer-{peer}", [result])

    def take_rows(self, request: RowRequest) -> list[NDArray[np.uint8]]:
        """Copies of rows, for transports that cannot read the memory; see transport.take_rows."""
        with self._lock:
            slab = self._open().slab
        return take_rows(slab, request)

    # -- drivers --------------------------------------------------------------------------------

    def prefetch(self, tokens: NDArray[np.int32], namespace: Namespace) -> bool:
        """Begin to get what the host lacks of a prompt; whether something is on its way."""
        with self._lock:
            self._open()
            return self._is_coming(self._prompt(tokens, namespace))

    def wait_prefetch(
        self, tokens: NDArray[np.int32], namespace: Namespace, timeout_s: float
    ) -> bool:
        """Wait for what ``prefetch`` began, then give up the rest; see Prefetches.wait.

        Where there is nobody to get anything from, all of that has come.
        """
        with self._lock:
            self._open()
            sources = self._sources
        if sources is None or not sources.has_any:
            return True
        return sources.wait(self._prompt(tokens, namespace), timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until what was stored on the host was offered to the store, too; whether it was.

        What the store did not take is in ``source_stats``.
        """
        return self._sources is None or self._sources.drain(timeout_s)

    def source_stats(self) -> dict[str, Any]:
        """Counters of stores and other nodes; empty where there are none."""
        return {} if self._sources is None else self._sources.stats()

    def reset(self) -> tuple[int, int]:
        """Forget everything.

        Returns:
            The new epoch, which ranks take over when they have forgotten theirs, and how many
            blocks were cached.
        """
        with self._lock:
            self.epoch += 1
            if self._sources is not None:
                self._sources.reset()
            return self.epoch, 0 if self._books is None else self._books.reset()

    def retire(self, weights_version: int) -> int:
        """See ``BlockManager.retire``."""
        with self._lock:
            return 0 if self._books is None else self._books.retire(weights_version)

    def stats(self) -> HostTierStats:
        """Count blocks; there are none before the first rank has joined."""
        with self._lock:
            if self._books is None:
                return HostTierStats()
            books = self._open()
            return replace(books.blocks.stats(), block_bytes=books.slab.block_bytes)

    def state_stats(self) -> HostStatesStats | None:
        """Count checkpoints; None where sequences have no recurrent state."""
        with self._lock:
            return None if self._books is None else self._open().state_stats()

    def pid(self) -> int:
        """The process that the tier lives in."""
        return os.getpid()

    def check_integrity(self) -> None:
        """Check all books; see TierBooks."""
        with self._lock:
            if self._books is not None and not self._closed.is_set():
                self._books.check_integrity()
                if self._sources is not None:
                    self._sources.check_integrity()

    def close(self) -> None:
        """Let go of the memory; ranks that have it mapped keep it. Idempotent."""
        self._closed.set()
        sources, self._sources = self._sources, None
        if sources is not None:
            sources.close()
        if self._server is not None:
            self._server.close()
        with self._lock:
            if self._books is not None:
                self._books.close()
            for pidfd in self._processes.values():
                os.close(pidfd)
            self._processes.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _offer(self, books: TierBooks, client_id: str, offers: list[Offer]) -> list[StoreTicket]:
        stores = books.blocks.offer(client_id, offers) if offers else []
        if self.config.store is not None:
            for offer, ticket in zip(offers, stores, strict=True):
                if ticket.id != NO_TICKET:
                    self._offered[ticket.id] = offer
        return stores

    def _note_stored(self, books: TierBooks, client_id: str, results: list[StoreResult]) -> None:
        books.blocks.stored(client_id, results)
        for result in results:
            offer = self._offered.pop(result.ticket_id, None)
            if offer is not None and self._sources is not None and result.num_ok:
                self._sources.note(offer, offer.num_blocks)

    def _find(
        self, books: TierBooks, client_id: str, ask: Ask
    ) -> tuple[LoadTicket | None, StateLoad | None]:
        """What is on the host; None where more is on its way and may be waited for."""
        want = ask.want
        if ask.state_step:
            return books.find_state(client_id, ask)
        if not ask.is_final and self._is_coming(
            self._prompt(want.tokens, want.namespace, ask.prefill_tokens_per_s)
        ):
            return None, None
        return books.find(client_id, want), None

    def _nothing(self, call: TierCall) -> TierAnswer:
        num_asks, stores = len(call.asks), [_NO_STORE] * len(call.offers)
        state_stores: list[list[StateTicket]] = [[] for _ in call.state_offers]
        return TierAnswer(self.epoch, stores, [NO_LOAD] * num_asks, state_stores, [None] * num_asks)

    def _is_coming(self, prompt: Prompt) -> bool:
        return self._sources is not None and self._sources.is_coming(prompt)

    def _prompt(self, tokens: NDArray[np.int32], namespace: Namespace, rate: float = 0.0) -> Prompt:
        """The blocks of a prompt that can be hit: one token is left to compute."""
        size = self.config.block_size
        return Prompt(tokens[: max(0, len(tokens) - 1) // size * size], namespace, rate)

    def _made(self, kind: BlockKind) -> TierBooks:
        """The books and the memory, made for the first one who comes."""
        if self._closed.is_set():
            raise RankUnavailableError("the host tier was closed: make a new pool")
        if self._books is None:
            books, config = TierBooks(self.config, kind), self.host_config
            transport = self._transport
            if transport is None and config.peers and config.transport == "tcp":
                transport = TcpTransport(self._secret)
            if self.config.store is not None or transport is not None:
                self._sources = TierSources(
                    self.config,
                    books,
                    self._lock,
                    folder_name=f"tier-{self._index}",
                    transport=transport,
                    peers=lambda: self._peers,
                )
            self._books = books
        self._books.check_kind(kind)
        return self._books

    def _open(self) -> TierBooks:
        if self._books is None or self._closed.is_set():
            raise RankUnavailableError("the host tier has no memory yet, or was closed: join again")
        return self._books

    @property
    def _secret(self) -> bytes:
        """What the pool's tiers know of each other; it says nothing of the seed."""
        assert self.config.hash_seed is not None, "a pool draws it"
        return hashlib.blake2b(self.config.hash_seed, digest_size=32, person=b"peers").digest()

    def _watch(self) -> None:
        interval_s = min(self.host_config.lease_s / _LOOKS_PER_LEASE, 0.5)
        while not self._closed.wait(interval_s):
            with self._lock:
                if self._books is not None and not self._closed.is_set():
                    self._bury(self._books)
                    self._books.expire(self._clock())
                    if len(self._offered) > _MAX_OFFERED:  # of ranks that are gone
                        self._offered.clear()

    def _bury(self, books: TierBooks) -> None:
        """Take back what processes held that have ended."""
        poll = select.poll()
        for pidfd in self._processes.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        for pid in [pid for pid, pidfd in self._processes.items() if pidfd in ended]:
            os.close(self._processes.pop(pid))
            for client_id in books.blocks.clients.of_process(pid):
                books.confirmed_dead(client_id)
