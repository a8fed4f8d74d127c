"""A rank's line to its host tier: membership, the mapped memory, one exchange at a time."""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from raykv.config_host import HostConfig
from raykv.errors import RankUnavailableError
from raykv.host.handle import TierHandle
from raykv.host.messages import BlockKind, TierAnswer, TierCall, TierInfo
from raykv.memory.block_copier import BlockCopier
from raykv.memory.host_slab import HostSlab, SlabDescriptor

_RENEWALS_PER_LEASE = 4
_JOIN_AGAIN_S = 0.25
_START_S = 60.0  # taking all of a large slab's memory may last


class TierLink:
    """Joins a host tier, and joins again when it was lost. The rank's owner calls it.

    A host tier that died or forgot this rank is lost: tickets of before are void, and nothing is
    reported to it any more. Once no copy is under way, the rank joins again, under another name.

    Args:
        handle: the tier.
        config: its configuration.
        blocks: what the rank's blocks are.
        xp: the array module of the rank's memory.
        wake: called from other threads when there is something to do.
        clock: seconds.

    Attributes:
        handle: the tier.
        client_id: the rank's name there now.
        epoch: the tier's as of the rank's own last reset: what the rank has is from it.
        heard_epoch: the tier's, as far as it was heard.
        slab: the host memory, mapped; None before the first ``connect``.
        copier: copies to and from it; None likewise.
        states: the host memory of checkpoints; None too where sequences have no recurrent state.
        states_copier: copies to and from it; None likewise.
        has_sources: whether the tier can get blocks from elsewhere.
        num_lost: how often it was lost.
        last_error: why, for people.
    """

    def __init__(
        self,
        handle: TierHandle,
        config: HostConfig,
        blocks: BlockKind,
        *,
        xp: Any,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.handle = handle
        self.config = config
        self.blocks = blocks
        self.client_id = uuid.uuid4().hex
        self.epoch = self.heard_epoch = 0
        self.slab: HostSlab | None = None
        self.copier: BlockCopier | None = None
        self.states: HostSlab | None = None
        self.states_copier: BlockCopier | None = None
        self.has_sources = False
        self.num_lost = 0
        self.last_error = ""
        self.is_up = False
        self._xp = xp
        self._wake = wake
        self._clock = clock
        self._exchange: Future[TierAnswer] | None = None
        self._sent_s = 0.0
        self._first_epoch = 0
        self._behind_s: float | None = None  # since when the tier has another epoch
        self._replaces = ""  # the name of before it was lost
        self._forgotten = ""  # the name that the tier knows no more, noted by the lease's thread
        self._joining: Future[TierInfo] | None = None
        self._join_s = 0.0
        self._closed = threading.Event()

    def connect(self, *, is_back: bool = False) -> None:
        """Join, and wait until that is done.

        Args:
            is_back: wait for ``host.timeout_s`` only, and raise nothing: ``maintain`` goes on.

        Raises:
            ConfigError: the tier's memory cannot be had, or does not fit this rank's blocks.
            RankUnavailableError: the tier is not there.
            TransferError: its memory cannot be mapped.
        """
        self._start_join()
        assert self._joining is not None, "it was started"
        if is_back:
            wait([self._joining], self.config.timeout_s)
            self.maintain()
        else:
            self._enter(self._joined())
        threading.Thread(
            target=_renew, args=(weakref.ref(self), self._closed, self.config.lease_s),
            name="raykv-tier-lease", daemon=True,
        ).start()  # fmt: skip

    @property
    def is_silent(self) -> bool:
        """Whether the tier has owed an answer for too long."""
        waited = self._clock() - self._sent_s
        return self._exchange is not None and waited > self.config.timeout_s

    @property
    def is_still(self) -> bool:
        """Whether no copy is under way, or queued in a copier."""
        copiers = [one for one in (self.copier, self.states_copier) if one is not None]
        return not any(one.num_queued + one.num_running for one in copiers)

    def wait_still(self, timeout_s: float) -> None:
        """Wait for what the copiers have, up to so many seconds each."""
        for copier in (self.copier, self.states_copier):
            if copier is not None:
                copier.wait_idle(timeout_s)

    @property
    def is_free(self) -> bool:
        """Whether an exchange can be sent now."""
        return self.is_up and self._exchange is None

    @property
    def is_due(self) -> bool:
        """Whether ``receive`` or ``maintain`` would go on, though there is nothing to say."""
        if self._closed.is_set():
            return False
        if self.is_up:
            return self._forgotten == self.client_id
        if self._joining is not None:
            return self._joining.done()
        return self.is_still and self._clock() >= self._join_s

    def send(self, call: TierCall) -> None:
        """Start an exchange; one must not be under way."""
        assert self.is_free, "one exchange at a time"
        self._sent_s = self._clock()
        self._exchange = self.handle.exchange(call)
        if not self._exchange.done():
            self._exchange.add_done_callback(lambda _: self._wake())

    def receive(self) -> TierAnswer | None:
        """The answer, once; None while there is none.

        Raises:
            Exception: the tier was lost: call ``lose``.
        """
        if self.is_up and self._forgotten == self.client_id:
            raise RankUnavailableError("the host tier has not renewed this rank's lease")
        exchange = self._exchange
        if exchange is None or not exchange.done():
            return None
        self._exchange = None
        answer = exchange.result()
        self.has_sources = answer.has_sources
        self._hear(answer.epoch)
        return answer

    def lose(self, error: Exception) -> None:
        """Expect nothing any more of what was said to the tier."""
        self.is_up = False
        self._exchange = None
        self._replaces, self.client_id = self.client_id, uuid.uuid4().hex
        self.num_lost += 1
        self.last_error = f"{type(error).__name__}: {error}"
        self._join_s = self._clock()

    def maintain(self) -> None:
        """Join again where the tier was lost, once no copy of before is under way."""
        if self.is_up or self._closed.is_set():
            return
        if self._joining is None:
            if self.is_still and self._clock() >= self._join_s:
                self._start_join()
        elif self._joining.done():
            joining, self._joining = self._joining, None
            try:
                self._enter(joining.result())
            except Exception as error:  # noqa: BLE001 - whatever it is, try again in a while
                self.last_error = f"{type(error).__name__}: {error}"
                self._join_s = self._clock() + _JOIN_AGAIN_S

    def renew(self) -> Future[bool] | None:
        """Keep the lease; from any thread."""
        client_id = self.client_id
        if not self.is_up:
            self._wake()  # it may be time to join again
            return None
        known = self.handle.renew(client_id)
        known.add_done_callback(lambda known: self._hear_of_lease(client_id, known))
        return known

    def close(self) -> None:
        """Finish the copy under way, and leave; idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._unmap()
        for client_id in (self._replaces, self.client_id):
            self.handle.unmapped(client_id)
        self.is_up = False

    @property
    def is_outdated(self) -> bool:
        """Whether the tier was reset a lease ago, and nobody has told this rank to."""
        since = self._behind_s
        return since is not None and self._clock() - since > self.config.lease_s

    def begin_epoch(self, epoch: int) -> None:
        """What the rank has from now on is from this epoch, if it is not an earlier one."""
        self.epoch = max(self.epoch, epoch)
        self._hear(self.heard_epoch)

    def _hear(self, epoch: int) -> None:
        self.heard_epoch = max(self.heard_epoch, epoch)
        if self.heard_epoch <= self.epoch:
            self._behind_s = None
        elif self._behind_s is None:
            self._behind_s = self._clock()

    def _hear_of_lease(self, client_id: str, known: Future[bool]) -> None:
        if known.exception() is not None or not known.result():
            self._forgotten = client_id
            self._wake()

    def _joined(self) -> TierInfo:
        assert self._joining is not None, "it was started"
        try:
            return self._joining.result(_START_S)
        except TimeoutError:
            raise RankUnavailableError(
                f"the host tier has not answered for {_START_S:g} s: look whether its process is"
                " stopped, or launch another pool"
            ) from None

    def _start_join(self) -> None:
        self._joining = self.handle.join(self.client_id, os.getpid(), self.blocks, self._replaces)
        if not self._joining.done():
            self._joining.add_done_callback(lambda _: self._wake())

    def _enter(self, info: TierInfo) -> None:
        self._joining = None
        self._unmap()
        self.slab, self.copier = self._mapped(info.blocks)
        if info.states is not None:
            self.states, self.states_copier = self._mapped(info.states)
        if info.first_epoch != self._first_epoch:  # it has nothing from before it started
            is_first = not self._first_epoch
            self._first_epoch = info.first_epoch
            self.epoch = info.epoch if is_first else info.first_epoch
            self.heard_epoch = 0
        self._hear(info.epoch)
        self._replaces = ""
        self.is_up = True

    def _mapped(self, descriptor: SlabDescriptor) -> tuple[HostSlab, BlockCopier]:
        slab = HostSlab.attach(descriptor)
        slab.register_pinned(self._xp)
        faults = self.handle.copy_faults
        return slab, BlockCopier(slab, xp=self._xp, faults=faults, on_done=self._wake)

    def _unmap(self) -> None:
        for copier, slab in ((self.copier, self.slab), (self.states_copier, self.states)):
            if copier is not None and slab is not None:
                copier.close()
                slab.close()
        self.copier = self.slab = self.states_copier = self.states = None


def _renew(link: weakref.ReferenceType[TierLink], closed: threading.Event, lease_s: float) -> None:
    """Keep a lease, while the rank may be busy with a step."""
    pending: Future[bool] | None = None
    while not closed.wait(lease_s / _RENEWALS_PER_LEASE):
        known = link()
        if known is None:
            return
        if pending is None or pending.done():
            pending = known.renew()
        del known
