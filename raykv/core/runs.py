"""The nodes of the prefix cache: a run is what one insertion added to the tree."""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable

import numpy as np

from .anchors import Anchors
from .namespace import MultimodalItems, Namespace, RootKey
from .retention import DEFAULT_RETENTION, Retention
from .tokens import NO_INDEX, Index, TokenIds

ChildKey = tuple[int, bytes, MultimodalItems]
"""Blocks of the parent before the child, the child's first block's tokens, and its items."""

Tails = list[tuple[int, int]]

_TOKEN_BYTES = 4
_MAX_TRIED = 4
# What most runs have none of; shared by them and never written to.
_NO_CHILDREN: dict[ChildKey, Run] = {}
_NO_TAILS: Tails = []
_NO_SCORE = -math.inf


class Run:
    """A stretch of consecutive cached blocks below one parent.

    Attributes:
        parent: the run that this one continues, None for a root.
        key: where it hangs in ``parent.children``; the one place of its first block's tokens.
        depth: blocks before the run, counted from the root.
        serial: tells it from every other run of the cache, past ones too; a root's key. None until
            something behind one of its blocks is evicted.
        index: what ``PrefixCache.run_of`` holds for its blocks.
        rest: the int32 tokens of its blocks behind the first as bytes, a copy of its own. Bytes,
            since these compare with a prompt at the speed of memcmp and without any temporary
            array.
        ids: int64 [capacity].
        length: blocks that are live; never less than any child's offset.
        items: multimodal items that begin within the run.
        children: the runs that branch off, one entry each.
        protected: leading blocks that are held: referenced, or an ancestor of a child with
            protected blocks. The blocks [protected, length) are the evictable ones; the stretch of
            them that was released last starts at ``protected``.
        stamp: of that stretch, if there is one.
        older_tails: ``(start, stamp)`` of the stretches behind it, deepest first; see ``tails``.
        anchors: where children hang; None until an eviction policy asks for the deepest.
        retention: how dearly it is kept; ``expires_s`` is when that ends.
        root: the tree it belongs to.
        score: what the eviction policy gave it last.
    """

    __slots__ = (
        "anchors", "children", "depth", "expires_s", "ids", "index", "items", "key", "length",
        "older_tails", "parent", "protected", "rest", "retention", "root", "score", "serial",
        "stamp",
    )  # fmt: skip

    def __init__(self, parent: Run | None, key: ChildKey, depth: int, index: int) -> None:
        self.parent = parent
        if parent is not None:
            self.root: Root = parent.root
        self.key = key
        self.depth = depth
        self.index = index
        self.serial: Hashable = None
        self.rest = bytearray()
        self.ids: Index = NO_INDEX
        self.length = 0
        self.items: MultimodalItems = ()
        self.children = _NO_CHILDREN
        self.protected = 0
        self.stamp = 0
        self.older_tails = _NO_TAILS
        self.anchors: Anchors | None = None
        self.retention = DEFAULT_RETENTION
        self.expires_s = math.inf
        self.score = _NO_SCORE

    @property
    def offset(self) -> int:
        """Blocks of the parent that precede the run."""
        return self.key[0]

    def anchor(self) -> int:
        """The id of the block that the run hangs on; not for the first runs below a root."""
        assert self.parent is not None, "roots hang on nothing"
        return int(self.parent.ids[self.key[0] - 1])

    def add_child(self, child: Run) -> None:
        """Hang a run below this one, at ``child.key``."""
        if self.children:
            self.children[child.key] = child
        else:
            self.children = {child.key: child}
        if self.anchors is not None:
            self.anchors.add(child.offset)

    def remove_child(self, child: Run) -> None:
        """Take a run off."""
        del self.children[child.key]
        if not self.children:
            self.children, self.anchors = _NO_CHILDREN, None
        elif self.anchors is not None:
            self.anchors.remove(child.offset)

    def deepest_child(self) -> int:
        """The largest offset of a child, 0 if there is none; amortised over their removals."""
        if not self.children:
            return 0
        if self.anchors is None:
            self.anchors = Anchors(offset for offset, _, _ in self.children)
        return self.anchors.deepest()

    def position(self, block_id: int) -> int:
        """Blocks of the run that precede this one, which is one of its live blocks."""
        return int(np.flatnonzero(self.ids[: self.length] == block_id)[0])

    def last_held(self, counts: Index, width: int) -> int:
        """Where ``protected`` belongs: behind the last held block of those it covers.

        Looks at the last ``width`` + 1 blocks, then at twice as many: what it costs depends on how
        many were let go, not on how many are held.

        Args:
            counts: per block id, above zero for what is held.
            width: about how many blocks were let go.
        """
        stop = self.protected
        width += 1
        while stop:
            start = max(0, stop - width)
            held = counts[self.ids[start:stop]][::-1] > 0
            behind = int(held.argmax())  # on booleans argmax stops at the first True
            if held[behind]:
                return stop - behind
            stop, width = start, 2 * width
        return 0

    def let_go(self, start: int, stamp: int) -> None:
        """The blocks [start, protected) have lost their last holder."""
        if self.protected < self.length:
            if self.older_tails:
                self.older_tails.append((self.protected, self.stamp))
            else:
                self.older_tails = [(self.protected, self.stamp)]
        self.protected, self.stamp = start, stamp

    def take_back(self, stop: int) -> None:
        """The leading ``stop`` blocks, more than are protected, have a holder again."""
        older = self.older_tails
        while older and older[-1][0] <= stop:
            self.stamp = older.pop()[1]
        self.protected = stop

    def retain(self, retention: Retention, now_s: float) -> None:
        """Keep the run this dearly from now on."""
        self.retention = retention
        self.expires_s = math.inf if retention.duration_s is None else now_s + retention.duration_s

    def tails(self) -> Tails:
        """``(start, stamp)`` of the evictable stretches, deepest first.

        A stretch ends where the one before it in the list starts; stamps grow along the list.
        """
        tails = list(self.older_tails)
        if self.protected < self.length:
            tails.append((self.protected, self.stamp))
        return tails

    def deepest_tail(self) -> tuple[int, int]:
        """``(start, stamp)`` of the stretch released first; starts at the end if there is none."""
        return self.older_tails[0] if self.older_tails else (self.protected, self.stamp)

    def has_tail(self, stamp: int) -> bool:
        """Whether the stretch with this stamp is still evictable."""
        if stamp >= self.stamp:
            return stamp == self.stamp and self.protected < self.length
        older = self.older_tails
        at = bisect.bisect_left(older, stamp, key=_stamp)
        return at < len(older) and older[at][1] == stamp

    def common_blocks(
        self, tokens: memoryview, start: int, stop: int, size: int, namespace: Namespace
    ) -> int:
        """How many leading blocks of the run equal blocks [start, stop) of the prompt.

        The first does: by its tokens the run was found.

        Args:
            tokens: the prompt's int32 tokens.
            start: the prompt's block that the run's first block stands for.
            stop: the prompt's end in blocks.
            size: tokens per block.
            namespace: the prompt's multimodal items.
        """
        count = min(stop - start, self.length)
        theirs = tokens[(start + 1) * size : (start + count) * size]
        if not self.rest.startswith(theirs):
            ours = np.frombuffer(self.rest, np.int32, len(theirs))
            count = 1 + int((ours != np.asarray(theirs)).argmax()) // size
        if self.items or namespace.multimodal:
            begin, end = start * size, (start + count) * size
            first = _first_difference(
                tuple(item for item in self.items if item[0] < end), namespace.items(begin, end)
            )
            if first is not None:
                count = first // size - start
        return count

    def branch(
        self, tokens: memoryview, start: int, stop: int, size: int
    ) -> tuple[Run | None, int]:
        """Where a prompt leaves the run for a child, found without looking for the difference.

        No child begins like the run itself goes on. So if the prompt is equal up to a child's
        offset and goes on like the child, that is where it leaves. Tried for few children only.
        The arguments are those of ``common_blocks``.

        Returns:
            The child and the blocks before it; None and 0 if nothing was found out.
        """
        if len(self.children) > _MAX_TRIED or self.items:
            return None, 0
        begin = start * size
        for child in self.children.values():
            at, first, items = child.key
            end = begin + at * size
            if (
                start + at < stop
                and tokens[end : end + size].tobytes() == first
                and not items
                and self.rest.startswith(tokens[begin + size : end])
            ):
                return child, at
        return None, 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return len(self.key[1]) // _TOKEN_BYTES

    def block(self, at: int) -> bytes:
        """The int32 tokens of the block behind the first ``at`` ones."""
        size = len(self.key[1])
        return bytes(self.rest[(at - 1) * size : at * size]) if at else self.key[1]

    def append(self, tokens: memoryview, ids: Index, items: MultimodalItems) -> None:
        """Add blocks at the end; capacity at least doubles, so growth costs O(1) per block.

        The first block that is ever added is the one of the key.
        """
        length = self.length + len(ids)
        if length > len(self.ids):
            # A first insertion is often the last one (a prompt), so it gets exactly its size.
            self._resize(max(length, 2 * self.length))
        self.rest += tokens if self.length else tokens[self.block_size :]
        self.ids[self.length : length] = ids
        self.items += items
        self.length = length

    def shrink(self, length: int) -> Index:
        """Cut the run to ``length`` blocks, not below ``protected``; return the ids, last first."""
        cut = self.ids[length : self.length][::-1].copy()
        if self.items:
            end = (self.depth + length) * self.block_size
            self.items = tuple(item for item in self.items if item[0] < end)
        del self.rest[max(0, length - 1) * len(self.key[1]) :]
        self.length = length
        older = self.older_tails
        while older and older[0][0] >= length:
            del older[0]
        if length * 2 < len(self.ids):
            self._resize(length)
        return cut

    def cut(self, length: int) -> Index:
        """As ``shrink``, but below ``protected`` too; the ids of what is held stay where they are.

        Handles may list them in this very array, so the run goes on in another one.
        """
        self.protected = min(self.protected, length)
        gone = self.shrink(length)
        self._resize(length)
        return gone

    def _resize(self, capacity: int) -> None:
        ids = np.empty(capacity, np.int64)
        ids[: self.length] = self.ids[: self.length]
        self.ids = ids


