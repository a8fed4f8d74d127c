"""Small words for the tests of slots of recurrent state."""

from __future__ import annotations

import numpy as np

from raykv.core import CheckedPrefix, Namespace, Sequence

STATE_COUNTERS = [
    "num_total_slots",
    "num_free_slots",
    "num_live_slots",
    "num_pending",
    "num_checkpoints",
    "num_reclaimable",
    "num_lingering_slots",
    "num_committed_total",
    "num_hits_total",
    "num_skipped_total",
    "num_coalesced_total",
    "num_collisions_total",
    "num_reclaimed_total",
]


def check_partition(cache):
    """Every slot is in one state, and the books balance."""
    cache.check_integrity()
    given = cache.num_free_slots + cache.num_live_slots + cache.num_pending
    assert given + cache.num_checkpoints + cache.num_lingering_slots == cache.num_total_slots
    assert cache.num_lingering_slots >= 0


def counters(cache):
    return {name: getattr(cache, name) for name in STATE_COUNTERS}


def save(cache, name, prefix=None) -> int:
    """A checkpoint, from reservation to commit."""
    return cache.commit(cache.reserve_checkpoint(name, prefix=prefix))


def running(cache) -> Sequence:
    """A sequence with a live slot, detached from its handle."""
    sequence = Sequence([1])
    sequence.linear_state_slot = int(cache.acquire_live_slot().detach()[0])
    return sequence


def saved(cache, *names) -> list[bytes]:
    return [name for name in names if cache.contains(name)]


def checked(*tokens, **namespace) -> CheckedPrefix:
    return CheckedPrefix(np.array(tokens, np.int32).tobytes(), len(tokens), Namespace(**namespace))


def pinned(cache, *names):
    return [cache.match(name) for name in names]
