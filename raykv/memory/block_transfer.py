"""One batch between a device and the host slab: copies, checksums, generations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raykv.memory.checksums import NO_CHECKSUM, block_checksum, block_checksums
from raykv.memory.copy_batches import BlockOutcome, CopyBatch, CopyResult, Direction, Fault
from raykv.memory.host_slab import HostSlab


class Channel(Protocol):
    """How bytes get from one side to the other.

    Attributes:
        is_host: Whether both sides are host memory, and a copy is done when ``copy`` returns.
    """

    is_host: bool

    def copy(self, target: Any, source: Any) -> None:
        """Copy contiguous uint8 rows ``[n, block_bytes]``, or start to."""

    def finish(self) -> None:
        """Wait until all copies that were started are done."""


class HostChannel:
    """NumPy to NumPy."""

    is_host = True

    def copy(self, target: Any, source: Any) -> None:
        """See Channel. NumPy lets other threads run meanwhile."""
        target[...] = source

    def finish(self) -> None:
        """See Channel."""


class CudaChannel:
    """CuPy to and from the slab, on a stream of its own.

    Args:
        stream: A CuPy stream.
        direction: Which side is the device.
        after: An event to wait for, or None.
    """

    is_host = False

    def __init__(self, stream: Any, direction: Direction, after: Any) -> None:
        self._stream = stream
        self._direction = direction
        if after is not None:
            stream.wait_event(after)

    def copy(self, target: Any, source: Any) -> None:
        """See Channel. It is asynchronous where the slab is pinned."""
        if self._direction == "offload":
            source.get(stream=self._stream, out=target, blocking=False)
        else:
            target.set(source, stream=self._stream)

    def finish(self) -> None:
        """See Channel."""
        self._stream.synchronize()


class FaultyChannel:
    """A channel with a fault in it; for tests.

    Args:
        channel: The sound one.
        fault: ``"fail"``, ``"short"`` or ``"corrupt"``.
        num_blocks: Blocks that will be copied; the fault strikes at the middle one.
    """

    def __init__(self, channel: Channel, fault: Fault, num_blocks: int) -> None:
        self.is_host = channel.is_host
        self._channel = channel
        self._fault = fault
        self._left = 0 if fault == "fail" else num_blocks // 2

    def copy(self, target: Any, source: Any) -> None:
        """See Channel."""
        at, self._left = self._left, self._left - len(target)
        if not 0 <= at < len(target):
            self._channel.copy(target, source)
        elif self._fault == "corrupt":
            damaged = source[at].copy()
            damaged[damaged.size // 2] ^= 1
            self._channel.copy(target, source)
            self._channel.copy(target[at], damaged)
            self._channel.finish()  # before what is damaged goes
        else:
            self._channel.copy(target[:at], source[:at])
            half = target.shape[1] // 2 if self._fault == "short" else 0
            self._channel.copy(target[at, :half], source[at, :half])
            raise OSError(f"the copy was made to {self._fault} for a test")

    def finish(self) -> None:
        """See Channel."""
        self._channel.finish()


class Transfer:
    """Carries out one batch.

    An offload takes the checksum of the device's bytes before it copies them. So a source that
    changes during the copy leaves a checksum that does not fit, and every load notices; a checksum
    of the slab's bytes would vouch for the mixture. On CUDA there is no such choice: the slab's
    bytes are summed, and the order of streams and events must see to it that nobody writes
    meanwhile. A source that is half written before and after alike, nobody can tell: pin it.

    A load compares the bytes that arrived; on CUDA, the slab's bytes after the copy.

    Generations are looked at before, so that what is stale is left alone, and again after. For a
    load that is enough. An offload may have written to a block that was reassigned in between: that
    is why the blocks of a batch under way are not handed out again.

    Args:
        slab: The host side.
        batch: What to copy.
        channel: How.
    """

    def __init__(self, slab: HostSlab, batch: CopyBatch, channel: Channel) -> None:
        self._slab = slab
        self._batch = batch
        self._channel = channel
        device = batch.memory.reshape(len(batch.memory), -1).view(np.uint8)
        if batch.direction == "offload":
            self._source, self._target = device, slab.blocks
            self._source_ids, self._target_ids = batch.device_ids, batch.slab_ids
        else:
            self._source, self._target = slab.blocks, device
            self._source_ids, self._target_ids = batch.slab_ids, batch.device_ids
        self._sums = np.full(len(batch), NO_CHECKSUM, np.uint64)

    def run(self) -> CopyResult:
        """Copy what is not stale already; never raises for what goes wrong with the copies."""
        batch, slab = self._batch, self._slab
        outcomes = np.full(len(batch), BlockOutcome.FAILED, np.uint8)
        fresh = self._is_current()
        outcomes[~fresh] = BlockOutcome.STALE
        chosen = np.flatnonzero(fresh)
        expected = slab.checksums[batch.slab_ids]
        if batch.direction == "offload":
            slab.checksums[batch.slab_ids[chosen]] = NO_CHECKSUM  # until the block is complete
        num_copied, error = self._copy(chosen)
        copied = chosen[:num_copied]
        outcomes[copied] = BlockOutcome.OK
        if batch.with_checksums and not self._channel.is_host:
            self._sums[copied] = block_checksums(slab.blocks[at] for at in batch.slab_ids[copied])
        if batch.direction == "load" and batch.with_checksums:
            wrong = (self._sums != expected) | (expected == NO_CHECKSUM)
            outcomes[copied[wrong[copied]]] = BlockOutcome.CORRUPT
        outcomes[chosen[~self._is_current()[chosen]]] = BlockOutcome.STALE
        if batch.direction == "offload" and batch.with_checksums:
            complete = np.flatnonzero(outcomes == BlockOutcome.OK)
            slab.checksums[batch.slab_ids[complete]] = self._sums[complete]
        return CopyResult(outcomes, error)

    def _is_current(self) -> NDArray[np.bool_]:
        current: NDArray[np.bool_] = (
            self._slab.generations[self._batch.slab_ids] == self._batch.generations
        )
        return current

    def _copy(self, chosen: NDArray[np.intp]) -> tuple[int, str | None]:
        """Copy these positions of the batch; returns how many were, and what stopped it."""
        num_copied = 0
        try:
            for run in self._runs(chosen):
                self._copy_run(run, chosen)
                num_copied = run.stop
        except Exception as error:  # noqa: BLE001 - whatever it is, the blocks are misses
            fault: str | None = f"{type(error).__name__}: {error}"
        else:
            fault = None
        try:
            self._channel.finish()
        except Exception as error:  # noqa: BLE001 - then no copy can be relied on
            return 0, f"{type(error).__name__}: {error}"
        return num_copied, fault

    def _copy_run(self, run: slice, chosen: NDArray[np.intp]) -> None:
        first = chosen[run.start]
        length = run.stop - run.start
        source = self._source[(at := self._source_ids[first]) : at + length]
        target = self._target[(at := self._target_ids[first]) : at + length]
        sums_here = self._batch.with_checksums and self._channel.is_host
        if sums_here and self._batch.direction == "offload":
            self._sums[first] = block_checksum(source)
        self._channel.copy(target, source)
        if sums_here and self._batch.direction == "load":
            self._sums[first] = block_checksum(target)

    def _runs(self, chosen: NDArray[np.intp]) -> Iterator[slice]:
        """Split positions so that each part is one stretch of memory on both sides.

        With checksums on the host, each block is a part: the processor's caches still hold what was
        summed or copied just before.
        """
        if self._batch.with_checksums and self._channel.is_host:
            for at in range(chosen.size):
                yield slice(at, at + 1)
            return
        source, target = self._source_ids[chosen], self._target_ids[chosen]
        breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
        edges = [0, *breaks.tolist(), chosen.size]
        for start, stop in pairwise(edges):
            if start < stop:
                yield slice(start, stop)
