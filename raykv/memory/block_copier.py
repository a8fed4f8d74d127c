"""Copies between a rank's memory and the host slab, in a thread of their own."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from raykv.errors import IntegrityError, TransferError
from raykv.memory.block_transfer import Channel, CudaChannel, FaultyChannel, HostChannel, Transfer
from raykv.memory.copy_batches import (
    BlockOutcome,
    CopyBatch,
    CopyFaults,
    CopyResult,
    Direction,
    Fault,
    Ticket,
)
from raykv.memory.host_slab import HostSlab
from raykv.memory.ids import Ids

_LATE_S = 0.5  # a batch that is made to be late waits no longer for another one


class BlockCopier:
    """Copies batches of blocks, one after the other in the order of submission.

    The thread holds Python's lock only between copies. Whatever goes wrong with a copy is said by
    its result; the thread goes on. ``submit``, ``cancel`` and the counters may be used from any
    thread.

    Attributes:
        slab: The host side.
        num_finished: Batches that were carried out, failed ones included.
        num_cancelled: Batches that were called off.

    Args:
        slab: The host side; stays open until the copier is closed.
        xp: The array module of the memory on the other side.
        faults: What goes wrong on purpose, in tests.
        on_done: Called on the copier's thread after each batch that was carried out.

    Raises:
        TransferError: The slab is closed.
    """

    def __init__(
        self,
        slab: HostSlab,
        *,
        xp: Any = np,
        faults: CopyFaults | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        if slab.is_closed:
            raise TransferError("the host slab is closed in this process: attach it again")
        self.slab = slab
        self.num_finished = self.num_cancelled = 0
        self._xp = xp
        self._faults = faults
        self._on_done = on_done
        self._num_submitted = 0
        self._stream: Any = None
        self._changed = threading.Condition()
        self._queue: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._held: list[Ticket] = []  # started, and made to be late
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="raykv-copier", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Batches that have not started."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Batches that have started and are not done."""
        return (self._running is not None) + len(self._held)

    def submit(
        self,
        direction: Direction,
        memory: Any,
        device_ids: Ids,
        slab_ids: Ids,
        *,
        generations: NDArray[np.uint64],
        with_checksums: bool = True,
        after: Any = None,
    ) -> Ticket:
        """Queue a batch; does not wait for it.

        Args:
            direction: ``"offload"`` or ``"load"``; this and the others: see ``CopyBatch``.
            memory: Contiguous array ``[rows, ...]`` of the array module.
            device_ids: Rows of it; targets of a load are all different and not padding.
            slab_ids: Blocks of the slab; targets of an offload are all different and not padding.
            generations: What ``HostSlab.reassign`` returned for these blocks.
            with_checksums: Whether checksums are computed and compared. Without, damage passes.
            after: On CUDA, an event that the copy waits for.

        Raises:
            TransferError: The copier is closed.
            ValueError: The batch is not sound: ids out of range, padding or repeated targets, or
                memory that is not the device's or whose rows are no blocks. Nothing was queued.
        """
        self._check_memory(memory)
        batch = CopyBatch.checked(
            direction, memory, device_ids, slab_ids, generations,
            num_slab_blocks=self.slab.num_blocks, with_checksums=with_checksums, after=after,
        )  # fmt: skip
        return self.submit_batch(batch)

    def submit_batch(self, batch: CopyBatch) -> Ticket:
        """Queue a batch whose ids need no look: they come from the books of both sides.

        Raises:
            TransferError: The copier is closed.
        """
        ticket = Ticket(batch, self._cancel)
        with self._changed:
            if self._is_closed:
                raise TransferError("the copier is closed: blocks cannot be copied any more")
            self._queue.append(ticket)
            self._num_submitted += 1
            self._changed.notify_all()
        return ticket

    def cancel_queued(self, direction: Direction | None = None) -> list[Ticket]:
        """Call off all batches that have not started.

        Args:
            direction: Only those; all if None.

        Returns:
            The tickets that were called off, now done; their blocks were not touched.
        """
        with self._changed:
            queued = [t for t in self._queue if direction in {None, t.batch.direction}]
        return [ticket for ticket in queued if self._cancel(ticket)]

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until all batches are done.

        Args:
            timeout_s: Seconds to wait at most.

        Returns:
            Whether they are.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: not self.num_queued and not self.num_running, timeout_s
            )

    def close(self) -> None:
        """Call off what has not started, finish what has, and end the thread; idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.cancel_queued()
        self._thread.join()

    def check_integrity(self) -> None:
        """Check the books against each other.

        Raises:
            IntegrityError: They do not balance, or the thread died.
        """
        with self._changed:
            waiting = [*self._queue, *self._held]
            if self._running is not None:
                waiting.append(self._running)
            if any(ticket.is_done for ticket in waiting):
                raise IntegrityError("a batch is done and still waits in the copier")
            known = len(waiting) + self.num_finished + self.num_cancelled
            if known != self._num_submitted:
                raise IntegrityError(
                    f"{self._num_submitted} batches were submitted, but {len(waiting)} wait,"
                    f" {self.num_finished} were carried out and {self.num_cancelled} cancelled"
                )
            if not self._is_closed and not self._thread.is_alive():
                raise IntegrityError("the copier's thread died")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------------

    def _check_memory(self, memory: Any) -> None:
        if not isinstance(memory, self._xp.ndarray):
            kind = f"{type(memory).__module__}.{type(memory).__name__}"
            raise ValueError(  # noqa: TRY004 - as other unsound batches
                f"memory is a {kind}, but the copier needs a {self._xp.__name__}.ndarray"
            )
        if memory.ndim < 2 or not memory.flags.c_contiguous:
            raise ValueError(f"memory of shape {memory.shape} must be contiguous [rows, ...]")
        row_bytes = memory.nbytes // len(memory) if len(memory) else 0
        if row_bytes != self.slab.block_bytes:
            raise ValueError(
                f"memory of shape {memory.shape} has {row_bytes} bytes in a row, but the slab's"
                f" blocks have {self.slab.block_bytes}; released memory has no rows"
            )

    def _cancel(self, ticket: Ticket) -> bool:
        with self._changed:
            try:
                self._queue.remove(ticket)
            except ValueError:
                return False
            self.num_cancelled += 1
            ticket.finish(CopyResult.all_of(ticket.batch, BlockOutcome.CANCELLED, None))
            self._changed.notify_all()
        return True

    def _work(self) -> None:
        while self._carry_out_next():
            pass
        self._carry_out_held()

    def _carry_out_next(self) -> bool:
        # A function of its own, so that a thread that waits holds no batch, nor its memory.
        ticket = self._next()
        if ticket is None:
            self._carry_out_held()
            return not self._is_closed
        fault, error = self._fault_of(ticket.batch)
        if fault == "late":
            with self._changed:
                self._held.append(ticket)
                self._running = None
                self._changed.notify_all()
        else:
            self._carry_out(ticket, fault, error)
            self._carry_out_held()
        return True

    def _next(self) -> Ticket | None:
        """The next batch; None if the copier was closed, or what is late has waited long enough."""
        with self._changed:
            limit_s = _LATE_S if self._held else None
            self._changed.wait_for(lambda: self._queue or self._is_closed, limit_s)
            if self._is_closed or not self._queue:
                return None
            self._running = self._queue.popleft()
            return self._running

    def _fault_of(self, batch: CopyBatch) -> tuple[Fault | None, str | None]:
        if self._faults is None:
            return None, None
        try:
            return self._faults.on_copy(batch), None
        except Exception as error:  # noqa: BLE001 - a fault of the test's own is one more fault
            return None, f"{type(error).__name__}: {error}"

    def _carry_out_held(self) -> None:
        while self._held:
            with self._changed:
                self._running = self._held.pop(0)
                ticket = self._running
            self._carry_out(ticket, None, None)

    def _carry_out(self, ticket: Ticket, fault: Fault | None, error: str | None) -> None:
        batch = ticket.batch
        result = CopyResult.all_of(batch, BlockOutcome.FAILED, error)
        if error is None:
            try:
                result = self._copied(batch, fault)
            except Exception as failure:  # noqa: BLE001 - whatever it is, the blocks are misses
                cause = f"{type(failure).__name__}: {failure}"
                result = CopyResult.all_of(batch, BlockOutcome.FAILED, cause)
        with self._changed:
            self._running = None
            self.num_finished += 1
            ticket.finish(result)
            self._changed.notify_all()
        if self._on_done is not None:
            self._on_done()

    def _copied(self, batch: CopyBatch, fault: Fault | None) -> CopyResult:
        with contextlib.ExitStack() as stack:
            channel: Channel = HostChannel()
            if self._xp is not np:
                stack.enter_context(batch.memory.device)
                if self._stream is None:
                    self._stream = self._xp.cuda.Stream(non_blocking=True)
                channel = CudaChannel(self._stream, batch.direction, batch.after)
            if fault is not None:
                channel = FaultyChannel(channel, fault, len(batch))
            return Transfer(self.slab, batch, channel).run()
