"""SGLang's UnifiedRadixCache over its Rust tree, and its paged allocator."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from transformers.utils import import_utils
from workloads import BLOCK_SIZE, NUM_BLOCKS, Side


class _Absent(ModuleType):
    """Stands in for a module that SGLang's image models import and no KV manager uses."""

    __path__: ClassVar = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def _do_without_torchvision() -> None:
    """Torchvision's wheel wants a CUDA torch, so nothing behind this name is installed."""
    assert not import_utils.is_torchvision_available()  # Transformers remembers this
    for name in ("", ".transforms", ".transforms.functional"):
        module = _Absent(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


_do_without_torchvision()

from sglang.srt.mem_cache.allocation import (  # noqa: E402
    alloc_paged_token_slots_decode,
    alloc_paged_token_slots_extend,
    alloc_token_slots,
)
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    InsertParams,
    MatchPrefixParams,
    TreeLock,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

_NO_TOKENS = torch.empty(0, dtype=torch.int64)


class Admission(NamedTuple):
    """What SGLang's Req would keep: the key, the lock on the hit, its slots and the new ones."""

    key: RadixKey
    lock: TreeLock
    cached: torch.Tensor
    fresh: torch.Tensor


class SglangSide(Side):
    """Full attention only; slots are token indices, in pages of BLOCK_SIZE."""

    includes: ClassVar = {
        "prompt": "an array('q') of ids, which SGLang's Req keeps",
        "admit": "match_prefix, lock, path_device_indices of a hit, alloc_token_slots (the "
        "cheapest call; on a GPU its scheduler starts a kernel instead) with eviction",
        "decode": "alloc_paged_token_slots_decode (its code for the CPU), last slots read from and "
        "new ones written to req_to_token",
        "finish": "insert and unlock",
        "left out": "Req, writing a prompt's row of req_to_token, re-reading and re-locking the "
        "inserted path, all of the scheduler's own work",
    }
    split_of: ClassVar = (
        "alloc_paged_token_slots_extend for the whole prompt: what its scheduler calls in place of "
        "alloc_token_slots, slow on a CPU"
    )

    def __init__(self) -> None:
        self._rows = ReqToTokenPool(
            size=256, max_context_len=16_384, device="cpu", enable_memory_saver=False
        )
        self._slots = PagedTokenToKVPoolAllocator(
            NUM_BLOCKS * BLOCK_SIZE, BLOCK_SIZE, torch.float16, "cpu", None, need_sort=False
        )
        self._tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self._rows,
                token_to_kv_pool_allocator=self._slots,
                page_size=BLOCK_SIZE,
                tree_components=(ComponentType.FULL,),
                tree_core_backend="rust",
            )
        )
        core = type(self._tree.tree_core).__name__
        assert core == "RustUnifiedTreeCore", f"SGLang fell back to {core}"

    def prompt(self, tokens: list[int]) -> array[int]:
        """See Side."""
        return array("q", tokens)

    def admit(self, prompt: array[int]) -> Admission:
        """See Side."""
        key = RadixKey(prompt)
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        lock = self._tree.lock(match.last_device_node)
        num_cached = match.device_prefix_len
        cached = (
            self._tree.path_device_indices(match.last_device_node) if num_cached else _NO_TOKENS
        )
        missing = len(prompt) - num_cached
        fresh = alloc_token_slots(self._tree, missing) if missing else _NO_TOKENS
        return Admission(key, lock, cached, fresh)

    def part(self, prompt: array[int]) -> None:
        """See Side."""
        none = torch.zeros(1, dtype=torch.int64)
        whole = torch.full((1,), len(prompt))
        slots = alloc_paged_token_slots_extend(
            self._tree, none, none, whole, whole, none - 1, len(prompt)
        )
        self._slots.free_segment(slots, start_pos=0)

    def num_cached(self, admitted: Admission) -> int:
        """See Side."""
        return len(admitted.cached)

    def drop(self, admitted: Admission) -> None:
        """See Side."""
        self._tree.unlock(admitted.lock)
        self._slots.free(admitted.fresh)

    def finish(self, admitted: Admission) -> None:
        """See Side."""
        num_cached = len(admitted.cached)
        slots = torch.cat((admitted.cached, admitted.fresh)) if num_cached else admitted.fresh
        self._tree.insert(InsertParams(key=admitted.key, value=slots, prev_prefix_len=num_cached))
        self._tree.unlock(admitted.lock)

    def hold_rest(self) -> None:
        """See Side."""
        assert self._slots.alloc(self._slots.available_size()) is not None
        assert self._slots.available_size() == 0

    def decoder(self, lengths: list[int]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """See Side."""
        rows = torch.arange(1, len(lengths) + 1)
        for row, length in enumerate(lengths, 1):
            slots = self._slots.alloc(-(-length // BLOCK_SIZE) * BLOCK_SIZE)
            self._rows.write((row, slice(0, length)), slots[:length].to(torch.int32))
        # On a GPU one of the two lies on the device; hence SGLang keeps both.
        device_lengths, host_lengths = torch.tensor(lengths), torch.tensor(lengths)

        def step(_: None) -> None:
            last = self._rows.req_to_token[rows, device_lengths - 1]
            slots = alloc_paged_token_slots_decode(
                self._tree, device_lengths + 1, host_lengths + 1, last
            )
            self._rows.write((rows, device_lengths.clone()), slots.to(torch.int32))
            device_lengths.add_(1)
            host_lengths.add_(1)

        return lambda: None, step
