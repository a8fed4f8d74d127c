"""Host to device: what the host has of admitted sequences beyond their device hits."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.core import BlockManagerImpl, Blocks
from raykv.core.sequence import KVCacheState, Sequence
from raykv.core.tokens import Index
from raykv.host.messages import Ask
from raykv.host.state_tickets import StateLoad
from raykv.host.tickets import NO_TICKET, LoadOutcome, LoadResult, LoadTicket, Want
from raykv.memory.buffers import KVBuffers
from raykv.memory.copy_batches import Ticket
from raykv.tiering.link import TierLink
from raykv.tiering.offloads import count_outcomes
from raykv.tiering.state_tiers import StateLoadTarget
from raykv.tiering.state_traffic import StateTraffic

_ASK_AGAIN_S = 0.01
# A copy that is slower than this is late.
_SLOWEST_BYTES_PER_S = 100e6


class Stage(Enum):
    """How far a load is."""

    TO_ASK = auto()
    ASKED = auto()
    GRANTED = auto()
    COPYING = auto()


@dataclass(slots=True, eq=False)
class Load:
    """One sequence's load.

    Attributes:
        sequence: whose; None once it is gone, or does not wait any more.
        tokens: int32, up to where it could be loaded, and one more.
        first_block: the first block that the device lacks.
        since_s: when it was asked for first.
        stage: how far it is.
        ask_s: when to ask.
        ticket: where from.
        state: where the checkpoint of recurrent state at its end is, where sequences have any.
        state_target: where that goes, once it is copied.
        state_copy: its copy; None too if it is on the device already.
        blocks: pins the targets while they are copied to.
        copy: the copy.
        late_s: when the copy is late.
    """

    sequence: Sequence | None
    tokens: NDArray[np.int32]
    first_block: int
    since_s: float
    stage: Stage = Stage.TO_ASK
    ask_s: float = 0.0
    ticket: LoadTicket | None = None
    state: StateLoad | None = None
    state_target: StateLoadTarget | None = None
    state_copy: Ticket | None = None
    blocks: Blocks | None = None
    copy: Ticket | None = None
    late_s: float = 0.0

    @property
    def num_targets(self) -> int:
        """Blocks that its copy may still write."""
        is_written = self.copy is None or self.copy.is_done
        return 0 if is_written or self.blocks is None else len(self.blocks)

    @property
    def is_copied(self) -> bool:
        """Whether its copies are over."""
        copies = (self.copy, self.state_copy)
        return all(copy.is_done for copy in copies if copy is not None)


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """How a load ended; what it brought counts as computed.

    Attributes:
        sequence: whose.
        num_blocks: blocks that are there now, from the first one that the device lacked.
        reason: why there are no more, a word for ``explain``; empty if all came that the host had.
    """

    sequence: Sequence
    num_blocks: int
    reason: str = ""


class Loads:
    """The loads of one rank. Targets stay pinned until their copy is over.

    Args:
        manager: of the device blocks.
        buffers: their memory.
        link: to the tier.
        totals: where blocks are counted.
        states: checkpoints, where sequences have recurrent state.
        prefill_rate: tokens per second that the rank computes; 0 if that is not known.
        patience_s: seconds that a prompt waits for what is on its way to the host.
        clock: seconds.

    Attributes:
        reports: what the tier is to be told.
        ended: how loads ended, for the rank to take.
        expected: prompts that will be asked for soon.
    """

    def __init__(
        self,
        manager: BlockManagerImpl,
        buffers: KVBuffers,
        link: TierLink,
        totals: Counter[str],
        states: StateTraffic | None = None,
        *,
        prefill_rate: Callable[[], float],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reports: list[LoadResult] = []
        self.ended: list[LoadEnd] = []
        self.expected: list[tuple[NDArray[np.int32], Any]] = []
        self._manager = manager
        self._buffers = buffers
        self._link = link
        self._totals = totals
        self._states = states
        self._prefill_rate = prefill_rate
        self._patience_s = patience_s
        self._clock = clock
        self._of_row: dict[int, Load] = {}
        self._asked: list[Load] = []
        self._copying: list[Load] = []
        self._random = random.Random(0)  # noqa: S311 - which loads are verified is no secret

    @property
    def is_idle(self) -> bool:
        """Whether nothing is planned, under way, or to be reported."""
        return not (self._of_row or self._asked or self._copying or self.reports or self.expected)

    @property
    def num_loading(self) -> int:
        """Sequences that wait."""
        return len(self._of_row)

    def num_loading_of(self, driver_id: str) -> int:
        """Sequences of one driver that wait."""
        return len(self._of_driver(driver_id))

    def want(self, sequence: Sequence) -> None:
        """Plan a load for a sequence that was just admitted, if the host could have more of it."""
        state, row = sequence.kv_state, sequence.single_block_id
        assert row is not None, "it was admitted"
        limit = min((sequence.num_tokens - 1) // state.block_size, state.num_blocks)
        first = state.num_computed_tokens // state.block_size
        if first >= limit:
            return
        if not self._link.is_up or self._link.is_silent:
            self._totals["loads_skipped"] += 1
            self._end(sequence, "host_unavailable")
            return
        tokens = sequence.token_ids[: limit * state.block_size + 1]
        now = self._clock()
        sequence.is_loading = True
        self._of_row[row] = Load(sequence, tokens, first, now, ask_s=now)

    def forget(self, row: int) -> None:
        """The sequence of a row goes."""
        self.ended = [end for end in self.ended if end.sequence.single_block_id != row]
        load = self._of_row.pop(row, None)
        if load is None:
            return
        if load.sequence is not None:
            load.sequence.is_loading = False
            load.sequence.host_kv_state = KVCacheState()
        load.sequence = None
        if load.stage is Stage.GRANTED:
            self._report_all(load, LoadOutcome.CANCELLED)
        elif load.copy is not None:
            load.copy.cancel()
            if load.state_copy is not None:
                load.state_copy.cancel()
            self.settle()

    def take_asks(self) -> list[Ask]:
        """What to ask with the next exchange."""
        now, rate = self._clock(), self._prefill_rate()
        self._asked = [
            load
            for load in self._of_row.values()
            if load.stage is Stage.TO_ASK and load.ask_s <= now
        ]
        asks = []
        for load in self._asked:
            load.stage = Stage.ASKED
            assert load.sequence is not None, "its row knows it"
            want = Want(load.tokens, load.sequence.namespace, load.first_block)
            step = 0 if self._states is None else self._states.step_tokens
            asks.append(Ask(want, now - load.since_s >= self._patience_s, rate, step))
        return asks

    def grant(self, tickets: list[LoadTicket | None], state_loads: list[StateLoad | None]) -> None:
        """What the host has of what was asked for."""
        asked, self._asked = self._asked, []
        for load, ticket, state in zip(asked, tickets, state_loads, strict=True):
            load.ticket, load.state = ticket, state
            if ticket is None:
                load.stage, load.ask_s = Stage.TO_ASK, self._clock() + _ASK_AGAIN_S
            elif ticket.id == NO_TICKET:
                self._drop(load, "")
            elif not self._is_wanted(load):
                self._report_all(load, LoadOutcome.CANCELLED)
                self._drop(load, "")
            else:
                load.stage = Stage.GRANTED
                assert load.sequence is not None, "it is wanted"
                size = load.sequence.kv_state.block_size
                end = (ticket.first_block + len(ticket.host_ids)) * size
                load.sequence.host_kv_state = KVCacheState(size, num_computed_tokens=end)

    def start(self, driver_id: str) -> int:
        """Submit the copies that can be for one driver's sequences; returns how many blocks."""
        num_blocks = 0
        for load in [one for one in self._of_driver(driver_id) if one.stage is Stage.GRANTED]:
            if not self._is_wanted(load):
                self._report_all(load, LoadOutcome.CANCELLED)
                self._drop(load, "")
            else:
                num_blocks += self._submit(load)
        return num_blocks

    def settle(self) -> None:
        """See which copies are over, and who has waited too long."""
        for load in [one for one in self._copying if one.is_copied]:
            self._finish(load)
        if self._link.is_silent:
            waiting = [one for one in self._of_row.values() if one.stage is Stage.TO_ASK]
            for load in [*self._asked, *waiting]:
                if load.sequence is not None:
                    self._totals["loads_timed_out"] += 1
                    self._drop(load, "host_unavailable")

    def late(self, driver_id: str) -> list[Load]:
        """A driver's loads that take too long: their sequences should compute elsewhere."""
        now = self._clock()
        copying = [one for one in self._of_driver(driver_id) if one.stage is Stage.COPYING]
        return [one for one in copying if now > one.late_s and not one.is_copied]

    def give_up(self, load: Load) -> None:
        """A late load's sequence waits no more; the copy writes to blocks that it has left."""
        self._totals["loads_late"] += len(load.blocks or ())
        self._drop(load, "host_load_late")

    def lose(self) -> None:
        """The tier is lost: nothing is planned any more. Copies under way end as they end."""
        for load in [one for one in self._of_row.values() if one.stage is not Stage.COPYING]:
            self._drop(load, "host_unavailable")
        self._asked.clear()
        self.reports.clear()
        self.expected.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _of_driver(self, driver_id: str) -> list[Load]:
        return [
            load
            for load in self._of_row.values()
            if load.sequence is not None and load.sequence.driver_id == driver_id
        ]

    def _submit(self, load: Load) -> int:
        copier, ticket, sequence = self._link.copier, load.ticket, load.sequence
        assert copier is not None, "the tier is there"
        assert ticket is not None, "it was granted"
        assert sequence is not None, "it is wanted"
        verifies = self._random.random() < self._link.config.checksum_rate
        if load.state is not None:
            assert self._states is not None, "it asked for a checkpoint"
            begun = self._states.begin_load(sequence, load.state, verifies=verifies)
            if begun is None:
                self._report_all(load, LoadOutcome.CANCELLED)
                self._drop(load, "no_state_slot")
                return 0
            load.state_target, load.state_copy = begun
        stop = ticket.first_block + len(ticket.host_ids)
        ids = sequence.kv_state.block_ids[ticket.first_block : stop].astype(np.int64)
        load.blocks = self._manager.pin(ids)
        waiting = sum(len(one.blocks or ()) for one in self._copying) + len(ids)
        slow_s = waiting * self._link.blocks.num_bytes / _SLOWEST_BYTES_PER_S
        load.late_s = self._clock() + self._link.config.timeout_s + slow_s
        load.copy = copier.submit(
            "load",
            self._buffers.storage,
            ids,
            ticket.host_ids,
            generations=ticket.generations,
            with_checksums=verifies,
            after=self._buffers.record_event(),
        )
        load.stage = Stage.COPYING
        self._copying.append(load)
        return len(ids)

    def _finish(self, load: Load) -> None:
        """A copy is over: report it, let its targets go, tell its sequence."""
        self._copying.remove(load)
        assert load.copy is not None, "it was submitted"
        assert load.copy.result is not None, "it is done"
        assert load.ticket is not None, "it was granted"
        assert load.blocks is not None, "it was submitted"
        outcomes = load.copy.result.outcomes
        ok = outcomes == LoadOutcome.OK
        num_ok = len(ok) if ok.all() else int(ok.argmin())
        count_outcomes(self._totals, "loads", outcomes)
        if self._link.is_up:  # tickets of a tier that was lost mean nothing to the next
            self.reports.append(LoadResult(load.ticket.id, outcomes))
        targets = load.blocks.index
        load.blocks.release()
        if not self._is_at(load, targets):
            num_ok = 0
        reason = _reason(outcomes, num_ok) if num_ok < len(outcomes) else ""
        if load.state_target is not None:
            goes_on, outcome = self._end_state(load, is_whole=num_ok == len(outcomes))
            num_ok = num_ok if goes_on else 0
            reason = reason or ("" if outcome == LoadOutcome.OK else f"host_{outcome.name.lower()}")
        self._totals["loaded"] += num_ok
        self._drop(load, reason, num_ok)

    def _end_state(self, load: Load, *, is_whole: bool) -> tuple[bool, LoadOutcome]:
        """See StateTraffic.end_load; without all of its KV, nobody goes on from a checkpoint."""
        assert self._states is not None, "it asked for a checkpoint"
        assert load.state is not None, "it was granted"
        assert load.state_target is not None, "it was submitted"
        sequence = load.sequence if is_whole else None
        return self._states.end_load(sequence, load.state, load.state_target, load.state_copy)

    def _is_at(self, load: Load, targets: Index) -> bool:
        """Whether its sequence is still to have what was loaded, in the blocks that it went to."""
        if load.sequence is None or not self._is_wanted(load):
            return False
        stop = load.first_block + len(targets)
        return np.array_equal(load.sequence.kv_state.block_ids[load.first_block : stop], targets)

    def _is_wanted(self, load: Load) -> bool:
        """Whether its sequence still stands where it stood when it was admitted."""
        sequence = load.sequence
        if sequence is None or sequence.single_block_id is None:
            return False
        state = sequence.kv_state
        return state.num_computed_tokens == load.first_block * state.block_size

    def _drop(self, load: Load, reason: str, num_ok: int = 0) -> None:
        """Its sequence waits no more."""
        sequence, load.sequence = load.sequence, None
        if sequence is not None and sequence.single_block_id is not None:
            self._of_row.pop(sequence.single_block_id, None)
            state = sequence.kv_state
            if num_ok:
                state.num_computed_tokens = (load.first_block + num_ok) * state.block_size
                state.num_loaded_tokens = state.num_computed_tokens
            self._end(sequence, reason, num_ok)

    def _end(self, sequence: Sequence, reason: str, num_ok: int = 0) -> None:
        sequence.is_loading = False
        sequence.host_kv_state = KVCacheState()
        self.ended.append(LoadEnd(sequence, num_ok, reason))

    def _report_all(self, load: Load, outcome: LoadOutcome) -> None:
        ticket = load.ticket
        assert ticket is not None, "it was granted"
        outcomes = np.full(len(ticket.host_ids), outcome, np.uint8)
        count_outcomes(self._totals, "loads", outcomes)
        self.reports.append(LoadResult(ticket.id, outcomes))
        if load.state is not None and self._states is not None:
            self._states.report(load.state, outcome)


def _reason(outcomes: NDArray[np.uint8], num_ok: int) -> str:
    outcome = LoadOutcome(int(outcomes[num_ok]))
    return "" if outcome == LoadOutcome.OK else f"host_{outcome.name.lower()}"
