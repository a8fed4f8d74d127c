"""Checkpoints of recurrent state, found by the prefix they were taken after (the seed's section 7).

A layer with recurrent state keeps one array per sequence, however long that is, so a prefix can be
reused only where its state was saved. This class keeps the books of the slots that such states lie
in; it never sees the states, and whoever copies them tells it when a copy is done.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from raykv.errors import ConfigError, DoubleFreeError, RequestError

from .blocks import Blocks
from .checked_prefix import CheckedPrefix, same_prefix
from .reservation import Reservation
from .state_slots import StateSlots

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .sequence import Sequence


class LinearStatePrefixCache:
    """Live slots for sequences, and checkpoints among the rest; one thread calls it.

    Slots are padding {0}, free, live (a running sequence's), pending (reserved for a checkpoint
    that is not written yet) or committed (a checkpoint; it can be matched). Committed ones are
    pinned while a handle references them, else they can be reclaimed: speculative ones that nobody
    has matched yet before the others, and of each kind the least recently used first. A live slot
    may take a checkpoint's place, a checkpoint never a live slot's.

    Where a ``prefix`` is passed, it is compared with the one that the hash was saved with: equal
    hashes of different prefixes are a miss, and counted (vLLM 54727). Whoever passes them to one
    call must pass them to all.

    Args:
        num_slots: slots, the padding slot included.

    Attributes:
        slots: the manager of the slots.
        num_committed_total: checkpoints that were committed or promoted.
        num_hits_total: matches.
        num_skipped_total: checkpoints that were not taken since no slot was to be had.
        num_coalesced_total: reservations that were refused since another one was pending.
        num_collisions_total: calls that found the hash taken by another prefix.

    Raises:
        ConfigError: fewer than two slots.
    """

    def __init__(self, num_slots: int) -> None:
        if not isinstance(num_slots, int) or not 2 <= num_slots < 1 << 31:
            raise ConfigError(
                f"num_slots is {num_slots!r}, but slot 0 is padding: linear_state.num_slots must "
                "be a whole number between 2 and 2**31 - 1"
            )
        self.slots = StateSlots(num_slots)
        self.num_committed_total = 0
        self.num_hits_total = 0
        self.num_skipped_total = 0
        self.num_coalesced_total = 0
        self.num_collisions_total = 0
        # For whoever explains a miss; bounded, oldest first.
        self._skipped: OrderedDict[bytes, None] = OrderedDict()
        self._max_skipped = max(64, num_slots)

    # -- live slots -----------------------------------------------------------------------------

    def acquire_live_slot(self) -> Blocks | None:
        """A slot for a running sequence; reclaims the least recently used checkpoint if need be.

        Note it as ``sequence.linear_state_slot``, and keep the handle or ``detach()`` it:
        ``release_live_slot`` and ``promote`` take either. Don't join it with others.

        Returns:
            A handle with one use; None if all slots are live, pending or pinned, and then nothing
            changed.
        """
        return self.slots.allocate(1)

    def acquire_live_slots(self, num_slots: int) -> Blocks | None:
        """The same for several at once, all or nothing."""
        return self.slots.allocate(num_slots)

    def release_live_slot(self, sequence: Sequence) -> None:
        """Take a sequence's live slot back, if it has one; the handle, if any, lets go of it.

        Raises:
            DoubleFreeError: the slot is not live; nothing changed.
        """
        slot = sequence.linear_state_slot
        if slot is None:
            return
        self.slots.settle()
        self.slots.give_back_live(slot)
        sequence.linear_state_slot = None

    # -- checkpoints ----------------------------------------------------------------------------

    def reserve_checkpoint(
        self,
        prefix_hash: bytes | None,
        *,
        prefix: CheckedPrefix | None = None,
        is_speculative: bool = False,
    ) -> Reservation | None:
        """Reserve a slot for a prefix's state, reclaiming the least recently used checkpoint.

        It cannot be matched before it is committed. Without a hash it is ``commit`` that names it:
        a slot for the state of a prefix that still grows.

        Args:
            prefix_hash: whose state it will hold; None if that is not known yet.
            prefix: what the hash stands for.
            is_speculative: nobody is known to come back for it, as for those at every so many
                tokens. Until somebody does, it is reclaimed before all that are not; else a long
                prompt would push out the ends of many conversations. One that exists is
                speculative no more if it is asked for as one that is not.

        Returns:
            A reservation, ``existing`` where the prefix has a checkpoint already. None where one is
            pending already, where the hash is another prefix's, and where all slots are live,
            pending or pinned; each is counted apart.
        """
        slots = self.slots
        slots.settle()
        if prefix_hash is None:
            return self._reserve_unnamed()
        known = slots.committed.get(prefix_hash)
        if known is not None:
            if not self._check(known, prefix):
                return None
            if not is_speculative:
                slots.prove(known)
            return Reservation(slots, known, existing=True)
        claim = slots.claims.get(prefix_hash)
        if claim is not None:
            if self._check(claim, prefix):
                self.num_coalesced_total += 1
            return None
        claim = slots.reserve(prefix_hash, prefix, is_speculative=is_speculative)
        if claim is None:
            self._skip(prefix_hash)
            return None
        return Reservation(slots, claim, existing=False)

    def commit(
        self,
        reservation: Reservation,
        prefix_hash: bytes | None = None,
        *,
        prefix: CheckedPrefix | None = None,
    ) -> int:
        """Let a prefix's state be matched: it is written to the reserved slot.

        Args:
            reservation: of the slot.
            prefix_hash: whose state it is; None for what it was reserved for.
            prefix: what that hash stands for.

        The checkpoint is unpinned, and the most recently used one. Where another one of the prefix
        was promoted meanwhile, that one stays, and the reserved slot comes back.

        Returns:
            The slot that holds the state; 0 if none does: the cache was cleared after the
            reservation, an existing checkpoint was reclaimed, or the hash is another prefix's.

        Raises:
            DoubleFreeError: it was committed or released before.
            ValueError: it is another cache's, or has no name.
        """
        slots = self.slots
        if not reservation.is_of(slots):
            raise ValueError(f"{reservation!r} belongs to another cache")
        if reservation.is_done:
            raise DoubleFreeError(
                f"{reservation!r} was committed or released before: commit each once, when its "
                "state is written"
            )
        slots.settle()
        claim = reservation.claim
        if prefix_hash is not None:
            name = slots.named(claim, prefix_hash, prefix)
        elif claim.is_unnamed:
            raise ValueError(f"{reservation!r} was made without a name: pass the prefix's hash")
        else:
            name = claim
        known = slots.committed.get(name.prefix_hash)
        is_valid = reservation.existing or slots.claims.get(claim.prefix_hash) is claim
        if is_valid and known is None and not reservation.existing:
            reservation.is_done = True
            slots.commit(claim, name)
            self._count_committed(name.prefix_hash)
            return claim.slot
        slot = 0
        if is_valid and known is not None and self._check(known, name.prefix):
            slots.refresh(known)
            slot = known.slot
        reservation.release()
        return slot

    def match(self, prefix_hash: bytes, *, prefix: CheckedPrefix | None = None) -> Blocks | None:
        """Pin a prefix's checkpoint as long as the handle lives.

        Released, it is the most recently used one.

        Returns:
            A handle with a reference that is no use; None where there is no checkpoint of it.
        """
        self.slots.settle()
        known = self.slots.committed.get(prefix_hash)
        if known is None or not self._check(known, prefix):
            return None
        self.num_hits_total += 1
        return self.slots.hold(known)

    def contains(self, prefix_hash: bytes) -> bool:
        """Whether the hash has a checkpoint; changes nothing."""
        return prefix_hash in self.slots.committed

    def verify(self, prefix_hash: bytes, prefix: CheckedPrefix | None) -> bool:
        """Whether ``match`` would find the prefix's checkpoint; changes and counts nothing."""
        known = self.slots.committed.get(prefix_hash)
        return known is not None and same_prefix(known.prefix, prefix)

    def can_reclaim(self, prefix_hash: bytes) -> bool:
        """Whether it has a checkpoint that nobody pins; changes nothing."""
        known = self.slots.committed.get(prefix_hash)
        return known is not None and self.slots.is_reclaimable(known)

    def was_skipped(self, prefix_hash: bytes) -> bool:
        """Whether a checkpoint of it was lately not taken since no slot was to be had."""
        return prefix_hash in self._skipped

    def promote(
        self,
        sequence: Sequence,
        prefix_hash: bytes,
        *,
        final: bool = False,
        prefix: CheckedPrefix | None = None,
    ) -> Blocks | None:
        """Let a sequence's live slot become the checkpoint, without a copy.

        Where the prefix has a checkpoint already, that one stays, and so does the live slot unless
        it is final. Where one is pending, this one comes first.

        Args:
            sequence: whose slot it is; the slot's handle, if any, is kept in step with it.
            prefix_hash: names exactly the tokens whose state the slot holds.
            final: the sequence needs no slot any more: it has none afterwards, whatever is
                returned. Otherwise it gets another live slot, to be filled from the checkpoint; it
                may take the place of the least recently used one.
            prefix: what the hash stands for.

        Returns:
            A pin of the checkpoint, to be kept until it is copied. None where the hash is another
            prefix's, and where no other live slot is to be had; then, unless it is final, nothing
            changed.

        Raises:
            RequestError: the sequence has no live slot of this cache, or others use it as well.
        """
        slots = self.slots
        slots.settle()
        live = self._live_slot(sequence)
        known = slots.committed.get(prefix_hash)
        there = slots.claims.get(prefix_hash) if known is None else known
        if there is not None and not self._check(there, prefix):
            if final:
                self.release_live_slot(sequence)
            return None
        if known is not None:
            pin = slots.hold(known)
            if final:
                self.release_live_slot(sequence)
            return pin
        fresh = None
        if not final:
            fresh = slots.take_live()
            if fresh is None:
                self._skip(prefix_hash)
                return None
        pin = slots.promote(live, prefix_hash, prefix, fresh)
        sequence.linear_state_slot = fresh
        self._count_committed(prefix_hash)
        return pin

    def clear(self) -> int:
        """Forget all checkpoints, and what pending reservations were to become.

        Slots of pinned checkpoints and of reservations come back when those are let go. Whoever
        computed a state before must not save it afterwards; only its sequence tells.

        Returns:
            How many checkpoints were forgotten.
        """
        self.slots.settle()
        self._skipped.clear()
        return self.slots.forget_all()

    def retire(self, weights_version: int) -> int:
        """Reclaim the checkpoints of this version of the weights before all others, for good.

        They can be matched while they last; those that were saved without prefix have no version.

        Returns:
            How many of them can be reclaimed now.
        """
        return self.slots.retire(weights_version)

    # -- counters -------------------------------------------------------------------------------

    @property
    def num_total_slots(self) -> int:
        """Slots that can be handed out: all but the padding slot 0."""
        return self.slots.num_total_blocks

    @property
    def num_free_slots(self) -> int:
        """Slots that hold nothing."""
        return self.slots.num_free_blocks

    @property
    def num_live_slots(self) -> int:
        """Slots of running sequences."""
        return self.slots.num_used_blocks

    @property
    def num_pending(self) -> int:
        """Slots that are reserved, and neither committed nor given back."""
        return self.slots.num_pending

    @property
    def num_checkpoints(self) -> int:
        """Slots that can be matched."""
        return self.slots.num_blocks_in_prefix_cache

    @property
    def num_reclaimable(self) -> int:
        """Checkpoints that nobody pins."""
        return self.slots.num_evictable_blocks

    @property
    def num_lingering_slots(self) -> int:
        """Slots that only pins keep: of a forgotten checkpoint, or of a sequence that is done."""
        given = self.num_free_slots + self.num_live_slots + self.num_pending + self.num_checkpoints
        return self.num_total_slots - given

    @property
    def num_reclaimed_total(self) -> int:
        """Checkpoints that were given up for others since the start."""
        return self.slots.num_reclaimed

    def check_integrity(self) -> None:
        """Recompute all books from scratch.

        Raises:
            IntegrityError: something disagrees.
        """
        self.slots.check_integrity()

    # -- inside ---------------------------------------------------------------------------------

    def _reserve_unnamed(self) -> Reservation | None:
        unnamed = self.slots.reserve_unnamed()
        if unnamed is None:
            self.num_skipped_total += 1
            return None
        return Reservation(self.slots, unnamed, existing=False)

    def _live_slot(self, sequence: Sequence) -> int:
        slot = sequence.linear_state_slot
        num_uses = 0 if slot is None else self.slots.num_uses(slot)
        if slot is None or num_uses != 1:
            raise RequestError(
                f"{sequence!r} has linear-state slot {slot}, which {num_uses} sequences use: only "
                "a live slot that is its own can become a checkpoint"
            )
        return slot

    def _check(self, known: Checkpoint, prefix: CheckedPrefix | None) -> bool:
        if prefix is None or same_prefix(known.prefix, prefix):
            return True
        self.num_collisions_total += 1
        return False

    def _skip(self, prefix_hash: bytes) -> None:
        self.num_skipped_total += 1
        self._skipped[prefix_hash] = None
        self._skipped.move_to_end(prefix_hash)
        if len(self._skipped) > self._max_skipped:
            self._skipped.popitem(last=False)

    def _count_committed(self, prefix_hash: bytes) -> None:
        self.num_committed_total += 1
        if self._skipped:
            self._skipped.pop(prefix_hash, None)
