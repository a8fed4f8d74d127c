"""What running sequences need to go on, and how they get it: one request for all of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .block_tables import BlockTables
from .copy_on_write import CopyOnWrite
from .sequence import Sequence
from .tokens import NO_INDEX, Index


class Growth(NamedTuple):
    """Blocks that running sequences need.

    Attributes:
        sequences: those whose tables grow.
        rows: int64 [n], their rows of the block table.
        counts: int64 [n], by how many blocks.
        copies: sequences that must not write to a block they share, with its index in their table.
    """

    sequences: list[Sequence]
    rows: Index
    counts: Index
    copies: list[tuple[Sequence, int]]

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return int(self.counts.sum()) + len(self.copies) if len(self.counts) else len(self.copies)


NO_GROWTH = Growth([], NO_INDEX, NO_INDEX, [])


class RowGrowth:
    """Grows the rows of running sequences, all at once.

    Args:
        tables: the block tables, row by single block id.
        copies: gives forks blocks of their own.
    """

    def __init__(self, tables: BlockTables, copies: CopyOnWrite) -> None:
        self._tables = tables
        self._copies = copies

    def plan(self, running: list[Sequence], wanted: list[int]) -> Growth:
        """What they need to hold ``wanted`` blocks, and to write to their last one; a look only."""
        rows = np.array([sequence.single_block_id for sequence in running], np.int64)
        counts = np.array(wanted, np.int64) - self._tables.num_blocks[rows]
        grows = (counts > 0).nonzero()[0]
        growing = [running[index] for index in grows.tolist()]
        return Growth(growing, rows[grows], counts[grows], self._copies.due(running))

    def apply(self, growth: Growth, ids: Index) -> None:
        """Hand out what was planned.

        Args:
            growth: the plan; no row of it changed since.
            ids: int64 [growth.num_blocks], blocks with one use each.
        """
        num_more = len(ids) - len(growth.copies)
        self._tables.append_many(growth.rows, growth.counts, ids[:num_more])
        for sequence, row in zip(growth.sequences, growth.rows.tolist(), strict=True):
            sequence.kv_state.block_ids = self._tables.ids(row)
        for (sequence, index), target in zip(growth.copies, ids[num_more:].tolist(), strict=True):
            self._copies.replace(sequence, index, target)
