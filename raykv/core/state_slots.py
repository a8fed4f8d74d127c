"""Who holds each slot of recurrent state, which checkpoints there are, and which goes first."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING

from raykv.errors import DoubleFreeError, IntegrityError

from .blocks import Blocks
from .checkpoint import UNNAMED, Checkpoint
from .ledger import REF, USE
from .single import SingleBlockManager
from .tokens import NO_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .checked_prefix import CheckedPrefix
    from .tokens import BlockIds, Index


class StateSlots(SingleBlockManager):
    """Slots by what they are for: padding {0}, free, live, pending, committed or lingering.

    - live: a running sequence's; one or more uses.
    - pending: reserved for a checkpoint that is not written yet; one reference.
    - committed: a checkpoint. Pinned while handles reference it, else reclaimable: first those of
      retired versions, then speculative ones that nobody has held yet, then the others.
    - lingering: neither of these, but a pin remains of what it was.

    The states partition the slots. A slot whose last handle goes is reclaimable if it is committed,
    else free.

    Attributes:
        committed: the checkpoints that can be matched, by prefix hash.
        claims: the reservations whose commit will be matched, by prefix hash.
        num_reclaimed: checkpoints that were given up for others since the start.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, resource_name="linear-state slot")
        self.committed: dict[bytes, Checkpoint] = {}
        self.claims: dict[bytes, Checkpoint] = {}
        self.num_reclaimed = 0
        self._checkpoints: dict[int, Checkpoint] = {}  # committed, by slot
        self._reserved: dict[int, Checkpoint] = {}  # pending, by slot; those without claim, too
        # Reclaimable slots, least recently used first. Ordered dicts, since a plain one takes ever
        # longer to find its first entry as old ones are deleted.
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._retired: OrderedDict[int, None] = OrderedDict()
        self._retired_versions: set[int] = set()
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._unproven: set[int] = set()  # committed, speculative, and not held since
        self._num_unnamed = 0
        # The handles that a live slot was given out in. Weak: one that nobody keeps gives its slot
        # back.
        self._handles: dict[int, tuple[weakref.ref[Blocks], ...]] = {}

    # -- live slots -----------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> Blocks | None:
        """Take live slots, reclaiming as many checkpoints as are missing; see BlockManager."""
        blocks = super().allocate(num_blocks)
        if blocks is not None:
            self._remember(blocks)
        return blocks

    def adopt(self, block_ids: Iterable[int] | BlockIds | Index) -> Blocks:
        """See BlockManager."""
        blocks = super().adopt(block_ids)
        self._remember(blocks)
        return blocks

    def make_handle(self, ids: Index, weight: int, *, unique: bool = True) -> Blocks:
        """One more handle of slots that are held by one already."""
        blocks = super().make_handle(ids, weight, unique=unique)
        if weight >= USE:
            self._remember(blocks)
        return blocks

    def num_uses(self, slot: int) -> int:
        """Handles, or detached handles, for which a slot is live; 0 for what is no slot."""
        if not 0 < slot < len(self._every_id):
            return 0
        return max(self._ledger.count_of(slot), 0) // USE

    def give_back_live(self, slot: int) -> None:
        """Drop the use that ``allocate`` gave of a live slot, in its handle or detached.

        Raises:
            DoubleFreeError: the slot is not live; nothing changed.
        """
        if not self.num_uses(slot):
            raise DoubleFreeError(
                f"linear-state slot {slot} is not live, so it cannot be given back: give each slot "
                "back once, and keep its handle or detach() it until then"
            )
        holder = self._holder(slot)
        if holder is not None:
            holder.replace(slot, NO_INDEX)
        if self._ledger.subtract_one(slot, USE + REF):
            self._let_go(slot)

    # -- checkpoints ----------------------------------------------------------------------------

    def reserve(
        self, prefix_hash: bytes, prefix: CheckedPrefix | None, *, is_speculative: bool = False
    ) -> Checkpoint | None:
        """Make a slot pending, with a claim on the hash, which must be unclaimed.

        Returns:
            What it will be; the caller owes its only reference. None without a slot to be had.
        """
        if not self._has_room():
            return None
        slot = self._ledger.take_one(REF)
        claim = Checkpoint(prefix_hash, slot, self.index_of(slot), prefix, is_speculative)
        self._reserved[slot] = self.claims[prefix_hash] = claim
        return claim

    def reserve_unnamed(self) -> Checkpoint | None:
        """The same for a prefix that is to be named when it is committed."""
        self._num_unnamed += 1
        return self.reserve(UNNAMED + b"%d" % self._num_unnamed, None)

    def named(
        self, claim: Checkpoint, prefix_hash: bytes, prefix: CheckedPrefix | None
    ) -> Checkpoint:
        """What a pending slot is under this name."""
        return Checkpoint(prefix_hash, claim.slot, claim.index, prefix, claim.is_speculative)

    def commit(self, claim: Checkpoint, name: Checkpoint) -> None:
        """Let a pending slot be matched under a name, whose hash must not be committed.

        Takes the reservation's reference.
        """
        slot = claim.slot
        del self.claims[claim.prefix_hash], self._reserved[slot]
        self.committed[name.prefix_hash] = self._checkpoints[slot] = name
        if name.is_speculative:
            self._unproven.add(slot)
        if self._ledger.subtract_one(slot, REF):
            self._queue(name)[slot] = None

    def promote(
        self, live: int, prefix_hash: bytes, prefix: CheckedPrefix | None, fresh: int | None
    ) -> Blocks:
        """Make a live slot with one use a checkpoint of a hash that is not committed.

        Args:
            live: the slot.
            prefix_hash: whose state it holds.
            prefix: what the hash stands for.
            fresh: the live slot that the handle, if any, lists in its place.

        Returns:
            A pin of the checkpoint.
        """
        holder = self._holder(live)
        if holder is not None:
            holder.replace(live, NO_INDEX if fresh is None else self.index_of(fresh))
            if fresh is not None:
                self._handles[fresh] = (weakref.ref(holder),)
        self._handles.pop(live, None)
        self._ledger.subtract_one(live, USE)
        checkpoint = Checkpoint(prefix_hash, live, self.index_of(live), prefix)
        self.committed[prefix_hash] = self._checkpoints[live] = checkpoint
        return Blocks(self, checkpoint.index, REF)

    def take_live(self) -> int | None:
        """Take one live slot without a handle."""
        return self._ledger.take_one(USE + REF) if self._has_room() else None

    def hold(self, checkpoint: Checkpoint) -> Blocks:
        """A pin of a committed checkpoint."""
        slot = checkpoint.slot
        if not self._ledger.count_of(slot):
            del self._queue(checkpoint)[slot]
        self._unproven.discard(slot)
        self._ledger.add_one(slot, REF)
        return Blocks(self, checkpoint.index, REF)

    def prove(self, checkpoint: Checkpoint) -> None:
        """A committed checkpoint is speculative no more."""
        slot = checkpoint.slot
        if slot in self._unproven:
            is_idle = self._queue(checkpoint).pop(slot, self) is None
            self._unproven.remove(slot)
            if is_idle:
                self._queue(checkpoint)[slot] = None

    def refresh(self, checkpoint: Checkpoint) -> None:
        """Make a committed checkpoint the most recently used one."""
        queue = self._queue(checkpoint)
        if checkpoint.slot in queue:
            queue.move_to_end(checkpoint.slot)

    def is_reclaimable(self, checkpoint: Checkpoint) -> bool:
        """Whether nobody pins a committed checkpoint."""
        return checkpoint.slot in self._queue(checkpoint)

    def is_unproven(self, checkpoint: Checkpoint) -> bool:
        """Whether a committed checkpoint is speculative, and nobody has matched it yet."""
        return checkpoint.slot in self._unproven

    def void(self, claim: Checkpoint) -> None:
        """Let a pending slot come to nothing, but not back; others may claim its hash."""
        if self.claims.get(claim.prefix_hash) is claim:
            del self.claims[claim.prefix_hash]

    def forget(self, checkpoint: Checkpoint) -> None:
        """Let a committed checkpoint never be matched again; its slot comes back with its pins."""
        slot = checkpoint.slot
        is_idle = self._queue(checkpoint).pop(slot, self) is None
        del self.committed[checkpoint.prefix_hash], self._checkpoints[slot]
        self._unproven.discard(slot)
        if is_idle:
            self._ledger.give_back_one(slot)

    def forget_all(self) -> int:
        """Let nothing that is committed or pending now be matched again; return how many were.

        Pending ones do not count. Slots that somebody holds come back when they are let go.
        """
        num_forgotten = len(self._checkpoints)
        queues = (self._retired, self._spare, self._recent)
        for slot in chain(*queues):
            self._ledger.give_back_one(slot)
        for each in (self.committed, self.claims, self._checkpoints, self._unproven, *queues):
            each.clear()
        return num_forgotten

    # -- counters -------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Slots that are reserved, with a claim or without."""
        self._settle_dropped()
        return len(self._reserved)

    @property
    def num_evictable_blocks(self) -> int:
        """Committed slots that nobody pins."""
        self._settle_dropped()
        return self._num_idle

    @property
    def num_blocks_in_prefix_cache(self) -> int:
        """Committed slots."""
        return len(self._checkpoints)

    @property
    def num_evicted_blocks(self) -> int:
        """Checkpoints that were given up for others since the start."""
        return self.num_reclaimed

    def hash_of(self, block_id: int) -> bytes | None:
        """The prefix hash of a committed slot, else None."""
        found = self._checkpoints.get(block_id)
        return None if found is None else found.prefix_hash

    def retire(self, weights_version: int) -> int:
        """See BlockManager."""
        self._settle_dropped()
        self._retired_versions.add(weights_version)
        for queue in (self._spare, self._recent):
            for slot in [*queue]:
                if self._queue(self._checkpoints[slot]) is self._retired:
                    del queue[slot]
                    self._retired[slot] = None
        return sum(_version(self._checkpoints[slot]) == weights_version for slot in self._retired)

    def reset_prefix_cache(self) -> int:
        """See BlockManager."""
        self._settle_dropped()
        return self.forget_all()

    def settle(self) -> None:
        """Take what garbage collection dropped off the books."""
        if self.dropped:
            self._settle_dropped()

    def check_integrity(self) -> None:
        """See BlockManager."""
        super().check_integrity()
        counts = dict(enumerate(self._ledger.counts.tolist()))
        committed, reserved = self._checkpoints, self._reserved
        _require(
            committed == {each.slot: each for each in self.committed.values()}
            and all(name == each.prefix_hash for name, each in self.committed.items()),
            "committed slots and prefix hashes disagree",
        )
        _require(
            all(reserved.get(each.slot) is each for each in self.claims.values())
            and all(name == each.prefix_hash for name, each in self.claims.items())
            and all(slot == each.slot for slot, each in reserved.items()),
            "a claim is not that of a pending slot",
        )
        _require(not committed.keys() & reserved.keys(), "a slot is both committed and pending")
        _require(
            all(0 <= counts[slot] < USE for slot in committed)
            and all(0 < counts[slot] < USE for slot in reserved),
            "a committed or pending slot is free, padding or live, or a pending one is nobody's",
        )
        idle = {slot for slot, count in counts.items() if count == 0}
        queues = (self._retired, self._spare, self._recent)
        _require(
            sorted(idle) == sorted(chain(*queues)) and idle <= committed.keys(),
            "the reclaimable slots are not the committed ones that nobody holds",
        )
        _require(
            all(self._queue(committed[slot]) is queue for queue in queues for slot in queue),
            "a checkpoint stands in the wrong queue",
        )
        _require(
            all(slot in committed and committed[slot].is_speculative for slot in self._unproven),
            "a checkpoint that is not speculative is kept as one",
        )
        _require(
            all(counts[slot] > 0 and slot not in committed for slot in self._handles),
            "a slot that is not live is remembered with its handle",
        )

    # -- inside ---------------------------------------------------------------------------------

    def _remember(self, blocks: Blocks) -> None:
        reference = weakref.ref(blocks)
        for slot in blocks.index.tolist():
            self._handles[slot] = (*self._handles.get(slot, ()), reference)

    def _holder(self, slot: int) -> Blocks | None:
        """The handle that holds a use of a live slot; None where one was detached."""
        holders = []
        for reference in self._handles.get(slot, ()):
            handle = reference()
            if handle is not None and handle.is_use and slot in handle.index.tolist():
                holders.append(handle)
        return holders[0] if holders and len(holders) >= self.num_uses(slot) else None

    def _queue(self, checkpoint: Checkpoint) -> OrderedDict[int, None]:
        if self._retired_versions and _version(checkpoint) in self._retired_versions:
            return self._retired
        return self._spare if checkpoint.slot in self._unproven else self._recent

    @property
    def _num_idle(self) -> int:
        return len(self._recent) + len(self._spare) + len(self._retired)

    def _has_room(self) -> bool:
        return self._ledger.num_free > 0 or self._make_room(1)

    def _make_room(self, num_blocks: int) -> bool:
        short = num_blocks - self._ledger.num_free
        if short > self._num_idle:
            return False
        for _ in range(short):
            slot, _ = (self._retired or self._spare or self._recent).popitem(last=False)
            self._unproven.discard(slot)
            del self.committed[self._checkpoints.pop(slot).prefix_hash]
            self._ledger.give_back_one(slot)
            self.num_reclaimed += 1
        return True

    def _let_go(self, slot: int) -> None:
        checkpoint = self._checkpoints.get(slot)
        if checkpoint is not None:
            self._queue(checkpoint)[slot] = None
            return
        self._handles.pop(slot, None)
        if self._reserved:
            dropped = self._reserved.pop(slot, None)
            if dropped is not None and self.claims.get(dropped.prefix_hash) is dropped:
                del self.claims[dropped.prefix_hash]
        self._ledger.give_back_one(slot)

    def _check_returnable(self, ids: Index) -> None:
        for slot in ids.tolist():
            if slot in self._checkpoints:
                raise DoubleFreeError(
                    f"linear-state slot {slot} holds a checkpoint: it is reclaimed when needed, "
                    "and must not be freed"
                )


def _version(checkpoint: Checkpoint) -> int | None:
    return None if checkpoint.prefix is None else checkpoint.prefix.namespace.weights_version


def _require(is_so: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not is_so:
        raise IntegrityError(otherwise)
