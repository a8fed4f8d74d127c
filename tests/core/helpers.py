"""Small words for the core's unit tests."""

from __future__ import annotations

from raykv.core import DEFAULT, Blocks

COUNTERS = [
    "num_total_blocks",
    "num_free_blocks",
    "num_used_blocks",
    "num_evictable_blocks",
    "num_available_blocks",
    "num_blocks_in_prefix_cache",
]


def counters(manager) -> dict[str, int]:
    return {name: getattr(manager, name) for name in COUNTERS}


def snapshot(manager, *handles):
    """Everything that a refused call must leave as it was."""
    return counters(manager), [
        (handle.ids.tolist(), handle.ref_counts.tolist()) for handle in handles
    ]


def num_pending(manager) -> int:
    """Blocks that are neither free nor used nor evictable."""
    return (
        manager.num_total_blocks
        - manager.num_free_blocks
        - manager.num_used_blocks
        - manager.num_evictable_blocks
    )


def run_of(block_size, *marks) -> list[int]:
    """Tokens of one block per mark: ``run_of(2, 5, 6) == [5, 5, 6, 6]``."""
    return [mark for mark in marks for _ in range(block_size)]


def start(manager, tokens, namespace=DEFAULT) -> Blocks:
    """What an admission does: reuse the cached prefix, allocate the rest."""
    hit = manager.allocate_shared(tokens, namespace=namespace)
    missing = -(-len(tokens) // manager.block_size) - len(hit)
    fresh = manager.allocate(missing)
    assert fresh is not None
    return Blocks.concat([hit, fresh])


def publish(manager, tokens, namespace=DEFAULT) -> list[int]:
    """A whole life: admit, publish, give back. Returns the ids, which stay cached."""
    blocks = start(manager, tokens, namespace)
    ids = blocks.ids.tolist()
    manager.cache(tokens, blocks, namespace=namespace)
    manager.deallocate(blocks)
    blocks.release()
    return ids


def hit_ids(manager, tokens, namespace=DEFAULT) -> list[int]:
    """What the cache holds for the tokens. Refreshes their recency."""
    with manager.allocate_shared(tokens, namespace=namespace) as hit:
        return hit.ids.tolist()


def check_drained(manager) -> None:
    """Nobody holds anything, and nothing was lost."""
    manager.check_integrity()
    assert manager.num_used_blocks == 0
    assert manager.num_free_blocks + manager.num_evictable_blocks == manager.num_total_blocks
    with manager.allocate(manager.num_total_blocks) as everything:
        assert sorted(everything.ids.tolist()) == list(range(1, manager.num_total_blocks + 1))
    manager.check_integrity()
