"""Block management without Ray, torch or clocks: plain Python and NumPy, synchronous."""

from .block_manager import BlockManagerImpl
from .blocks import Block, Blocks
from .checked_prefix import CheckedPrefix
from .concurrent import ConcurrentBlockManagerImpl
from .linear_state import LinearStatePrefixCache
from .manager import AdmitRequest, Admitted, BlockManager
from .namespace import DEFAULT, Namespace
from .prefix_cache import PrefixCache
from .prefix_hash import PrefixHasher
from .reservation import Reservation
from .sequence import KVCacheState, Request, Sequence
from .single import SingleBlockManager
from .tokens import BlockIds, TokenIds, as_tokens

__all__ = [
    "DEFAULT",
    "AdmitRequest",
    "Admitted",
    "Block",
    "BlockIds",
    "BlockManager",
    "BlockManagerImpl",
    "Blocks",
    "CheckedPrefix",
    "ConcurrentBlockManagerImpl",
    "KVCacheState",
    "LinearStatePrefixCache",
    "Namespace",
    "PrefixCache",
    "PrefixHasher",
    "Request",
    "Reservation",
    "Sequence",
    "SingleBlockManager",
    "TokenIds",
    "as_tokens",
]
