"""The nodes of the prefix cache: a run is what one insertion added to the tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .namespace import MultimodalItems, Namespace, RootKey
from .tokens import BlockIds

ChildKey = tuple[int, bytes, MultimodalItems]
"""Blocks of the parent before the child, the child's first block's tokens, and its items."""

_MIN_CAPACITY = 8


class Run:
    """A stretch of consecutive cached blocks below one parent.

    Attributes:
        parent: the run that this one continues, None for a root.
        key: where it hangs in ``parent.children``.
        depth: blocks before the run, counted from the root.
        index: what ``PrefixCache.run_of`` holds for its blocks.
        tokens: int32 [capacity * block_size], a copy of its own.
        ids: int32 [capacity].
        length: blocks that are live; never less than any child's offset.
        items: multimodal items that begin within the run.
        children: the runs that branch off, one entry each.
        protected: leading blocks that are held: referenced, or an ancestor of a child with
            protected blocks. The blocks [protected, length) are the evictable ones.
        tails: ``[start, stamp]`` of the evictable stretches, deepest first. A stretch ends where
            the one before it in the list starts; stamps grow along the list.
    """

    __slots__ = (
        "children", "depth", "ids", "index", "items", "key", "length", "parent", "protected",
        "tails", "tokens",
    )  # fmt: skip

    def __init__(self, parent: Run | None, key: ChildKey, depth: int, index: int) -> None:
        self.parent = parent
        self.key = key
        self.depth = depth
        self.index = index
        self.tokens = np.empty(0, np.int32)
        self.ids = np.empty(0, np.int32)
        self.length = 0
        self.items: MultimodalItems = ()
        self.children: dict[ChildKey, Run] = {}
        self.protected = 0
        self.tails: list[list[int]] = []

    @property
    def offset(self) -> int:
        """Blocks of the parent that precede the run."""
        return self.key[0]

    def common_blocks(
        self, tokens: NDArray[np.int32], start: int, stop: int, namespace: Namespace
    ) -> int:
        """How many leading blocks of the run equal blocks [start, stop) of the prompt."""
        count = min(self.length, stop - start)
        block_size = len(self.tokens) // len(self.ids)
        begin, size = start * block_size, count * block_size
        equal = self.tokens[:size] == tokens[begin : begin + size]
        first = int(equal.argmin())
        if not equal[first]:
            count = first // block_size
        if self.items or namespace.multimodal:
            end = begin + count * block_size
            theirs = namespace.items(begin, end)
            ours = tuple(item for item in self.items if item[0] < end)
            if ours != theirs:
                different = [min(a[0], b[0]) for a, b in zip(ours, theirs, strict=False) if a != b]
                longer = max(ours, theirs, key=len)[min(len(ours), len(theirs)) :]
                first = min(different[:1] + [offset for offset, _ in longer[:1]])
                count = first // block_size - start
        return count

    def append(self, tokens: NDArray[np.int32], ids: BlockIds, items: MultimodalItems) -> None:
        """Add blocks at the end; capacity at least doubles, so growth costs O(1) per block."""
        block_size = len(tokens) // len(ids)
        length = self.length + len(ids)
        if length > len(self.ids):
            # A first insertion is often the last one (a prompt), so it gets exactly its size.
            capacity = max(length, 2 * len(self.ids), _MIN_CAPACITY if self.length else 0)
            self._resize(capacity, block_size)
        self.tokens[self.length * block_size : length * block_size] = tokens
        self.ids[self.length : length] = ids
        self.items += items
        self.length = length

    def shrink(self, length: int) -> BlockIds:
        """Cut the run to ``length`` blocks; return the ids cut off, deepest first."""
        cut = self.ids[length : self.length][::-1].copy()
        block_size = len(self.tokens) // len(self.ids)
        self.length = length
        if self.items:
            end = (self.depth + length) * block_size
            self.items = tuple(item for item in self.items if item[0] < end)
        if 0 < length * 2 < len(self.ids) and len(self.ids) > _MIN_CAPACITY:
            self._resize(length, block_size)
        return cut

    def _resize(self, capacity: int, block_size: int) -> None:
        tokens = np.empty(capacity * block_size, np.int32)
        ids = np.empty(capacity, np.int32)
        tokens[: self.length * block_size] = self.tokens[: self.length * block_size]
        ids[: self.length] = self.ids[: self.length]
        self.tokens, self.ids = tokens, ids


class Root(Run):
    """Where the runs of one tenant, LoRA and weights version hang; holds no blocks itself.

    Attributes:
        root_key: whose prefixes they are.
    """

    __slots__ = ("root_key",)

    def __init__(self, root_key: RootKey) -> None:
        super().__init__(None, (0, b"", ()), 0, -1)
        self.root_key = root_key
