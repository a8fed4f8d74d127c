"""Slots of recurrent state that are set aside for a checkpoint."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .ledger import REF
from .state_slots import StateSlots


class Reservation:
    """A slot for a checkpoint that is not written yet, or word that there is one already.

    One that is garbage-collected is released at the cache's next operation.

    Attributes:
        claim: the checkpoint that it is to become, or that is there.
        existing: whether the prefix has a checkpoint already. Then nothing was taken, and nothing
            is to be written.
        is_done: whether it was committed or released, so that its slot is no longer its own.
    """

    __slots__ = ("__weakref__", "_slots", "claim", "existing", "is_done")

    def __init__(self, slots: StateSlots, claim: Checkpoint, *, existing: bool) -> None:
        self._slots = slots
        self.claim = claim
        self.existing = existing
        self.is_done = False

    @property
    def prefix_hash(self) -> bytes:
        """Whose state it will hold."""
        return self.claim.prefix_hash

    @property
    def slot(self) -> int:
        """The slot to write to; where it is existing, the one that holds the state."""
        return self.claim.slot

    def is_of(self, slots: StateSlots) -> bool:
        """Whether the slot is one of these."""
        return self._slots is slots

    def void(self) -> None:
        """Let it come to nothing, but keep its slot: somebody may still write to it.

        Others may reserve for the prefix. ``commit`` then only gives the slot back.
        """
        if not self.is_done and not self.existing:
            self._slots.void(self.claim)

    def release(self) -> None:
        """Give the slot back, unless it was committed; idempotent."""
        if not self.is_done:
            self.is_done = True
            if not self.existing:
                self._slots.drop(self.claim.index, REF, unique=True)

    def __del__(self) -> None:
        # As for blocks: collection can strike in the middle of an update, so only leave a note.
        if not getattr(self, "is_done", True) and not self.existing:
            self._slots.dropped.append((self.claim.index, REF, True))

    def __repr__(self) -> str:
        kind = "existing" if self.existing else "done" if self.is_done else "pending"
        return f"<Reservation {kind} slot {self.slot} of {self.prefix_hash.hex()}>"
