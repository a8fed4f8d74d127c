"""Slots of recurrent state that are set aside for a checkpoint."""

from __future__ import annotations

from .blocks import Blocks
from .state_slots import Checkpoint, StateSlots


class Reservation:
    """A slot for a checkpoint that is not written yet, or word that there is one already.

    One that is garbage-collected is released at the cache's next operation.

    Attributes:
        prefix_hash: whose state it will hold.
        slot: the slot to write to; where it is existing, the one that holds the state.
        existing: whether the prefix has a checkpoint already. Then nothing was taken, and nothing
            is to be written.
    """

    __slots__ = ("_blocks", "_slots", "claim", "existing", "is_done")

    def __init__(self, slots: StateSlots, claim: Checkpoint, blocks: Blocks | None) -> None:
        self.claim = claim
        self.existing = blocks is None
        self.is_done = False
        self._slots = slots
        self._blocks = blocks

    @property
    def prefix_hash(self) -> bytes:
        """Whose state it will hold."""
        return self.claim.prefix_hash

    @property
    def slot(self) -> int:
        """The slot to write to, or that is written."""
        return self.claim.slot

    def is_of(self, slots: StateSlots) -> bool:
        """Whether the slot is one of these."""
        return self._slots is slots

    def release(self) -> None:
        """Give the slot back, unless it was committed; idempotent."""
        self.is_done = True
        if self._blocks is not None:
            self._blocks.release()

    def __repr__(self) -> str:
        kind = "existing" if self.existing else "done" if self.is_done else "pending"
        return f"<Reservation {kind} slot {self.slot} of {self.prefix_hash.hex()}>"
