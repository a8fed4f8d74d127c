"""One read of rows under way, whatever the transport."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from raykv.host.tickets import LoadOutcome
from raykv.host.transport.interface import RowRequest, num_leading_ok, outcomes_of
from raykv.memory.ids import checked_targets


class Reading:
    """Keeps what has arrived of a request, checks it, and reports it.

    Args:
        request: what is read.
        rows: where to; see ``Transport.read_rows``, for ``row_ids`` and ``on_blocks`` as well.

    Attributes:
        request: as given.
        rows: as given.
        outcomes: uint8 [n], a ``LoadOutcome`` per row; FAILED for what has not arrived.
        num_ok: leading rows that are OK.
        has_failed: whether a row is not OK, so that what follows is of no use.

    Raises:
        ValueError: ``row_ids`` does not fit.
    """

    def __init__(
        self,
        request: RowRequest,
        rows: NDArray[np.uint8],
        row_ids: NDArray[np.integer],
        on_blocks: Callable[[int], None],
    ) -> None:
        self._row_ids = checked_targets(row_ids, len(rows), "row_ids")
        if len(row_ids) != len(request):
            raise ValueError(f"{len(request)} rows are requested into {len(row_ids)}")
        if rows.ndim != 2 or rows.dtype != np.uint8 or not rows.flags.c_contiguous:
            raise ValueError(
                f"rows are {rows.dtype} of shape {rows.shape}, but must be contiguous uint8"
                " [num_rows, block_bytes]"
            )
        self.request = request
        self.rows = rows
        self.outcomes = np.full(len(request), LoadOutcome.FAILED, np.uint8)
        self.num_ok = 0
        self.has_failed = False
        self._on_blocks = on_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.rows.shape[1])

    @property
    def num_left(self) -> int:
        """Rows that have not arrived, and are still wanted."""
        return 0 if self.has_failed else len(self.outcomes) - self.num_ok

    def next_ids(self, num: int) -> NDArray[np.int64]:
        """Where the next so many rows go, int64 [num]."""
        return self._row_ids[self.num_ok : self.num_ok + num]

    def arrived(self, generations: NDArray[np.uint64]) -> bool:
        """The next rows are in their places as a whole.

        Args:
            generations: uint64 [m], of them at the server after it had copied them.

        Returns:
            Whether they were the last ones that a server sends: all have arrived, or one has
            changed.
        """
        num = len(generations)
        part = self.request[self.num_ok : self.num_ok + num]
        outcomes = outcomes_of(part, generations, self.rows, self.next_ids(num))
        self.outcomes[self.num_ok : self.num_ok + num] = outcomes
        num_ok = num_leading_ok(outcomes)
        self.num_ok += num_ok
        self.has_failed = num_ok < num
        if num_ok:
            self._on_blocks(self.num_ok)
        return self.num_ok == len(self.outcomes) or bool((generations != part.generations).any())

    def end(self, outcome: LoadOutcome) -> None:
        """Nothing more comes, since this became of the next row."""
        self.outcomes[self.num_ok] = outcome
        self.has_failed = True

    def counts(self) -> dict[str, int]:
        """Rows by what became of them; those behind the first that is not OK are of no account."""
        counts = {"rows": self.num_ok, "bytes": self.num_ok * self.block_bytes}
        if self.num_ok < len(self.outcomes):
            counts[LoadOutcome(self.outcomes[self.num_ok]).name.lower()] = 1
        return counts
