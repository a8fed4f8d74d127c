"""A KV store as a source of blocks for the host tier."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.host.block_source import BlockSource, Prompt
from raykv.store import GuardedStore, KVKeys, is_storable

# Blocks of one call: so much is lost if it fails, and so often is said how far the read is.
_READ_BLOCKS = 16
_LOOK_BLOCKS = 256
_MAX_NAMED = 16


class StoreSource(BlockSource):
    """Reads blocks straight into the slab's rows, root first, up to the first miss.

    Args:
        store: where to read; closed with the source.
        keys: names the blocks.
    """

    name = "store"

    def __init__(self, store: GuardedStore, keys: KVKeys) -> None:
        self._store = store
        self._keys = keys
        # A key depends on all tokens before it, and a prompt is read in many steps.
        self._all_names = functools.lru_cache(_MAX_NAMED)(self._derive)
        self._counts: Counter[str] = Counter()
        self._read_s = 0.0

    async def count(self, prompt: Prompt, first_block: int) -> int:
        """See BlockSource; 0 too for weights that have no name for others."""
        num_there = 0
        for keys in _batches(self._names(prompt, first_block), _LOOK_BLOCKS):
            num_leading = leading(await self._store.contains_many(keys))
            num_there += num_leading
            if num_leading < len(keys):
                break
        self._counts["asked"] += 1
        self._counts["blocks_there"] += num_there
        return num_there

    async def read(
        self,
        prompt: Prompt,
        first_block: int,
        rows: NDArray[np.uint8],
        row_ids: NDArray[np.intp],
        on_blocks: Callable[[int], None],
    ) -> int:
        """See BlockSource."""
        names = self._names(prompt, first_block)[: len(row_ids)]
        num_read, start_s = 0, time.perf_counter()
        for keys in _batches(names, _READ_BLOCKS):
            into = [rows[row_id] for row_id in row_ids[num_read : num_read + len(keys)]]
            num_leading = leading(await self._store.get_many(keys, into))
            num_read += num_leading
            self._counts["blocks_read"] += num_leading
            on_blocks(num_read)
            if num_leading < len(keys):
                self._counts["reads_cut_short"] += 1
                break
        self._read_s += time.perf_counter() - start_s
        return num_read

    def stats(self) -> dict[str, Any]:
        """Counters since the start.

        Returns:
            ``asked``: prompts looked for; ``blocks_there``: that the store said it has;
            ``blocks_read``; ``reads_cut_short``: reads that ended at a miss; ``read_s``: seconds
            that reads took; ``is_available``: whether the store is asked; ``last_error``: text,
            None if all is well; ``store``: the store's own.
        """
        names = ("asked", "blocks_there", "blocks_read", "reads_cut_short")
        error = self._store.last_error
        return {
            **{name: self._counts[name] for name in names},
            "read_s": self._read_s,
            "is_available": self._store.is_available,
            "last_error": None if error is None else str(error),
            "store": asdict(self._store.stats()),
        }

    async def close(self) -> None:
        """See BlockSource; closes the store."""
        await self._store.close()

    def _names(self, prompt: Prompt, first_block: int) -> list[bytes]:
        """Keys of the prompt's blocks from this one on."""
        return self._all_names(prompt)[first_block:]

    def _derive(self, prompt: Prompt) -> list[bytes]:
        if not is_storable(prompt.namespace):
            return []
        return self._keys.keys(prompt.tokens, prompt.namespace)


def leading(flags: Sequence[bool]) -> int:
    """How many are set before the first that is not."""
    return flags.index(False) if False in flags else len(flags)


def _batches(keys: list[bytes], size: int) -> list[list[bytes]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]
