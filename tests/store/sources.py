"""Sources of blocks whose contents are known, and a store to fill with such."""

from __future__ import annotations

import asyncio
import threading

from raykv.core import Namespace
from raykv.store import KVKeys

from .tier_world import BLOCK_SIZE, content_of, tokens_of

KEYS = KVKeys(b"model", BLOCK_SIZE)


def fill(loop, store, *marks, but=(), namespace=None):
    """Put the blocks of a prompt, without those listed."""
    tokens, namespace = tokens_of(*marks), namespace or Namespace()
    keys = KEYS.keys(tokens, namespace)
    items = [
        (key, content_of(tokens, at, namespace)) for at, key in enumerate(keys) if at not in but
    ]
    assert all(loop.call(store.put_many(items)))


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class PatternSource:
    """Has blocks [0, num_blocks) of any prompt, but ``gap``; gives them one by one when let to."""

    name = "pattern"

    def __init__(self, num_blocks, gap=()):
        self.num_blocks = num_blocks
        self.gap = gap
        self.asked = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_free = 0  # blocks that are given at once even where it is closed
        self.is_counting = True
        self.error = None

    async def count(self, prompt, first_block):
        self.asked.append(first_block)
        if self.error is not None:
            raise self.error
        while not self.is_counting:  # noqa: ASYNC110 - another thread says so
            await asyncio.sleep(0.005)
        has = [at not in self.gap for at in range(first_block, self.num_blocks)]
        return has.index(False) if False in has else len(has)

    async def read(self, prompt, first_block, rows, row_ids, on_blocks):
        for at, row in enumerate(row_ids):
            # Another thread opens it.
            while not self.is_open.is_set() and first_block + at >= self.num_free:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            rows[row] = content_of(prompt.tokens, first_block + at, prompt.namespace)
            on_blocks(at + 1)
        return len(row_ids)

    def stats(self):
        return {"asked": len(self.asked)}

    async def close(self):
        pass
