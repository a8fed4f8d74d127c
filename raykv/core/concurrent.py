"""The allocator behind a lock, for callers in several threads (the seed's section 9.1)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .block_manager import BlockManagerImpl

F = TypeVar("F", bound=Callable[..., Any])

_METHODS = (
    "admit", "allocate", "allocate_shared", "cache", "check_integrity", "deallocate", "drop",
    "explain", "forget", "free_many", "hash_of", "is_cached", "make_handle",
    "matching_ids", "num_matching_blocks", "prefix_hashes", "ref_counts", "reset_prefix_cache",
    "retire", "use_counts",
)  # fmt: skip
_COUNTERS = (
    "num_available_blocks", "num_blocks_in_prefix_cache", "num_evictable_blocks",
    "num_evicted_blocks", "num_free_blocks", "num_used_blocks",
)  # fmt: skip


class ConcurrentBlockManagerImpl(BlockManagerImpl):
    """BlockManagerImpl whose every operation holds one re-entrant lock.

    The lock is re-entrant because eviction inside ``allocate`` frees blocks, and because a thread
    may release handles while it is inside the manager. Each call is atomic; a handle itself
    belongs to one thread at a time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.RLock()
        super().__init__(*args, **kwargs)


def _locked(method: F) -> F:
    @functools.wraps(method)
    def call(self: ConcurrentBlockManagerImpl, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


for _name in _METHODS:
    setattr(ConcurrentBlockManagerImpl, _name, _locked(getattr(BlockManagerImpl, _name)))
for _name in _COUNTERS:
    _getter = getattr(BlockManagerImpl, _name).fget
    setattr(ConcurrentBlockManagerImpl, _name, property(_locked(_getter), doc=_getter.__doc__))
