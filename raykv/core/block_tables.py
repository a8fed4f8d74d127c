"""Block tables of all running sequences in one dense array: what a kernel takes as it is."""

import numpy as np
from numpy.typing import NDArray

from raykv.errors import IntegrityError

from .manager import BlockManager
from .tokens import BlockIds, Index

# NumPy computes with these twice as fast as with numbers, and a decode step is some ten calls.
_ZERO, _ONE = np.array(0), np.array(1)


class BlockTables:
    """Row = a sequence's single block id; column = logical block index (the seed's section 9.5).

    Attributes:
        table: int32 [num_rows, max_blocks], physical block ids; 0 (padding) behind a row's end.
        num_blocks: int64 [num_rows], blocks in each row.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._size = np.array(block_size)
        self.table = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int64)

    def ids(self, row: int) -> BlockIds:
        """The blocks of one row, int32 [n], a read-only copy."""
        ids = self.table[row, : self.num_blocks[row]].copy()
        ids.flags.writeable = False
        return ids

    def append(self, row: int, ids: BlockIds | Index) -> None:
        """Add blocks at the end of one row."""
        start = int(self.num_blocks[row])
        self.table[row, start : start + len(ids)] = ids
        self.num_blocks[row] = start + len(ids)

    def append_many(
        self, rows: NDArray[np.int64], counts: NDArray[np.int64], ids: BlockIds | Index
    ) -> None:
        """Add ``counts[i]`` blocks to row ``rows[i]``, taken from ``ids`` in this order.

        Args:
            rows: int64 [n], distinct.
            counts: int64 [n], each at least 1.
            ids: int [counts.sum()].
        """
        starts = self.num_blocks[rows]
        before = np.cumsum(counts) - counts
        columns = np.arange(len(ids)) - np.repeat(before - starts, counts)
        self.table[np.repeat(rows, counts), columns] = ids
        self.num_blocks[rows] = starts + counts

    def grow(
        self, manager: BlockManager, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]
    ) -> bool:
        """Give rows the blocks that their sequences' tokens need, all or nothing: a decode step.

        Args:
            manager: where blocks come from.
            rows: int64 [n], distinct.
            num_tokens: int64 [n], tokens that each row must hold.

        Returns:
            False if the manager is short of blocks; then no row changed.
        """
        over = num_tokens - self.num_blocks[rows] * self._size  # tokens that do not fit
        most = over[over.argmax()] if len(over) else 0
        if most <= 0:
            return True
        growing = (over > _ZERO).nonzero()[0]
        rows = rows[growing]
        if most <= self._block_size:  # one block each, as in a decode step
            blocks = manager.allocate(len(rows))
            if blocks is None:
                return False
            starts = self.num_blocks[rows]
            self.table[rows, starts] = blocks.detach()
            self.num_blocks[rows] = starts + _ONE
            return True
        counts = -(-over[growing] // self._block_size)
        blocks = manager.allocate(int(counts.sum()))
        if blocks is None:
            return False
        self.append_many(rows, counts, blocks.detach())
        return True

    def truncate(self, row: int, num_blocks: int) -> BlockIds:
        """Cut a row; return the ids cut off, int32 [n]."""
        stop = int(self.num_blocks[row])
        ids = self.table[row, num_blocks:stop].copy()
        self.table[row, num_blocks:stop] = 0
        self.num_blocks[row] = num_blocks
        return ids

    def check_integrity(self) -> None:
        """Ids stand before a row's end, padding behind it.

        Raises:
            IntegrityError: something does.
        """
        behind = np.arange(self.table.shape[1]) >= self.num_blocks[:, None]
        if self.table[behind].any():
            raise IntegrityError("block table: a row has ids behind its end")
        if (self.table[~behind] < 1).any():
            raise IntegrityError("block table: a row lists the padding block")
