"""The books of one manager: who holds each block, and which ids are free.

Per block id one int64 holds three counters, so that one gather and one scatter update them all:

- bits 0-20: handles that reference the block (``REF``);
- bits 21-41: runs of the prefix cache hanging below it that are in use (``PIN``, see prefix_cache);
- bits 42-62: handles for which the block counts as used (``USE``).

Ids on the free list hold ``FREE``, the padding block 0 holds ``PADDING``; both are negative.
"""

import numpy as np
from numpy.typing import NDArray

from raykv.errors import ConfigError, DoubleFreeError, IntegrityError

from .tokens import NO_INDEX, Index

REF = 1
PIN = 1 << 21
USE = 1 << 42
REF_MASK = PIN - 1
PIN_MASK = USE - PIN
FREE = -1
PADDING = -2
_TAKEN = np.array(USE + REF)  # NumPy takes this faster than a number


class Ledger:
    """Reference counts and the free list of block ids 1..num_blocks-1.

    Attributes:
        counts: int64 [num_blocks], see the module.
        num_free: ids on the free list.
        num_used: ids with at least one use.
    """

    def __init__(self, num_blocks: int) -> None:
        if not isinstance(num_blocks, int) or not 2 <= num_blocks < 1 << 31:
            raise ConfigError(
                f"num_blocks is {num_blocks!r}, but block 0 is padding: it must be a whole number "
                "between 2 and 2**31 - 1"
            )
        self.counts = np.full(num_blocks, FREE, np.int64)
        self.counts[0] = PADDING
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int64)  # top of stack is the end
        self._cells = self.counts.data  # an array itself takes twice as long for a single number
        self.num_free = num_blocks - 1
        self.num_used = 0

    @property
    def num_total(self) -> int:
        """Ids that can be handed out."""
        return len(self._stack)

    def take(self, num_blocks: int) -> Index:
        """Pop ids off the free list, each with one reference and one use."""
        stop = self.num_free
        self.num_free = stop - num_blocks
        self.num_used += num_blocks
        ids = self._stack[self.num_free : stop][::-1].copy()
        self.counts[ids] = _TAKEN
        return ids

    def add(self, ids: Index, weight: int, *, unique: bool = True) -> None:
        """Add ``REF`` or ``USE + REF`` to each id; ids may repeat unless ``unique``."""
        total: int | NDArray[np.int64] = weight
        if not unique:
            ids, times = np.unique(ids, return_counts=True)
            total = weight * times
        old = self.counts[ids]
        self.counts[ids] = old + total
        if weight >= USE:
            self.num_used += _count(old < USE)

    def subtract(self, ids: Index, weight: int, *, unique: bool = True) -> Index:
        """Take ``REF``, ``USE`` or both from each id; return those left without reference."""
        total: int | NDArray[np.int64] = weight
        if not unique:
            ids, times = np.unique(ids, return_counts=True)
            total = weight * times
        new = self.counts[ids] - total
        self.counts[ids] = new
        if weight >= USE:
            self.num_used -= _count(new < USE)
        if weight == USE or not len(ids):
            return NO_INDEX
        unreferenced = (new & REF_MASK) == 0
        return ids if unreferenced[unreferenced.argmin()] else ids[unreferenced]

    def give_back(self, ids: Index) -> None:
        """Put unreferenced ids on the free list; the next ``take`` returns them in this order."""
        self.counts[ids] = FREE
        start = self.num_free
        self.num_free = start + len(ids)
        self._stack[start : self.num_free] = ids[::-1]

    # The same for a single id: NumPy's fixed costs are several times those of the work.

    def take_one(self, weight: int) -> int:
        """Pop one id off the free list, which must hold one, with ``REF`` or ``USE + REF``."""
        self.num_free -= 1
        self.num_used += weight >= USE
        block_id: int = self._stack.item(self.num_free)
        self._cells[block_id] = weight
        return block_id

    def count_of(self, block_id: int) -> int:
        """The three counters of one id."""
        return self._cells[block_id]

    def add_one(self, block_id: int, weight: int) -> None:
        """Add ``REF`` or ``USE + REF``."""
        old = self._cells[block_id]
        self._cells[block_id] = old + weight
        self.num_used += old < USE <= weight

    def subtract_one(self, block_id: int, weight: int) -> bool:
        """Take ``REF``, ``USE`` or both; return whether no reference is left."""
        new = self._cells[block_id] - weight
        self._cells[block_id] = new
        self.num_used -= new < USE <= weight
        return not new & REF_MASK

    def give_back_one(self, block_id: int) -> None:
        """Put one unreferenced id on the free list."""
        self._cells[block_id] = FREE
        self._stack[self.num_free] = block_id
        self.num_free += 1

    def check_returnable(self, ids: Index) -> None:
        """Raise unless each id is allocated and held by nobody.

        Raises:
            ValueError: an id is padding or outside the pool.
            DoubleFreeError: an id is on the free list, still referenced, or listed twice.
        """
        outside = ids[(ids < 1) | (ids >= len(self.counts))]
        if outside.size:
            raise ValueError(
                f"block {outside[0]} cannot be freed: ids are 1..{len(self.counts) - 1}, "
                "0 is the padding block"
            )
        counts = self.counts[ids]
        if (counts == FREE).any():
            raise DoubleFreeError(f"block {ids[counts == FREE][0]} is free already")
        if (counts > 0).any():
            block_id, count = ids[counts > 0][0], int(counts[counts > 0][0])
            raise DoubleFreeError(
                f"block {block_id} is still held by {count & REF_MASK} handles and "
                f"{(count & PIN_MASK) // PIN} cached descendants: release instead of freeing the id"
            )
        if len(np.unique(ids)) != len(ids):
            raise DoubleFreeError(f"the same block is listed twice among {len(ids)} ids to free")

    def check_integrity(self) -> None:
        """Recompute every counter from the arrays.

        Raises:
            IntegrityError: a counter or the free list is wrong.
        """
        free = self._stack[: self.num_free]
        if not np.array_equal(np.sort(free), np.flatnonzero(self.counts == FREE)):
            raise IntegrityError(f"free list of {self.num_free} ids disagrees with the counts")
        if self.counts[0] != PADDING or (self.counts[1:] < FREE).any():
            raise IntegrityError("a count is negative, or the padding block was handed out")
        used = int(np.count_nonzero(self.counts >= USE))
        if used != self.num_used:
            raise IntegrityError(f"{used} blocks have a use, but num_used is {self.num_used}")
        held = self.counts[self.counts >= 0]
        if ((held >> 42) > (held & REF_MASK)).any():
            raise IntegrityError("a block has more uses than references")


def _count(flags: NDArray[np.bool_]) -> int:
    """How many are True; mostly all are, and argmin sees that four times faster than a count."""
    if not len(flags) or flags[flags.argmin()]:
        return len(flags)
    return int(np.count_nonzero(flags))
