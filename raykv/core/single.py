"""One id per sequence: rows of the block table, state slots (the seed's section 6)."""

import operator

import numpy as np

from .base import LedgerBlockManager
from .blocks import Blocks
from .ledger import REF, USE
from .tokens import Index


class SingleBlockManager(LedgerBlockManager):
    """Hands out single ids 1..num_blocks-1; id 0 is padding, and there is no prefix cache.

    The id released last is handed out next, so that the rows in use stay few and warm.

    Args:
        num_blocks: ids, the padding id included.
        resource_name: what an id stands for, for messages.
    """

    def __init__(self, num_blocks: int, *, resource_name: str = "single block") -> None:
        super().__init__(num_blocks, block_size=1)
        self.resource_name = resource_name
        self._every_id: Index = np.arange(num_blocks, dtype=np.int64)
        self._every_id.flags.writeable = False

    def __repr__(self) -> str:
        return (
            f"<SingleBlockManager {self.resource_name}: {self.num_used_blocks} of "
            f"{self.num_total_blocks} used>"
        )

    # Nearly every call is about one id, and for one NumPy's fixed costs are most of the time.

    def allocate(self, num_blocks: int) -> Blocks | None:
        """See BlockManager."""
        if operator.index(num_blocks) != 1:
            return super().allocate(num_blocks)
        if self.dropped:
            self._settle_dropped()
        if not self._ledger.num_free and not self._make_room(1):
            return None
        return Blocks(self, self.index_of(self._ledger.take_one(USE + REF)), USE + REF)

    def make_handle(self, ids: Index, weight: int, *, unique: bool = True) -> Blocks:
        """One more handle of blocks that are held by one already."""
        if len(ids) != 1 or not weight:
            return super().make_handle(ids, weight, unique=unique)
        self._settle_dropped()
        self._ledger.add_one(ids.item(), weight)
        return Blocks(self, ids, weight, unique=unique)

    def pin_one(self, block_id: int) -> Blocks:
        """A pin of one block that somebody holds: ``pin`` in half the time."""
        if self.dropped:
            self._settle_dropped()
        self._ledger.add_one(block_id, REF)
        return Blocks(self, self.index_of(block_id), REF)

    def drop(self, ids: Index, weight: int, *, unique: bool) -> None:
        """Take a handle's references or uses off the books."""
        if self.dropped:
            self._settle_dropped()
        self._drop(ids, weight, unique)

    def index_of(self, block_id: int) -> Index:
        """The index of one id, int64 [1], read-only."""
        return self._every_id[block_id : block_id + 1]

    def _drop(self, ids: Index, weight: int, unique: bool) -> None:  # noqa: FBT001
        if len(ids) != 1:
            super()._drop(ids, weight, unique)
            return
        block_id = ids.item()
        if self._ledger.subtract_one(block_id, weight):
            self._let_go(block_id)

    def _unreferenced(self, ids: Index) -> None:
        # Last first, so that the next that are taken come in this order.
        for block_id in ids[::-1].tolist():
            self._let_go(block_id)

    def _let_go(self, block_id: int) -> None:
        """The last handle of this id is gone."""
        self._ledger.give_back_one(block_id)
