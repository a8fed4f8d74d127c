"""Choosing a rank for a sequence (the seed's section 5.3)."""

from __future__ import annotations

from collections.abc import Iterable

from raykv.config import RoutingConfig
from raykv.core.kv_cache_manager import Room


class Choice:
    """Ranks for the sequences of one call; what it gave away counts against the later ones.

    Args:
        blocks: per rank, blocks to give.
        singles: per rank, single blocks to give.
    """

    def __init__(self, blocks: list[int], singles: list[int]) -> None:
        self._blocks = blocks
        self._singles = singles

    def take(self, num_blocks: int) -> int:
        """The rank for one more sequence; the lowest number wins a tie."""
        best, most = 0, (0, 0)
        for rank, (blocks, singles) in enumerate(zip(self._blocks, self._singles, strict=True)):
            room = (min(singles, 1), blocks)
            if rank == 0 or room > most:
                best, most = rank, room
        self._blocks[best] -= num_blocks
        self._singles[best] -= 1
        return best


class Router:
    """Prefers the rank with most blocks to give.

    Ranks without a free single block are passed by, since they cannot admit anything.

    Args:
        config: the policy.
        num_ranks: ranks to choose among.

    Attributes:
        debits: per rank, blocks that were promised and do not show in the rank's counters yet.
    """

    def __init__(self, config: RoutingConfig, num_ranks: int) -> None:
        self.config = config
        self.debits = [0] * num_ranks

    def begin(self, rooms: Iterable[Room]) -> Choice:
        """Start choosing for one or more sequences, from what each rank has to give."""
        blocks, singles = [], []
        for room, debit in zip(rooms, self.debits, strict=True):
            if self.config.policy == "available_blocks":
                blocks.append(room.num_available_blocks - debit)
            else:
                blocks.append(room.num_free_blocks - debit)
            singles.append(room.num_free_single_blocks)
        return Choice(blocks, singles)
