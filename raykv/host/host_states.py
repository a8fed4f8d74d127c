"""The books of a host tier's checkpoints: which host slot holds which state, and who may touch it.

The half of HostTier that recurrent state needs, with the same rules. It copies nothing, and knows
neither clocks nor leases: whoever knows that a client is silent, or gone, says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raykv.core import (
    Blocks,
    CheckedPrefix,
    LinearStatePrefixCache,
    Namespace,
    PrefixHasher,
    Reservation,
    TokenIds,
    as_tokens,
)
from raykv.errors import ConfigError, IntegrityError
from raykv.host.state_stats import HostStatesStats
from raykv.host.state_tickets import StateLoad, StateLoaded, StateOffer, StateStored, StateTicket
from raykv.host.tickets import NO_TICKET, LoadOutcome


@dataclass(slots=True, eq=False)
class _Client:
    """What a client has under way, by ticket."""

    stores: dict[int, Reservation] = field(default_factory=dict)
    loads: dict[int, Blocks] = field(default_factory=dict)


class HostStates:
    """Keeps the books of host slots for the processes of a node.

    Each host slot is padding (slot 0), free, being stored, cached (and maybe pinned), pinned though
    it is forgotten, or in quarantine. A client writes only what it was given to store, and that is
    given to nobody else until the client reports its end, or cannot write any more. So what a
    reader gets is right, or its generation or checksum tells.

    A checkpoint is whole by itself, so each is found, and goes, without regard to the others; the
    least recently used goes first. What is found was compared token by token.

    Args:
        num_slots: host slots, the padding slot included.
        block_size: tokens per block; checkpoints stand at ends of blocks.
        generations: uint64 [num_slots], such as a slab's: a slot's is raised whenever it is given
            to somebody to write.
        hash_seed: the pool's secret for prefix hashes.

    Attributes:
        block_size: the same.
        cache: of the host slots.
        generations: as given.
        checksums: uint64 [num_slots], of what was stored last; 0 where that is not known.

    Raises:
        ConfigError: fewer than two slots, or an array of generations that does not fit.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        generations: NDArray[np.uint64],
        *,
        hash_seed: bytes | None = None,
    ) -> None:
        if generations.shape != (num_slots,) or generations.dtype != np.uint64:
            raise ConfigError(
                f"generations are {generations.dtype} of shape {generations.shape}, but must be"
                f" uint64 of shape ({num_slots},), one per host slot"
            )
        self.block_size = block_size
        self.cache = LinearStatePrefixCache(num_slots)
        self.generations = generations
        self.checksums = np.zeros(num_slots, np.uint64)
        self._hasher = PrefixHasher(block_size, hash_seed)
        self._clients: dict[str, _Client] = {}
        self._remains: dict[str, dict[int, Reservation]] = {}  # what ended clients may still write
        self._corrupt: dict[int, Blocks] = {}  # by slot
        self._last_ticket = NO_TICKET
        self._totals: Counter[str] = Counter()

    # -- storing --------------------------------------------------------------------------------

    def offer(self, client_id: str, offers: Iterable[StateOffer]) -> list[list[StateTicket]]:
        """Give host slots for the checkpoints that the host lacks.

        As many as find one, evicting what is not pinned. What somebody is storing already is not
        given again; what is there counts as used now.

        Returns:
            Per offer the tickets, in the order of its boundaries.

        Raises:
            ValueError: a boundary is not that of a full block of the tokens; nothing changed.
        """
        checked = [self._checked(StateOffer(*offer)) for offer in offers]
        return [self._give(client_id, prefixes) for prefixes in checked]

    def stored(self, client_id: str, results: Iterable[tuple[int, bool, int | None]]) -> None:
        """Let what is complete be found, and take back the rest; see ``StateStored``.

        A client reports a store when nothing of it will be written any more. Tickets that are over
        are counted and change nothing, but that their slots leave quarantine.
        """
        client = self._clients.get(client_id, _Client())
        for ticket_id, is_ok, checksum in map(StateStored._make, results):
            reservation = client.stores.pop(ticket_id, None)
            if reservation is None:
                self._totals["expired"] += 1
                self._clear_ticket(client_id, ticket_id)
            elif not is_ok:
                reservation.release()
            else:
                self.checksums[reservation.slot] = checksum or 0
                self._totals["stored" if self.cache.commit(reservation) else "orphaned"] += 1
        self._drop_idle(client_id)

    # -- loading --------------------------------------------------------------------------------

    def find(
        self,
        client_id: str,
        tokens: TokenIds,
        namespace: Namespace,
        *,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        step_tokens: int | None = None,
    ) -> StateLoad | None:
        """Give the deepest checkpoint of a prompt's prefixes to read.

        Args:
            client_id: who will read it.
            tokens: the prompt.
            namespace: whose it is.
            min_tokens: it must stand behind more tokens than these.
            max_tokens: and behind no more than these, of which there is KV; by default one token is
                left to compute.
            step_tokens: and at a multiple of these; None for any block's end.
        """
        row = as_tokens(tokens)
        stop = len(row) - 1 if max_tokens is None else min(max_tokens, len(row))
        raw = row[: max(0, stop)].tobytes()
        size = self.block_size
        names = self._hasher.names(np.frombuffer(raw, np.int32), namespace=namespace)
        for num_tokens in range(len(names) * size, max(0, min_tokens), -size):
            name = names[num_tokens // size - 1]
            if num_tokens % (step_tokens or size) or not self.cache.contains(name):
                continue
            pin = self.cache.match(name, prefix=CheckedPrefix(raw, num_tokens, namespace))
            if pin is not None:
                slot, ticket_id = int(pin.index[0]), self._next_ticket()
                self._clients.setdefault(client_id, _Client()).loads[ticket_id] = pin
                generation, checksum = int(self.generations[slot]), int(self.checksums[slot])
                return StateLoad(ticket_id, num_tokens, slot, generation, checksum)
        return None

    def loaded(self, client_id: str, results: Iterable[tuple[int, int]]) -> None:
        """Let go of what was read; see ``StateLoaded``. What was corrupt is never found again.

        Corrupt slots stay in quarantine until ``release_quarantine``. Tickets that are over are
        counted and change nothing.
        """
        client = self._clients.get(client_id, _Client())
        for ticket_id, outcome in map(StateLoaded._make, results):
            pin = client.loads.pop(ticket_id, None)
            if pin is None:
                self._totals["expired"] += 1
                continue
            self._totals[LoadOutcome(outcome).name] += 1
            if outcome == LoadOutcome.CORRUPT:
                self._set_aside(pin)
            else:
                pin.release()
        self._drop_idle(client_id)

    # -- clients --------------------------------------------------------------------------------

    def end_client(self, client_id: str) -> None:
        """A client is silent, or left: it gets nothing published any more. Idempotent.

        Its loads are let go: a reader that still reads sees by the generation if a slot was
        reassigned. What it was storing it may still write, so that goes to nobody until
        ``clear_client``, or until it reports; others may store the same checkpoints elsewhere.
        """
        client = self._clients.pop(client_id, _Client())
        for pin in client.loads.values():
            pin.release()
        for reservation in client.stores.values():
            reservation.void()
        if client.stores:
            self._remains.setdefault(client_id, {}).update(client.stores)

    def clear_client(self, client_id: str) -> int:
        """A client is dead or has unmapped the slab: what it had under way is over.

        Returns:
            Slots that come back.
        """
        self.end_client(client_id)
        remains = self._remains.pop(client_id, {})
        for reservation in remains.values():
            reservation.release()
        return len(remains)

    # -- the rest -------------------------------------------------------------------------------

    def release_quarantine(self, slots: Iterable[int] | None = None) -> int:
        """Let corrupt slots be used again, all or those listed; returns how many."""
        chosen = list(self._corrupt) if slots is None else slots
        released = [self._corrupt.pop(slot) for slot in chosen if slot in self._corrupt]
        for pin in released:
            pin.release()
        return len(released)

    def reset(self) -> int:
        """Forget all checkpoints, those being stored included; returns how many were found."""
        return self.cache.clear()

    def retire(self, weights_version: int) -> int:
        """See ``LinearStatePrefixCache.retire``."""
        return self.cache.retire(weights_version)

    def stats(self) -> HostStatesStats:
        """Count slots; changes nothing."""
        cache, totals = self.cache, self._totals
        num_left = sum(map(len, self._remains.values()))
        num_aside = len(self._corrupt)
        num_pins = cache.num_checkpoints - cache.num_reclaimable + cache.num_lingering_slots
        return HostStatesStats(
            slots=cache.num_total_slots,
            free=cache.num_free_slots,
            cached=cache.num_checkpoints,
            storing=cache.num_pending - num_left,
            pinned=num_pins - num_aside,
            quarantined=num_left + num_aside,
            stored_total=totals["stored"],
            orphaned=totals["orphaned"],
            hit=cache.num_hits_total,
            loaded_total=totals[LoadOutcome.OK.name],
            evicted=cache.num_reclaimed_total,
            corrupt=totals["set aside"],
            stale=totals[LoadOutcome.STALE.name],
            refused=cache.num_skipped_total,
            expired=totals["expired"],
        )

    def check_integrity(self) -> None:
        """Recompute who holds each slot.

        Raises:
            IntegrityError: something disagrees.
        """
        self.cache.check_integrity()
        clients, num_slots = self._clients.values(), len(self.generations)
        stores = [each for client in clients for each in client.stores.values()]
        left = [each for remains in self._remains.values() for each in remains.values()]
        loads = [pin for client in clients for pin in client.loads.values()]
        writing = [each.slot for each in (*stores, *left)]
        reading = [int(pin.index[0]) for pin in (*loads, *self._corrupt.values())]
        expected = np.bincount([*writing, *reading], minlength=num_slots)
        held = self.cache.slots.ref_counts(np.arange(num_slots))
        committed = [each.slot for each in self.cache.slots.committed.values()]
        _require(np.array_equal(held, expected), "a slot is held by nothing that is under way")
        _require(self.cache.num_live_slots == 0, "a slot is live")
        _require(len(set(writing)) == len(writing), "two may write one slot")
        _require(self.cache.num_pending == len(writing), "a slot is written by nobody")
        _require(not {*writing} & {*reading, *committed}, "a slot that is written can be read")
        _require(not self._corrupt.keys() & {*committed}, "a corrupt checkpoint can be found")
        _require(bool(self.generations[[*writing, *committed]].all()), "a slot was never assigned")
        _require(
            all(self._remains.values())
            and all(client.stores or client.loads for client in self._clients.values()),
            "a client that has nothing under way is kept",
        )

    # -- inside ---------------------------------------------------------------------------------

    def _checked(self, offer: StateOffer) -> list[tuple[bytes, CheckedPrefix]]:
        """The names and prefixes of what is offered."""
        tokens, size = as_tokens(offer.tokens), self.block_size
        for boundary in offer.boundaries:
            if not 0 < boundary <= len(tokens) or boundary % size:
                raise ValueError(
                    f"a checkpoint after {boundary} of {len(tokens)} tokens is offered, but host"
                    f" checkpoints stand at the ends of full blocks of {size}"
                )
        tokens = tokens[: max(offer.boundaries, default=0)]
        raw, names = tokens.tobytes(), self._hasher.names(tokens, namespace=offer.namespace)
        return [
            (names[boundary // size - 1], CheckedPrefix(raw, boundary, offer.namespace))
            for boundary in offer.boundaries
        ]

    def _give(
        self, client_id: str, prefixes: list[tuple[bytes, CheckedPrefix]]
    ) -> list[StateTicket]:
        tickets = []
        for name, prefix in prefixes:
            reservation = self.cache.reserve_checkpoint(name, prefix=prefix)
            if reservation is None:
                continue
            if reservation.existing:
                self.cache.commit(reservation)  # makes it the most recently used one
                continue
            slot, ticket_id = reservation.slot, self._next_ticket()
            self.generations[slot] += np.uint64(1)
            self.checksums[slot] = 0
            self._clients.setdefault(client_id, _Client()).stores[ticket_id] = reservation
            generation = int(self.generations[slot])
            tickets.append(StateTicket(ticket_id, prefix.num_tokens, slot, generation))
        return tickets

    def _next_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def _set_aside(self, pin: Blocks) -> None:
        """Never find what a slot holds again, and keep the slot from being given."""
        slot, slots = int(pin.index[0]), self.cache.slots
        name = slots.hash_of(slot)
        if name is not None:
            slots.forget(slots.committed[name])
        if slot in self._corrupt:
            pin.release()
        else:
            self._corrupt[slot] = pin
            self._totals["set aside"] += 1

    def _clear_ticket(self, client_id: str, ticket_id: int) -> None:
        """One store that a client had left under way is over after all."""
        remains = self._remains.get(client_id, {})
        if ticket_id in remains:
            remains.pop(ticket_id).release()
            if not remains:
                del self._remains[client_id]

    def _drop_idle(self, client_id: str) -> None:
        client = self._clients.get(client_id)
        if client is not None and not client.stores and not client.loads:
            del self._clients[client_id]


def _require(condition: bool, message: str) -> None:  # noqa: FBT001
    if not condition:
        raise IntegrityError(f"host states: {message}")
