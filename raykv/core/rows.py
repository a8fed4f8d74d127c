"""The sequences of a rank by their rows of the block tables, and which must publish nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raykv.errors import IntegrityError, RequestError

from .base import LedgerBlockManager
from .block_tables import BlockTables
from .sequence import KVCacheState, Sequence
from .single import SingleBlockManager
from .tokens import Index


class Rows:
    """Who holds which row. Rows are handed out by ``singles``, and come back through ``detach``.

    A row is stale when its sequence held blocks at a reset, or began under earlier weights. A copy
    on write would give it a fresh block with old content, so the manager's marks on blocks do not
    tell; and what follows on old KV is no new KV either. A mark goes with its row.

    Args:
        dp_rank: the rank's number.
        block_size: tokens per block.
        tables: the block tables, row by single block id.
        singles: hands out their rows.

    Attributes:
        sequences: by row; None where nobody holds it.
        stale: the rows that are.
    """

    def __init__(
        self, dp_rank: int, block_size: int, tables: BlockTables, singles: SingleBlockManager
    ) -> None:
        self.sequences: list[Sequence | None] = [None] * len(tables.table)
        self.stale: set[int] = set()
        self._dp_rank = dp_rank
        self._block_size = block_size
        self._tables = tables
        self._singles = singles
        self._num_attached = 0

    @property
    def is_empty(self) -> bool:
        """Whether all rows are free."""
        return not self._singles.num_used_blocks

    def find(self, sequence: Sequence) -> int | None:
        """A sequence's row, None if it holds none.

        Raises:
            RequestError: it holds one elsewhere.
        """
        row = sequence.single_block_id
        if row is None:
            return None
        if (
            sequence.dp_rank != self._dp_rank
            or row >= len(self.sequences)
            or self.sequences[row] is not sequence
        ):
            raise RequestError(
                f"{sequence!r} belongs to another pool or rank: deallocate it there first"
            )
        return row

    def held(self) -> Iterator[tuple[int, Sequence]]:
        """Rows that are held, ascending, with their sequences."""
        return ((row, held) for row, held in enumerate(self.sequences) if held is not None)

    def admitted_before(self, sequence: Sequence) -> list[Sequence]:
        """Those that hold rows for longer than this one does."""
        admission = sequence.kv_state.admission
        return [other for _, other in self.held() if other.kv_state.admission < admission]

    def attach(self, sequence: Sequence, row: int, ids: Index, num_shared: int) -> None:
        """Give a sequence a row, and the blocks that it begins with.

        Args:
            sequence: one without row.
            row: what ``singles`` gave, and nobody holds.
            ids: int64 [n], its blocks.
            num_shared: leading blocks whose KV is computed.
        """
        self._tables.append(row, ids)
        self.sequences[row] = sequence
        sequence.dp_rank, sequence.single_block_id = self._dp_rank, row
        self._num_attached += 1
        sequence.kv_state = KVCacheState(
            block_size=self._block_size,
            block_ids=self._tables.ids(row),
            num_shared_blocks=num_shared,
            num_computed_tokens=num_shared * self._block_size,
            num_admitted_tokens=sequence.num_tokens,
            admission=self._num_attached,
        )

    def detach(self, row: int) -> None:
        """Take a row back, whose blocks are gone already."""
        self._singles.adopt(np.array([row], np.int32)).release()
        self.sequences[row] = None
        self.stale.discard(row)

    def mark_holders_stale(self) -> None:
        """Mark all rows that have blocks."""
        self.stale.update(row for row, held in self.held() if held.kv_state.num_blocks)

    def check_integrity(self, manager: LedgerBlockManager) -> None:
        """Rows, sequences, tables and the uses that ``manager`` counts agree.

        Raises:
            IntegrityError: something disagrees.
        """
        tables = self._tables
        rows = [row for row, _ in self.held()]
        if not self.stale <= set(rows):
            raise IntegrityError("a row without sequence is marked as stale")
        if self._singles.num_used_blocks != len(rows):
            raise IntegrityError(f"{len(rows)} sequences hold rows, but the books differ")
        for row, sequence in self.held():
            if sequence.single_block_id != row or not np.array_equal(
                sequence.kv_state.block_ids, tables.ids(row)
            ):
                raise IntegrityError(f"row {row} and {sequence!r} disagree")
        if tables.num_blocks.sum() != tables.num_blocks[rows].sum():
            raise IntegrityError("a row without sequence has blocks")
        ids, times = np.unique(tables.table[rows], return_counts=True)
        ids, times = ids[ids > 0], times[ids > 0]
        held = manager.adopt(ids)
        too_few = len(ids) > manager.num_used_blocks or (held.ref_counts < times).any()
        held.detach()
        if too_few:
            raise IntegrityError("a row lists a block that its sequence does not use")