def _stamp(tail: tuple[int, int]) -> int:
    return tail[1]


def _first_difference(ours: MultimodalItems, theirs: MultimodalItems) -> int | None:
    """The first token offset at which two lists of items differ, None if they do not."""
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return min(mine[0], other[0])
    longer = ours if len(ours) > len(theirs) else theirs
    common = min(len(ours), len(theirs))
    return longer[common][0] if len(longer) > common else None


class Root(Run):
    """Where the runs of one tenant, LoRA and weights version hang; holds no blocks itself.

    Attributes:
        root_key: whose prefixes they are.
    """

    __slots__ = ("root_key",)

    def __init__(self, root_key: RootKey) -> None:
        super().__init__(None, (0, b"", ()), 0, -1)
        self.root = self
        self.root_key = self.serial = root_key

    @property
    def weights_version(self) -> int:
        """The version of the weights that computed its runs."""
        return self.root_key[2]


Path = list[tuple[Run, int]]
"""A match: runs from the root down, each with the number of its leading blocks that match."""


def path_length(path: Path) -> int:
    """Blocks along a match."""
    return sum(count for _, count in path)


def path_ids(path: Path) -> Index:
    """Ids along a match, int64 [n].

    May alias a run's array: its blocks keep their places there as long as somebody holds them.
    """
    if not path:
        return NO_INDEX
    if len(path) == 1:
        run, count = path[0]
        return run.ids[:count]
    return np.concatenate([run.ids[:count] for run, count in path])


def content_until(run: Run, block_id: int) -> tuple[TokenIds, Namespace]:
    """Tokens from the root to the end of one of the run's blocks, and their namespace."""
    count = run.position(block_id) + 1
    tokens, items = [], []
    while run.parent is not None:
        tokens.append(np.frombuffer(run.key[1] + run.rest, np.int32, count * run.block_size))
        end = (run.depth + count) * run.block_size
        items += [item for item in run.items if item[0] < end]
        count, run = run.offset, run.parent
    assert isinstance(run, Root), "the chain of parents ends in a root"
    return np.concatenate(tokens[::-1]), Namespace(*run.root_key, multimodal=tuple(items))


def with_subtrees(keep: dict[Run, int]) -> list[tuple[Run, int]]:
    """What cutting some runs comes to: all runs to cut, children before parents.

    Args:
        keep: how many leading blocks are to be left of each; completed.

    Returns:
        Runs, each with how many leading blocks are left; 0 where it hangs on a block that goes.
    """
    todo = list(keep)
    while todo:
        run = todo.pop()
        for child in run.children.values():
            if child.offset > keep[run] and keep.get(child) != 0:
                keep[child] = 0
                todo.append(child)
    return sorted(keep.items(), key=lambda entry: -entry[0].depth)
