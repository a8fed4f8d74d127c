"""The audit of a host tier: who holds each block, recomputed from what is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raykv.core.tokens import NO_INDEX, Index
from raykv.errors import IntegrityError

if TYPE_CHECKING:
    from raykv.host.host_tier import HostTier


def audit(tier: HostTier) -> None:
    """Compare the manager's books with what is under way and in quarantine.

    Raises:
        IntegrityError: something disagrees.
    """
    manager, clients = tier.manager, tier.clients
    ready, generations = tier.blocks.ready, tier.blocks.generations
    manager.check_integrity()
    num_blocks = manager.num_total_blocks + 1
    stores = [store for client in clients for store in client.stores.values()]
    loads = [load for client in clients for load in client.loads.values()]
    left = [blocks for remains in clients.remains.values() for blocks in remains.stores.values()]
    kept = [*left, *tier.blocks.corrupt.values()]
    every_id = np.arange(num_blocks)
    cached = manager.is_cached(every_id)
    num_handles = manager.ref_counts(every_id) - cached
    held = [*(transfer.blocks for transfer in (*stores, *loads)), *kept]
    expected = _times([blocks.index for blocks in held], num_blocks)
    _require(np.array_equal(num_handles, expected), "a block is held by nothing that is under way")

    # The states: each block is in one.
    storing_times = _times([store.own for store in stores], num_blocks)
    quarantine_times = _times([blocks.index for blocks in kept], num_blocks)
    _require(bool((storing_times + quarantine_times <= 1).all()), "two may write one block")
    storing, quarantined = storing_times > 0, quarantine_times > 0
    free, evictable = (num_handles == 0) & ~cached, (num_handles == 0) & cached
    _require(int(free.sum()) - 1 == manager.num_free_blocks, "a block is lost")  # but the padding
    _require(int(evictable.sum()) == manager.num_evictable_blocks, "an unpinned block is stuck")
    _require(not (quarantined & cached).any(), "a block in quarantine can be found")

    # What can be found is complete, and what is not complete has a writer.
    _require(np.array_equal(cached & ~ready, cached & storing), "a block is half ready")
    _require(bool((generations[cached | storing] > 0).all()), "a block was never assigned")
    for load in loads:
        _require(bool((ready | ~cached)[load.blocks.index].all()), "a load reads a block early")
    for client in clients:
        remains = clients.remains.get(client.client_id)
        _require(remains is None or remains.pid == client.pid, "two processes have one name")
    _require(all(remains.stores for remains in clients.remains.values()), "remains are of nothing")


def _times(ids: list[Index], num_blocks: int) -> Index:
    """How often each block is listed, int64 [num_blocks]."""
    return np.bincount(np.concatenate([NO_INDEX, *ids]), minlength=num_blocks)


def _require(condition: bool, message: str) -> None:  # noqa: FBT001
    if not condition:
        raise IntegrityError(f"host tier: {message}")
