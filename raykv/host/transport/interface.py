"""What a transport of blocks between nodes has to do, and the checks that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raykv.host.tickets import LoadOutcome
from raykv.memory.checksums import NO_CHECKSUM, block_checksum

# What is read, checked and reported at a time: enough to hide a round trip, little enough that a
# stalled reader is noticed soon and the event loop gets its turn.
BATCH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class RowRequest:
    """Rows of a server's slab, as a ticket of its tier names them.

    Attributes:
        ids: int [n], the rows, in the order in which they are wanted.
        generations: uint64 [n], that the wanted content belongs to.
        checksums: uint64 [n], of the wanted content; ``NO_CHECKSUM`` where none was computed.

    Raises:
        ValueError: the lengths differ.
    """

    ids: NDArray[np.integer]
    generations: NDArray[np.uint64]
    checksums: NDArray[np.uint64]

    def __post_init__(self) -> None:
        shape = (len(self.ids),)
        if not self.ids.shape == self.generations.shape == self.checksums.shape == shape:
            raise ValueError(
                f"{self.ids.shape} ids, {self.generations.shape} generations and"
                f" {self.checksums.shape} checksums do not make a request: give one of each per row"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> RowRequest:
        return RowRequest(self.ids[part], self.generations[part], self.checksums[part])


class BlockServer(Protocol):
    """Serves the rows of one slab to other nodes, read-only.

    It says of each row that it sent which generation the row had *after* it was copied: content
    may change at any time, and only that tells. It refuses rows that the slab does not have. It
    serves nobody who does not know the pool's secret.

    Attributes:
        address: what a ``Transport`` of the same kind needs to find it, and never finds another
            server under.
    """

    address: str

    def close(self) -> None:
        """Stop; afterwards the slab is not touched any more. Idempotent."""
        ...


class Transport(Protocol):
    """Reads rows of other nodes' slabs. Its coroutines run on one event loop."""

    async def read_rows(
        self,
        address: str,
        request: RowRequest,
        rows: NDArray[np.uint8],
        row_ids: NDArray[np.integer],
        on_blocks: Callable[[int], None],
    ) -> NDArray[np.uint8]:
        """Read rows into rows of one's own slab.

        A row is OK only if its generation was the wanted one after the copy, and its checksum is
        the wanted one, where there is one. Whoever is at the address may be dead, frozen, hostile
        or somebody else: that is an answer of fewer rows, in bounded time. Once the call has ended,
        by a cancellation too, ``rows`` is not touched any more.

        Args:
            address: the server's.
            request: what to read.
            rows: uint8 [num_rows, block_bytes], contiguous.
            row_ids: int [n], where each goes; all different, never row 0.
            on_blocks: called with the number of leading rows that are OK, as it grows.

        Returns:
            uint8 [n], a ``LoadOutcome`` per row. Only the OK ones before any other are of use; a
            row that is not OK may hold anything.

        Raises:
            ValueError: ``row_ids`` does not fit ``rows`` or the request. Nothing was touched.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        ...

    async def close(self) -> None:
        """Let go of everything; idempotent."""
        ...


def rows_per_batch(block_bytes: int) -> int:
    """How many rows are moved at a time."""
    return max(1, BATCH_BYTES // block_bytes)


def consecutive(row_ids: NDArray[np.integer]) -> list[slice]:
    """The rows as few slices, in order: ``[3, 4, 5, 9]`` is ``[3:6]``, ``[9:10]``."""
    if not len(row_ids):
        return []
    cuts = np.flatnonzero(np.diff(row_ids.astype(np.int64)) != 1)
    firsts = row_ids[np.concatenate([[0], cuts + 1])].tolist()
    lasts = row_ids[np.concatenate([cuts, [len(row_ids) - 1]])].tolist()
    return [slice(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def outcomes_of(
    request: RowRequest,
    generations: NDArray[np.uint64],
    rows: NDArray[np.uint8],
    row_ids: NDArray[np.integer],
) -> NDArray[np.uint8]:
    """What became of rows that arrived as a whole.

    Args:
        request: what was wanted.
        generations: uint64 [n], of the rows at the server after it had copied them.
        rows: see ``Transport.read_rows``; ``row_ids`` too.
        row_ids: where they are.

    Returns:
        uint8 [n], a ``LoadOutcome`` per row: OK, STALE or CORRUPT.
    """
    outcomes = np.full(len(request), LoadOutcome.OK, np.uint8)
    for at, wanted in enumerate(request.checksums.tolist()):
        if wanted != NO_CHECKSUM and block_checksum(rows[row_ids[at]]) != wanted:
            outcomes[at] = LoadOutcome.CORRUPT
    outcomes[generations != request.generations] = LoadOutcome.STALE
    return outcomes


def num_leading_ok(outcomes: NDArray[np.uint8]) -> int:
    """How many are OK before the first that is not."""
    bad = outcomes != LoadOutcome.OK
    return int(bad.argmax()) if bad.any() else len(outcomes)
