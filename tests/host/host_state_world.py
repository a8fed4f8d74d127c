"""Books of host checkpoints, the memory of their slots, and processes that copy, die and come late.

A slot's content is the name of what was saved: its namespace and all tokens before it. So whoever
reads a slot knows whether it is the right one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raykv.core import Namespace
from raykv.host.host_states import HostStates
from raykv.host.state_tickets import StateLoad, StateOffer, StateTicket
from raykv.host.tickets import LoadOutcome

from .host_world import GARBAGE, checksum

SPACE = Namespace()


@dataclass(eq=False)
class Store:
    ticket: StateTicket
    name: tuple
    is_written: bool = False


@dataclass(eq=False)
class Load:
    ticket: StateLoad
    name: tuple
    copied: object = None


@dataclass(eq=False)
class Process:
    """It goes on with what it has under way, whether it was ended or not."""

    client_id: str
    stores: list[Store] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stale_stores: list[Store] = field(default_factory=list)
    stale_loads: list[Load] = field(default_factory=list)


class StatesWorld:
    def __init__(self, num_slots, block_size=2, *, with_checksums=True):
        self.generations = np.zeros(num_slots, np.uint64)
        self.books = HostStates(num_slots, block_size, self.generations)
        self.block_size = block_size
        self.with_checksums = with_checksums
        self.memory: dict[int, object] = {}
        self.damaged: set[int] = set()
        self.processes: dict[str, Process] = {}
        self.num_processes = 0

    # -- processes -----------------------------------------------------------------------------

    def start(self) -> Process:
        self.num_processes += 1
        process = self.processes[f"c{self.num_processes}"] = Process(f"c{self.num_processes}")
        return process

    def end(self, process):
        """It was silent for too long; it goes on all the same."""
        self.books.end_client(process.client_id)
        process.stale_stores += process.stores
        process.stale_loads += process.loads
        process.stores, process.loads = [], []

    def kill(self, process) -> int:
        """It is known to be dead: nothing of it happens any more."""
        del self.processes[process.client_id]
        return self.books.clear_client(process.client_id)

    def stores(self, *, stale=None) -> list[tuple[Process, Store]]:
        return [
            (process, store)
            for process in self.processes.values()
            for is_stale, stores in ((False, process.stores), (True, process.stale_stores))
            for store in stores
            if stale in {None, is_stale}
        ]

    def loads(self) -> list[tuple[Process, Load, bool]]:
        return [
            (process, load, is_stale)
            for process in self.processes.values()
            for is_stale, loads in ((False, process.loads), (True, process.stale_loads))
            for load in loads
        ]

    def writable(self) -> set[int]:
        """Slots that some process may write at any time."""
        return {store.ticket.host_slot for _, store in self.stores()}

    def readable(self) -> set[int]:
        """Slots that live readers count on."""
        return {load.ticket.host_slot for _, load, is_stale in self.loads() if not is_stale}

    # -- storing -------------------------------------------------------------------------------

    def offer(self, process, tokens, *boundaries, namespace=SPACE) -> list[Store]:
        """Offer these boundaries of a prompt, or all that it has, the deepest first."""
        size = self.block_size
        ends = boundaries or tuple(range(len(tokens) // size * size, 0, -size))
        before, taken = self.generations.copy(), self.writable() | self.readable()
        offer = StateOffer(np.array(tokens, np.int32), namespace, ends)
        [tickets] = self.books.offer(process.client_id, [offer])
        assert [t.num_tokens for t in tickets] == [
            end for end in ends if end in {t.num_tokens for t in tickets}
        ]
        stores = []
        for ticket in tickets:
            slot = ticket.host_slot
            assert slot not in taken | {0}, "given to two"
            taken.add(slot)
            assert ticket.generation == before[slot] + 1 == self.generations[slot]
            stores.append(Store(ticket, (namespace, tuple(tokens[: ticket.num_tokens]))))
        process.stores += stores
        return stores

    def write(self, store):
        self.memory[store.ticket.host_slot] = store.name
        self.damaged.discard(store.ticket.host_slot)
        store.is_written = True

    def report_stored(self, process, store, *, ok=True):
        is_ok = ok and store.is_written
        number = checksum(store.name) if self.with_checksums and is_ok else None
        self.books.stored(process.client_id, [(store.ticket.id, is_ok, number)])
        for stores in (process.stores, process.stale_stores):
            if store in stores:
                stores.remove(store)

    def put(self, process, tokens, *boundaries, namespace=SPACE) -> list[Store]:
        """Offer, write and report."""
        stores = self.offer(process, tokens, *boundaries, namespace=namespace)
        for store in stores:
            self.write(store)
            self.report_stored(process, store)
        return stores

    # -- loading -------------------------------------------------------------------------------

    def find(self, process, tokens, namespace=SPACE, **limits) -> Load | None:
        ticket = self.books.find(process.client_id, np.array(tokens, np.int32), namespace, **limits)
        if ticket is None:
            return None
        assert ticket.num_tokens % self.block_size == 0
        assert ticket.num_tokens % (limits.get("step_tokens") or 1) == 0
        assert limits.get("min_tokens", 0) < ticket.num_tokens
        assert ticket.num_tokens <= (limits.get("max_tokens") or len(tokens) - 1)
        assert ticket.host_slot not in self.writable(), "given to read and to write"
        load = Load(ticket, (namespace, tuple(tokens[: ticket.num_tokens])))
        process.loads.append(load)
        return load

    def copy(self, load):
        load.copied = self.memory.get(load.ticket.host_slot)

    def outcome(self, load) -> LoadOutcome:
        """What a reader makes of what it copied; what it accepts must be right."""
        ticket = load.ticket
        content = load.copied or self.memory.get(ticket.host_slot)
        if self.generations[ticket.host_slot] != ticket.generation:
            return LoadOutcome.STALE
        if self.with_checksums and checksum(content) != ticket.checksum:
            assert content == GARBAGE, "right content was refused"
            return LoadOutcome.CORRUPT
        assert content == load.name, "a reader accepted wrong content"
        return LoadOutcome.OK

    def report_loaded(self, process, load, outcome):
        self.books.loaded(process.client_id, [(load.ticket.id, outcome)])
        for loads in (process.loads, process.stale_loads):
            if load in loads:
                loads.remove(load)

    def get(self, process, tokens, namespace=SPACE, **limits):
        """Find, copy and report; the boundary and the outcome, or None."""
        load = self.find(process, tokens, namespace, **limits)
        if load is None:
            return None
        self.copy(load)
        outcome = self.outcome(load)
        self.report_loaded(process, load, outcome)
        return load.ticket.num_tokens, outcome

    def damage(self, slot):
        self.memory[slot] = GARBAGE
        self.damaged.add(slot)

    # -- what must hold ------------------------------------------------------------------------

    def findable(self) -> dict[int, tuple]:
        """Names of the checkpoints that can be found, by slot."""
        found = {}
        for one in self.books.cache.slots.committed.values():
            tokens = np.frombuffer(one.prefix.tokens, np.int32)[: one.prefix.num_tokens]
            found[one.slot] = (one.prefix.namespace, tuple(tokens.tolist()))
        return found

    def check(self):
        self.books.check_integrity()
        stats, findable = self.books.stats(), self.findable()
        assert stats.cached == len(findable) == len(set(findable.values()))
        num_states = stats.free + stats.storing + stats.pinned + stats.quarantined
        assert num_states + self.books.cache.num_reclaimable == stats.slots
        assert min(stats.free, stats.storing, stats.pinned, stats.quarantined) >= 0
        for slot, name in findable.items():
            assert slot in self.damaged or self.memory[slot] == name
        assert not findable.keys() & self.writable(), "what can be found can be written"

    def drain(self):
        """Everything ends; nothing is lost."""
        for process in list(self.processes.values()):
            for store in [*process.stores]:
                self.report_stored(process, store)
            for load in [*process.loads]:
                self.report_loaded(process, load, LoadOutcome.CANCELLED)
            self.kill(process)
        self.books.release_quarantine()
        self.check()
        stats = self.books.stats()
        assert stats.storing == stats.pinned == stats.quarantined == 0
        assert stats.free + stats.cached == stats.slots
        process = self.start()
        assert len(self.offer(process, range(1000, 1000 + self.block_size * stats.slots))) == (
            stats.slots
        )
        self.kill(process)
