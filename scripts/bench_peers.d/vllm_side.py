"""vLLM's KVCacheManager, called as its scheduler does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from workloads import BLOCK_SIZE, NUM_BLOCKS, Side

_HASH = "sha256"  # the default of vLLM's cache configuration
_MAX_MODEL_LEN = 1 << 20


class VllmSide(Side):
    """One full-attention group; an admission is a Request and how many tokens it found cached."""

    includes: ClassVar = {
        "prompt": "a Python list of ints, which vLLM's Request wants",
        "admit": "Request (copies the list, hashes every block with SHA-256, the default), "
        "get_computed_blocks, allocate_slots, which also publishes all of the prompt's blocks; "
        "the prompt's last block is never taken from the cache",
        "decode": "256 calls of allocate_slots; appending and hashing the token are not timed",
        "finish": "free; the blocks were published at admission",
        "left out": "statistics, block ids for the workers, all of the scheduler's own work",
    }
    split_of: ClassVar = "creating the Request, hashes included"

    def __init__(self) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16
        )
        self._manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=NUM_BLOCKS,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=_MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        hash_function = get_hash_fn_by_name(_HASH)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._params = SamplingParams(max_tokens=1024)
        self._ids = map(str, itertools.count())

    def prompt(self, tokens: list[int]) -> list[int]:
        """See Side."""
        return tokens

    def part(self, prompt: list[int]) -> Request:
        """See Side."""
        return Request(next(self._ids), prompt, self._params, None, block_hasher=self._hasher)

    def admit(self, prompt: list[int]) -> tuple[Request, int]:
        """See Side."""
        request = self.part(prompt)
        cached, num_cached, _ = self._manager.get_computed_blocks(request)
        blocks = self._manager.allocate_slots(
            request, request.num_tokens - num_cached, num_cached, cached
        )
        assert blocks is not None, "the pool is large enough"
        return request, num_cached

    def num_cached(self, admitted: tuple[Request, int]) -> int:
        """See Side."""
        return admitted[1]

    def drop(self, admitted: tuple[Request, int]) -> None:
        """See Side."""
        request, num_cached = admitted
        (ids,) = self._manager.get_block_ids(request.request_id)
        self._manager.free(request)
        self._manager.evict_blocks(set(ids[num_cached // BLOCK_SIZE :]))

    def finish(self, admitted: tuple[Request, int]) -> None:
        """See Side."""
        self._manager.free(admitted[0])

    def hold_rest(self) -> None:
        """See Side."""
        pool = self._manager.block_pool
        num_cached = sum(block.block_hash is not None for block in pool.blocks)
        self.admit([0] * ((pool.get_num_free_blocks() - num_cached) * BLOCK_SIZE))
        assert pool.get_num_free_blocks() == num_cached

    def decoder(self, lengths: list[int]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """See Side."""
        requests = [self.admit([row] * length)[0] for row, length in enumerate(lengths)]
        for request in requests:
            request.num_computed_tokens = request.num_tokens

        def prepare() -> None:
            for request in requests:
                request.num_computed_tokens = request.num_tokens
                request.append_output_token_ids(1)

        def step(_: None) -> None:
            for request in requests:
                assert self._manager.allocate_slots(request, 1) is not None

        return prepare, step
