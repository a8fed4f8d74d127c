"""How many host blocks are in which state, and what became of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from raykv.host.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """Counts of blocks, now and since the start.

    Attributes:
        blocks: that can be handed out: all but the padding block.
        free: that hold nothing.
        cached: that can be found, whether pinned or not.
        storing: that are being written.
        pinned: that must stay for loads under way, or as ancestors of what is being written.
        quarantined: that nobody gets, since a silent client may write them or they were corrupt.
        stored_total: that were written and could be found then.
        orphaned: that were written, but whose ancestors were lost meanwhile.
        hit: that were given to read.
        loaded_total: that were read well.
        evicted: that made room.
        corrupt: that were found corrupt.
        stale: that were reassigned, or seemed so, while they were read.
        refused: that were offered and found no room.
        expired: reports, not blocks: those of tickets that were over.
        block_bytes: bytes of a block; 0 where the books have no memory.
    """

    blocks: int = 0
    free: int = 0
    cached: int = 0
    storing: int = 0
    pinned: int = 0
    quarantined: int = 0
    stored_total: int = 0
    orphaned: int = 0
    hit: int = 0
    loaded_total: int = 0
    evicted: int = 0
    corrupt: int = 0
    stale: int = 0
    refused: int = 0
    expired: int = 0
    block_bytes: int = 0


def count(tier: HostTier) -> HostTierStats:
    """Count the blocks of a tier."""
    manager, clients, totals = tier.manager, tier.clients, tier.blocks.totals
    storing = [store.own for client in clients for store in client.stores.values()]
    num_storing = sum(map(len, storing))
    num_unready = sum(int(np.count_nonzero(manager.is_cached(ids))) for ids in storing)
    num_left = sum(remains.num_blocks for remains in clients.remains.values())
    corrupt = np.fromiter(tier.blocks.corrupt, np.int64)
    num_corrupt_in_use = int(np.count_nonzero(manager.use_counts(corrupt)))
    return HostTierStats(
        blocks=manager.num_total_blocks,
        free=manager.num_free_blocks,
        cached=manager.num_blocks_in_prefix_cache - num_unready,
        storing=num_storing,
        pinned=manager.num_used_blocks - num_storing - num_left - num_corrupt_in_use,
        quarantined=num_left + len(corrupt),
        stored_total=totals["stored"],
        orphaned=totals["orphaned"],
        hit=totals["hit"],
        loaded_total=totals["loaded"],
        evicted=manager.num_evicted_blocks,
        corrupt=totals["corrupt"],
        stale=totals["stale"],
        refused=totals["refused"],
        expired=totals["expired"],
    )
