"""What a BlockCopier is given and what it answers: batches, outcomes, tickets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from raykv.memory.ids import Ids, checked_ids, checked_targets

Direction = Literal["offload", "load"]
Fault = Literal["fail", "short", "late", "corrupt"]


class BlockOutcome(IntEnum):
    """What became of one block of a batch; all but OK are misses."""

    OK = 0
    STALE = 1
    """The host block was reassigned: its generation is not the batch's."""
    CORRUPT = 2
    """Its checksum is not that of what was copied: an incident to be counted."""
    FAILED = 3
    """It was not copied, or not as a whole; see ``CopyResult.error``."""
    CANCELLED = 4
    """The batch was cancelled before it started."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Blocks to copy between a device's memory and the host slab.

    All blocks named, on both sides, must stay referenced until the ticket is done.

    Attributes:
        direction: ``"offload"`` copies device rows to slab blocks, ``"load"`` slab blocks to
            device rows.
        memory: The device's contiguous array ``[rows, ...]``, such as ``KVBuffers.storage``; a row
            has the bytes of a slab block.
        device_ids: int64 ``[n]``, rows of ``memory``.
        slab_ids: int64 ``[n]``, blocks of the slab, each paired with a row.
        generations: uint64 ``[n]``, of the slab blocks when they were given to the batch.
        with_checksums: Offloads leave the blocks' checksums in the slab, loads compare them.
        after: On CUDA, an event that the copy waits for: for an offload, one that was recorded
            behind the last write of the blocks. None elsewhere.
    """

    direction: Direction
    memory: Any
    device_ids: NDArray[np.int64]
    slab_ids: NDArray[np.int64]
    generations: NDArray[np.uint64]
    with_checksums: bool = True
    after: Any = None

    @classmethod
    def checked(
        cls,
        direction: Direction,
        memory: Any,
        device_ids: Ids,
        slab_ids: Ids,
        generations: NDArray[np.uint64],
        *,
        num_slab_blocks: int,
        with_checksums: bool = True,
        after: Any = None,
    ) -> CopyBatch:
        """Make a batch of ids that come from outside; see the attributes.

        Raises:
            ValueError: The direction is unknown, an id is out of range, the lengths differ, or a
                target is padding or repeated.
        """
        if direction not in {"offload", "load"}:
            raise ValueError(f"direction is {direction!r}, not offload or load")
        is_load = direction == "load"
        rows = (checked_targets if is_load else checked_ids)(device_ids, len(memory), "device_ids")
        blocks = (checked_ids if is_load else checked_targets)(
            slab_ids, num_slab_blocks, "slab_ids"
        )
        expected = np.array(generations, np.uint64)
        if not rows.size == blocks.size == expected.size:
            raise ValueError(
                f"{rows.size} device_ids, {blocks.size} slab_ids and {expected.size} generations"
                " do not pair"
            )
        # Copies: the caller may reuse its arrays while the batch waits.
        return cls(direction, memory, rows.copy(), blocks.copy(), expected, with_checksums, after)

    def __len__(self) -> int:
        """Blocks of the batch."""
        return self.device_ids.size


@dataclass(frozen=True, slots=True, eq=False)
class CopyResult:
    """What became of a batch.

    Attributes:
        outcomes: uint8 ``[n]``, a ``BlockOutcome`` per block.
        error: Why blocks failed, for people; None if none did.
    """

    outcomes: NDArray[np.uint8]
    error: str | None = None

    @property
    def is_ok(self) -> NDArray[np.bool_]:
        """Which blocks hold what they should."""
        ok: NDArray[np.bool_] = self.outcomes == BlockOutcome.OK
        return ok

    def count(self, outcome: BlockOutcome) -> int:
        """Blocks that came to this."""
        return int((self.outcomes == outcome).sum())

    @classmethod
    def all_of(cls, batch: CopyBatch, outcome: BlockOutcome, error: str | None) -> CopyResult:
        """The same for each block."""
        return cls(np.full(len(batch), outcome, np.uint8), error)


class Ticket:
    """A batch on its way.

    It keeps the batch's memory alive: drop it when its result was read.

    Attributes:
        batch: What was submitted.
    """

    def __init__(self, batch: CopyBatch, cancel: Callable[[Ticket], bool]) -> None:
        self.batch = batch
        self._cancel = cancel
        self._done = threading.Event()
        self._result: CopyResult | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing touches the blocks any more on behalf of this batch."""
        return self._done.is_set()

    @property
    def result(self) -> CopyResult | None:
        """What became of it; None until it is done."""
        return self._result

    def wait(self, timeout_s: float | None = None) -> CopyResult | None:
        """Wait until it is done.

        Args:
            timeout_s: Seconds to wait at most.

        Returns:
            The result; None if the time ran out. The batch then still may touch its blocks.
        """
        self._done.wait(timeout_s)
        return self._result

    def cancel(self) -> bool:
        """Call the batch off if it has not started; whether that was so.

        If so it is done, and its blocks were not touched.
        """
        return self._cancel(self)

    def finish(self, result: CopyResult) -> None:
        """For the copier: it is done."""
        assert self._result is None, "a batch is finished once"
        self._result = result
        self._done.set()


class CopyFaults(Protocol):
    """What goes wrong on purpose, in tests."""

    def on_copy(self, batch: CopyBatch) -> Fault | None:
        """What shall happen to this batch, on the copier's thread.

        ``"fail"``: the copy raises before anything is copied. ``"short"``: it raises in the middle.
        ``"corrupt"``: a byte arrives changed, and nobody says so. ``"late"``: it is carried out
        only after the batch that starts next, after half a second, or when the copier is closed.
        """
        ...
