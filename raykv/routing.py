"""Choosing a rank for a sequence (the seed's section 5.3)."""

from __future__ import annotations

from collections.abc import Sequence

from raykv.config import RoutingConfig
from raykv.core.kv_cache_manager import RankStats


class Router:
    """Prefers the rank with most blocks to give; the lowest number wins a tie.

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

    def select(self, stats: Sequence[RankStats], taken: Sequence[tuple[int, int]] = ()) -> int:
        """The rank for one more sequence.

        Args:
            stats: each rank's counters.
            taken: per rank, blocks and single blocks that this call already gave away.
        """
        counts_idle_cache = self.config.policy == "available_blocks"

        def preference(rank: int) -> tuple[bool, int, int]:
            blocks, singles = taken[rank] if taken else (0, 0)
            seen = stats[rank]
            free = seen.num_available_blocks if counts_idle_cache else seen.num_free_blocks
            has_single = seen.num_free_single_blocks > singles
            return has_single, free - blocks - self.debits[rank], -rank

        return max(range(len(stats)), key=preference)
