"""One rank's traffic with its node's host tier (the seed's section 9.4)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from raykv.core import BlockManagerImpl
from raykv.core.sequence import Sequence
from raykv.host.messages import TierCall
from raykv.memory.buffers import KVBuffers
from raykv.memory.state_buffers import StateBuffers
from raykv.tiering.link import TierLink
from raykv.tiering.loads import Load, LoadEnd, Loads
from raykv.tiering.offloads import Offloads
from raykv.tiering.state_tiers import StateTiers
from raykv.tiering.state_traffic import StateTraffic

_MAX_EXPECTED = 1024
_QUIESCE_S = 10.0


class RankTier:
    """Offloads what ended sequences leave, loads what new ones lack. The rank's owner calls it.

    Nothing here waits: whatever is under way is looked at by the next ``pump``. One exchange with
    the tier at a time carries all that there is to say.

    Args:
        manager: of the device blocks.
        buffers: their memory.
        link: to the tier, connected.
        states: checkpoints of recurrent state and their memory; None where there are none.
        prefill_rate: tokens per second that the rank computes; 0 if that is not known.
        patience_s: seconds that a prompt waits for what is on its way to the host.
        clock: seconds.

    Attributes:
        link: to the tier.
        totals: blocks by what became of them, since the start.
    """

    def __init__(
        self,
        manager: BlockManagerImpl,
        buffers: KVBuffers,
        link: TierLink,
        states: tuple[StateTiers, StateBuffers] | None = None,
        *,
        prefill_rate: Callable[[], float] = lambda: 0.0,
        patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self.totals: Counter[str] = Counter()
        self._block_size = manager.block_size
        self._clock = clock
        self._offloads = Offloads(manager, buffers, link, self.totals)
        self._states = None if states is None else StateTraffic(*states, link, self.totals)
        self._loads = Loads(
            manager, buffers, link, self.totals, self._states,
            prefill_rate=prefill_rate, patience_s=patience_s, clock=clock,
        )  # fmt: skip

    # -- what the rank tells --------------------------------------------------------------------

    def want(self, sequence: Sequence) -> None:
        """A sequence was admitted: see whether the host has more of it than the device."""
        self._loads.want(sequence)

    def expect(self, sequence: Sequence) -> None:
        """A sequence waits in line: what a store has of it may come to the host meanwhile."""
        if self.link.has_sources and len(self._loads.expected) < _MAX_EXPECTED:
            self._loads.expected.append((sequence.token_ids, sequence.namespace))

    def offload(self, sequence: Sequence) -> None:
        """A sequence is about to end: keep what it has computed, once it is on the host.

        Of a model with recurrent state, its slot was released already: that leaves a checkpoint.
        """
        state = sequence.kv_state
        num_blocks = min(state.num_computed_tokens // self._block_size, state.num_blocks)
        if num_blocks and self.link.is_up and not self.link.is_silent:
            tokens = sequence.token_ids[: num_blocks * self._block_size]
            ids = state.block_ids[:num_blocks].astype(np.int64)
            self._offloads.add(tokens, sequence.namespace, ids)
            if self._states is not None:
                self._states.add(tokens, sequence.namespace)

    def forget(self, row: int) -> None:
        """A row's sequence goes."""
        self._loads.forget(row)

    def cancel_unstarted_offloads(self) -> int:
        """Give up offloads that have not started; returns how many device blocks that frees."""
        if self._states is not None:
            self._states.cancel_unstarted()
        return self._offloads.cancel_unstarted()

    def begin_epoch(self, epoch: int) -> None:
        """The rank has forgotten its cache, as the tier has: nothing from before is stored."""
        self.cancel_unstarted_offloads()
        self.link.begin_epoch(epoch)

    # -- moving on ------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, under way, or to be said, and the link has all it needs."""
        is_idle = self._offloads.is_idle and self._loads.is_idle and not self.link.is_due
        return is_idle and (self._states is None or self._states.is_idle)

    @property
    def num_loading(self) -> int:
        """Sequences that wait for a load."""
        return self._loads.num_loading

    @property
    def num_offloading_blocks(self) -> int:
        """Device blocks that offloads pin."""
        return self._offloads.num_blocks

    def counters(self) -> dict[str, int]:
        """What RankStats says of it."""
        totals = self.totals
        faults = ("loads_stale", "loads_corrupt", "loads_failed", "loads_late", "loads_timed_out",
                  "offloads_failed", "tier_lost")  # fmt: skip
        return {
            "num_loaded_blocks_total": totals["loaded"],
            "num_offloaded_blocks_total": totals["offloaded"],
            "num_loading_sequences": self.num_loading,
            "num_offloading_blocks": self.num_offloading_blocks,
            "num_tier_faults_total": sum(totals[name] for name in faults),
        }

    def pump(self, driver_id: str | None) -> None:
        """Take what has come, start what can be, say what there is to say; waits for nothing.

        Args:
            driver_id: whose loads are started, and then all offloads; None starts nothing.
        """
        self.talk()
        if driver_id is not None:
            self.totals["loads_started"] += self._loads.start(driver_id)
            self.totals["offloads_started"] += self._offloads.start()
            if self._states is not None:
                self._states.start()
        self._send()

    def talk(self) -> None:
        """Take answers and finished copies, and send what is to be said."""
        self.link.maintain()
        self._receive()
        self._settle()
        self._send()
        self._receive()  # a tier in this process has answered

    def late(self, driver_id: str) -> list[Load]:
        """See Loads.late."""
        return self._loads.late(driver_id)

    def num_loading_of(self, driver_id: str) -> int:
        """Sequences of one driver that wait for a load."""
        return self._loads.num_loading_of(driver_id)

    def give_up(self, load: Load) -> None:
        """See Loads.give_up."""
        self._loads.give_up(load)

    def quiesce(self) -> None:
        """Wait until no copy touches the device's memory; what has not started is given up.

        Copies that take longer than they may keep their blocks, so that the rank cannot sleep yet.
        """
        self.cancel_unstarted_offloads()
        self.link.wait_still(_QUIESCE_S)
        self._settle()

    def close(self) -> None:
        """Finish the copy under way and leave the tier; idempotent. Nobody waits any more."""
        self.cancel_unstarted_offloads()
        self.link.close()
        self._settle()
        self._loads.lose()

    def take_ended(self) -> list[LoadEnd]:
        """Loads that ended since they were taken last."""
        ended, self._loads.ended = self._loads.ended, []
        return ended

    # -- inside ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._offloads.settle()
        self._loads.settle()
        if self._states is not None:
            self._states.settle()

    def _receive(self) -> None:
        try:
            answer = self.link.receive()
        except Exception as error:  # noqa: BLE001 - a tier that fails in any way is lost
            self.link.lose(error)
            self.totals["tier_lost"] += 1
            self._offloads.lose()
            self._loads.lose()
            if self._states is not None:
                self._states.lose()
            return
        if answer is not None:
            self._offloads.grant(answer.stores)
            self._loads.grant(answer.loads, answer.state_loads)
            if self._states is not None:
                self._states.grant(answer.state_stores)

    def _send(self) -> None:
        offloads, loads, states = self._offloads, self._loads, self._states
        if not self.link.is_free:
            return
        asks, offers = loads.take_asks(), offloads.take_offers()
        state_offers = [] if states is None else states.take_offers()
        states_stored, states_loaded = ([], []) if states is None else states.take_reports()
        stored, offloads.reports = offloads.reports, []
        loaded, loads.reports = loads.reports, []
        expected, loads.expected = loads.expected, []
        said = (
            stored, loaded, offers, asks, states_stored, states_loaded, state_offers, expected,
        )  # fmt: skip
        if any(said):
            self.link.send(TierCall(self.link.client_id, self.link.epoch, *said))
