"""A host tier, the memory it keeps the books of, and processes that copy, die and come late.

A block's content is the name of what was computed: its namespace and all tokens up to its end. So
whoever reads a block knows whether it is the right one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from raykv.core import Namespace
from raykv.host.host_tier import HostTier
from raykv.host.tickets import (
    NO_TICKET,
    LoadOutcome,
    LoadResult,
    LoadTicket,
    Offer,
    StoreResult,
    StoreTicket,
    Want,
)

LEASE_S = 10.0
GARBAGE = "garbage"


def checksum(content) -> int:
    return crc32(repr(content).encode()) or 1


def run_of(*marks):
    """Tokens of one block of two per mark."""
    return [mark for mark in marks for _ in range(2)]


def prompt(*marks):
    """The same with a token behind, so that all blocks may be found."""
    return [*run_of(*marks), 99]


def num_found(world, process, *marks, **kwargs):
    return len(world.get(process, prompt(*marks), **kwargs))


@dataclass(eq=False)
class Store:
    """A store as its process sees it; ``left`` are the writes it has not done."""

    ticket: StoreTicket
    tokens: list[int]
    names: list
    num_written: int = 0


@dataclass(eq=False)
class Load:
    ticket: LoadTicket
    names: list
    copied: list | None = None


@dataclass(eq=False)
class Process:
    """One process: it goes on with what it has under way, whether it has a lease or not."""

    client_id: str
    pid: int
    stores: list[Store] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stale_stores: list[Store] = field(default_factory=list)  # its lease ended since
    stale_loads: list[Load] = field(default_factory=list)

    def lose_lease(self):
        self.stale_stores += self.stores
        self.stale_loads += self.loads
        self.stores, self.loads = [], []


class World:
    def __init__(self, num_blocks, block_size, *, with_checksums=True, eviction="lru"):
        self.generations = np.zeros(num_blocks, np.uint64)
        self.tier = HostTier(
            num_blocks, block_size, self.generations, lease_s=LEASE_S, eviction=eviction
        )
        self.block_size = block_size
        self.with_checksums = with_checksums
        self.memory: dict[int, object] = {}
        self.damaged: set[int] = set()
        self.processes: dict[str, Process] = {}
        self.num_processes = 0
        self.now_s = 0.0

    # -- processes -----------------------------------------------------------------------------

    def start(self) -> Process:
        self.num_processes += 1
        process = Process(f"c{self.num_processes}", 1000 + self.num_processes)
        self.processes[process.client_id] = process
        self.tier.join(process.client_id, process.pid, self.now_s)
        return process

    def has_lease(self, process) -> bool:
        return self.tier.clients.find(process.client_id) is not None

    def pass_time(self, seconds, alive):
        """Those in ``alive`` are heard of, the others are not."""
        self.now_s += seconds
        for process in alive:
            self.tier.renew(process.client_id, self.now_s)
        silent = self.tier.expire(self.now_s)
        for client_id, pid in silent:
            assert self.processes[client_id].pid == pid
            self.processes[client_id].lose_lease()
        return silent

    def kill(self, process):
        """It is known to be dead: nothing of it happens any more."""
        self.tier.confirmed_dead(process.client_id)
        del self.processes[process.client_id]

    # -- storing -------------------------------------------------------------------------------

    def names(self, tokens, namespace, num_blocks) -> list:
        size = self.block_size
        return [(namespace, tuple(tokens[: (i + 1) * size])) for i in range(num_blocks)]

    def writable(self) -> set[int]:
        """Blocks that some process may write at any time."""
        return {
            block_id
            for process in self.processes.values()
            for store in (*process.stores, *process.stale_stores)
            for block_id in store.ticket.host_ids.tolist()
        }

    def readable(self) -> set[int]:
        """Blocks that live readers count on."""
        return {
            block_id
            for process in self.processes.values()
            for load in process.loads
            for block_id in load.ticket.host_ids.tolist()
        }

    def offer(self, process, *prompts, namespace=None) -> list[Store]:
        """Offer all full blocks of these prompts in one call."""
        space = namespace or Namespace()
        sizes = [len(tokens) // self.block_size for tokens in prompts]
        before = self.generations.copy()
        taken = self.writable() | self.readable()
        tickets = self.tier.offer(
            process.client_id,
            [
                Offer(np.array(tokens, np.int32), space, num_blocks)
                for tokens, num_blocks in zip(prompts, sizes, strict=True)
            ],
        )
        stores = []
        for ticket, tokens, num_blocks in zip(tickets, prompts, sizes, strict=True):
            ids = ticket.host_ids.tolist()
            assert not taken & set(ids), "given to two"
            taken |= set(ids)
            assert (ticket.id == NO_TICKET) == (not ids)
            assert ticket.first_block + len(ids) <= num_blocks
            assert ticket.generations.tolist() == (before[ids] + np.uint64(1)).tolist()
            assert self.generations[ids].tolist() == ticket.generations.tolist()
            names = self.names(tokens, space, num_blocks)[ticket.first_block :]
            store = Store(ticket, list(tokens), names[: len(ids)])
            stores.append(store)
            if ids:
                process.stores.append(store)
        return stores

    def write(self, store, num_blocks=1):
        for _ in range(min(num_blocks, len(store.names) - store.num_written)):
            block_id = int(store.ticket.host_ids[store.num_written])
            self.memory[block_id] = store.names[store.num_written]
            self.damaged.discard(block_id)
            store.num_written += 1

    def scribble(self, store):
        """Do all writes once more, as late or repeated copies do."""
        store.num_written = 0
        self.write(store, len(store.names))

    def report_stored(self, process, store, num_ok=None):
        num_ok = store.num_written if num_ok is None else min(num_ok, store.num_written)
        checksums = None
        if self.with_checksums:
            checksums = np.array([checksum(name) for name in store.names[:num_ok]], np.uint64)
        self.tier.stored(process.client_id, [StoreResult(store.ticket.id, num_ok, checksums)])
        for stores in (process.stores, process.stale_stores):
            if store in stores:
                stores.remove(store)

    def put(self, process, tokens, namespace=None) -> Store:
        """Offer, write and report."""
        (store,) = self.offer(process, tokens, namespace=namespace)
        if store.ticket.id:
            self.write(store, len(store.names))
            self.report_stored(process, store)
        return store

    # -- loading -------------------------------------------------------------------------------

    def find(self, process, tokens, num_device_blocks=0, namespace=None) -> Load:
        space = namespace or Namespace()
        want = Want(np.array(tokens, np.int32), space, num_device_blocks)
        (ticket,) = self.tier.find(process.client_id, [want])
        ids = ticket.host_ids.tolist()
        assert (ticket.id == NO_TICKET) == (not ids)
        assert ticket.first_block == num_device_blocks
        stop = num_device_blocks + len(ids)
        assert not ids or stop * self.block_size < len(tokens), "no token is left to compute"
        assert not self.writable() & set(ids), "given to read and to write"
        load = Load(ticket, self.names(tokens, space, stop)[num_device_blocks:])
        if ids:
            process.loads.append(load)
        return load

    def copy(self, load):
        load.copied = [self.memory.get(i) for i in load.ticket.host_ids.tolist()]

    def outcomes(self, load) -> list[LoadOutcome]:
        """What a reader makes of what it copied; what it accepts must be right."""
        ticket, outcomes = load.ticket, []
        ids = ticket.host_ids.tolist()
        copied = load.copied or [self.memory.get(block_id) for block_id in ids]
        for at, (block_id, content) in enumerate(zip(ids, copied, strict=True)):
            if self.generations[block_id] != ticket.generations[at]:
                outcomes.append(LoadOutcome.STALE)
            elif self.with_checksums and checksum(content) != ticket.checksums[at]:
                assert content == GARBAGE, "right content was refused"
                outcomes.append(LoadOutcome.CORRUPT)
            else:
                assert content == load.names[at], "a reader accepted wrong content"
                outcomes.append(LoadOutcome.OK)
        return outcomes

    def report_loaded(self, process, load, outcomes):
        result = LoadResult(load.ticket.id, np.array(outcomes, np.uint8))
        self.tier.loaded(process.client_id, [result])
        for loads in (process.loads, process.stale_loads):
            if load in loads:
                loads.remove(load)

    def get(self, process, tokens, num_device_blocks=0, namespace=None) -> list[LoadOutcome]:
        """Find, copy and report."""
        load = self.find(process, tokens, num_device_blocks, namespace)
        self.copy(load)
        outcomes = self.outcomes(load)
        if load.ticket.id:
            self.report_loaded(process, load, outcomes)
        return outcomes

    def damage(self, block_id):
        self.memory[block_id] = GARBAGE
        self.damaged.add(block_id)

    # -- what must hold ------------------------------------------------------------------------

    def findable(self) -> set[int]:
        ids = np.arange(len(self.generations))
        return set(ids[self.tier.manager.is_cached(ids) & self.tier.blocks.ready].tolist())

    def check(self):
        tier = self.tier
        tier.check_integrity()
        stats, findable = tier.stats(), self.findable()
        assert stats.cached == len(findable)
        num_states = stats.free + stats.storing + stats.pinned + stats.quarantined
        assert num_states + tier.manager.num_evictable_blocks == stats.blocks
        for block_id in findable:
            tokens, namespace = tier.manager._cache.content(block_id)
            name = (namespace, tuple(tokens.tolist()))
            assert block_id in self.damaged or self.memory[block_id] == name
            path = tier.manager._cache.match(tokens, namespace=namespace).tolist()
            assert path[-1] == block_id, "an ancestor is missing"
            assert len(path) * self.block_size == len(tokens), "an ancestor is missing"
        assert not findable & self.writable(), "what can be found can be written"

    def drain(self):
        """Everything ends; nothing is lost."""
        for process in list(self.processes.values()):
            for store in [*process.stores]:
                self.report_stored(process, store)
            for load in [*process.loads]:
                self.report_loaded(process, load, [LoadOutcome.CANCELLED] * len(load.names))
            self.kill(process)
        self.tier.release_quarantine()
        self.check()
        manager, stats = self.tier.manager, self.tier.stats()
        assert stats.storing == stats.pinned == stats.quarantined == 0
        assert stats.free + stats.cached == stats.blocks
        with manager.allocate(stats.blocks) as everything:
            assert sorted(everything.ids.tolist()) == list(range(1, stats.blocks + 1))
        self.check()
