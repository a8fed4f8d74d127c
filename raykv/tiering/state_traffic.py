"""Checkpoints of recurrent state between a rank and its host tier, beside the KV that they end."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.core import Namespace
from raykv.core.sequence import Sequence
from raykv.host.state_tickets import StateLoad, StateLoaded, StateOffer, StateStored, StateTicket
from raykv.host.tickets import LoadOutcome
from raykv.memory.copy_batches import BlockOutcome, Ticket
from raykv.memory.state_buffers import StateBuffers
from raykv.tiering.link import TierLink
from raykv.tiering.state_tiers import CheckpointPin, StateLoadTarget, StateTiers


@dataclass(slots=True, eq=False)
class StateOffload:
    """Checkpoints of a sequence that ended, on their way to the host.

    Attributes:
        offer: what the tier is told.
        pins: keep them, by boundary.
        written: on CUDA, an event behind their last write.
        tickets: where those go that the host lacks.
        copy: of these.
        is_cancelled: it is over, whatever the tier answers.
    """

    offer: StateOffer
    pins: dict[int, CheckpointPin]
    written: Any = None
    tickets: list[StateTicket] = field(default_factory=list)
    copy: Ticket | None = None
    is_cancelled: bool = False

    def release(self) -> None:
        """Nobody reads the checkpoints any more."""
        for pin in self.pins.values():
            pin.release()


class StateTraffic:
    """The checkpoints of one rank. Whatever is copied stays pinned until that is over.

    Args:
        tiers: says what can be offloaded, and makes place for what is loaded.
        buffers: the memory of the rank's states.
        link: to the tier, which keeps checkpoints.
        totals: where checkpoints are counted.

    Attributes:
        step_tokens: checkpoints are of use at multiples of these.
        stored: stores that ended, for the tier.
        loaded: loads that ended, for the tier.
    """

    def __init__(
        self, tiers: StateTiers, buffers: StateBuffers, link: TierLink, totals: Counter[str]
    ) -> None:
        self.step_tokens = tiers.step_tokens
        self.stored: list[StateStored] = []
        self.loaded: list[StateLoaded] = []
        self._tiers = tiers
        self._buffers = buffers
        self._link = link
        self._totals = totals
        self._queued: deque[StateOffload] = deque()
        self._offered: list[StateOffload] = []
        self._granted: deque[StateOffload] = deque()
        self._copying: list[StateOffload] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, under way, or to be reported."""
        stages = (self._queued, self._offered, self._granted, self._copying)
        return not (any(stages) or self.stored or self.loaded)

    def take_reports(self) -> tuple[list[StateStored], list[StateLoaded]]:
        """What to say with the next exchange."""
        reports = self.stored, self.loaded
        self.stored, self.loaded = [], []
        return reports

    # -- to the host ----------------------------------------------------------------------------

    def add(self, tokens: NDArray[np.int32], namespace: Namespace) -> None:
        """Queue the checkpoints of what a sequence, which was just released, has computed."""
        pins = {pin.num_tokens: pin for pin in self._tiers.pin_checkpoints(tokens, namespace)}
        if pins:
            offer = StateOffer(tokens, namespace, tuple(pins))
            self._queued.append(StateOffload(offer, pins, self._buffers.record_event()))

    def take_offers(self) -> list[StateOffer]:
        """What to offer with the next exchange."""
        self._offered = list(self._queued)
        self._queued.clear()
        return [one.offer for one in self._offered]

    def grant(self, answers: list[list[StateTicket]]) -> None:
        """What became of the offers."""
        offered, self._offered = self._offered, []
        for one, tickets in zip(offered, answers, strict=True):
            one.tickets = tickets
            if one.is_cancelled:
                self._report_none(one)
            elif tickets:
                self._granted.append(one)
            else:
                one.release()

    def start(self) -> None:
        """Submit the copies that can be."""
        copier = self._link.states_copier
        while self._granted and copier is not None:
            one = self._granted.popleft()
            one.copy = copier.submit(
                "offload",
                self._buffers.slots,
                [one.pins[ticket.num_tokens].slot for ticket in one.tickets],
                [ticket.host_slot for ticket in one.tickets],
                generations=np.array([ticket.generation for ticket in one.tickets], np.uint64),
                with_checksums=self._link.config.checksum_rate > 0,
                after=one.written,
            )
            self._copying.append(one)

    def settle(self) -> None:
        """Let go of what was copied, and note what to report."""
        for one in [one for one in self._copying if one.copy is not None and one.copy.is_done]:
            self._copying.remove(one)
            one.release()
            result, slab = one.copy.result if one.copy is not None else None, self._link.states
            if result is None or slab is None or not self._link.is_up:
                continue  # tickets of a tier that was lost mean nothing to the next
            self._totals["states_offloaded"] += result.count(BlockOutcome.OK)
            self._totals["states_failed"] += result.count(BlockOutcome.FAILED)
            for ticket, is_ok in zip(one.tickets, result.is_ok.tolist(), strict=True):
                checksum = int(slab.checksums[ticket.host_slot])
                self.stored.append(StateStored(ticket.id, is_ok, checksum or None))

    def cancel_unstarted(self) -> None:
        """Give up what has not started, so that its slots can be used."""
        for one in (*self._queued, *self._offered, *self._granted):
            one.is_cancelled = True
            one.release()
        for one in self._granted:
            self._report_none(one)
        self._queued.clear()
        self._granted.clear()
        for one in self._copying:
            if one.copy is not None:
                one.copy.cancel()
        self.settle()

    def lose(self) -> None:
        """The tier is lost: only copies under way are waited for."""
        self.cancel_unstarted()
        self._offered.clear()
        self.stored.clear()
        self.loaded.clear()

    def _report_none(self, one: StateOffload) -> None:
        if self._link.is_up:
            self.stored += [StateStored(ticket.id, False, None) for ticket in one.tickets]

    # -- from the host --------------------------------------------------------------------------

    def begin_load(
        self, sequence: Sequence, load: StateLoad, *, verifies: bool
    ) -> tuple[StateLoadTarget, Ticket | None] | None:
        """Start to copy a checkpoint to the device.

        Returns:
            Where to, and the copy, None if it is there already; None if there is no slot for it.
        """
        target = self._tiers.begin_load(sequence, load.num_tokens)
        copier = self._link.states_copier
        if target is None or copier is None or target.existing:
            return None if target is None else (target, None)
        copy = copier.submit(
            "load",
            self._buffers.slots,
            [target.slot],
            [load.host_slot],
            generations=np.array([load.generation], np.uint64),
            with_checksums=verifies,
            after=self._buffers.record_event(),
        )
        return target, copy

    def end_load(
        self,
        sequence: Sequence | None,
        load: StateLoad,
        target: StateLoadTarget,
        copy: Ticket | None,
    ) -> tuple[bool, LoadOutcome]:
        """A copy is over: report it; its checkpoint can be found if it went well.

        Args:
            sequence: that is to go on from it; None for nobody.
            load: the tier's word.
            target: as ``begin_load`` gave it.
            copy: likewise, done.

        Returns:
            Whether the sequence goes on from it, and what became of the copy.
        """
        outcome = LoadOutcome.OK
        if copy is not None:
            assert copy.result is not None, "the caller has waited"
            outcome = LoadOutcome(int(copy.result.outcomes[0]))
        self.report(load, outcome)
        ok = outcome == LoadOutcome.OK
        self._totals["states_loaded" if ok else "states_missed"] += 1
        return self._tiers.finish_load(sequence, target, ok=ok), outcome

    def report(self, load: StateLoad, outcome: LoadOutcome) -> None:
        """Note what became of a load, for the tier."""
        if self._link.is_up:
            self.loaded.append(StateLoaded(load.id, outcome))
