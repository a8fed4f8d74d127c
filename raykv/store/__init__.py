"""Stores that keep KV blocks across restarts, behind the host tier (the seed's kvcache_store).

``RedisStore`` is imported from ``raykv.store.redis_store``, since it needs the extra ``redis``.
"""

from .disk_store import DiskStore
from .guarded import CircuitBreaker, GuardedStore
from .interface import Buffer, KVStore, StoreStats
from .keys import KVKeys, is_storable, layout_name, model_fingerprint

__all__ = [
    "Buffer",
    "CircuitBreaker",
    "DiskStore",
    "GuardedStore",
    "KVKeys",
    "KVStore",
    "StoreStats",
    "is_storable",
    "layout_name",
    "model_fingerprint",
]
