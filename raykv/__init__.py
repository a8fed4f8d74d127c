"""raykv: a Ray-distributed, data-parallel pool of KV-cache blocks for LLM inference.

Names load on first use, so that ``import raykv`` costs neither Ray nor torch.
"""

import importlib
from typing import Any

_HOMES = {
    "raykv.core": (
        "Block",
        "BlockManager",
        "BlockManagerImpl",
        "Blocks",
        "CheckedPrefix",
        "ConcurrentBlockManagerImpl",
        "KVCacheState",
        "LinearStatePrefixCache",
        "Namespace",
        "PrefixCache",
        "Request",
        "Reservation",
        "Sequence",
        "SingleBlockManager",
    ),
    "raykv.config": ("PoolConfig",),
    "raykv.core.kv_cache_manager": ("KVCacheManager", "PoolStats", "RankStats"),
    "raykv.core.explain": ("MissReport",),
    "raykv.core.retention": ("Retention",),
    "raykv.engine.params": ("SamplingParams", "TokenDelta", "TokenOutput"),
    "raykv.hierarchy": ("HierarchyBlockManagerPool",),
    "raykv.pool": ("BlockManagerPool",),
    "raykv.rank": ("RankKV",),
    "raykv.transfer_report": ("TransferReport",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [*_HOME_OF]  # noqa: PLE0604 - names, computed


def __getattr__(name: str) -> Any:
    if name == "actors":  # so that `import raykv` is enough for raykv.actors.launch
        return importlib.import_module("raykv.actors")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'raykv' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
