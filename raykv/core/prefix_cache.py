"""The prefix cache: a radix tree of runs, matched by the tokens themselves.

Closure: no ancestor of a referenced cached block is evicted, whoever holds what. Per run the
blocks ``[0, protected)`` are those that are referenced or have a referenced descendant; a run with
protected blocks adds one ``PIN`` to the count of the block it hangs on, so that "held" is simply a
count above zero, and ``protected`` ends after the run's last held block.

Eviction: the blocks behind ``protected`` form stretches stamped when they lost their last holder.
Stamps never grow with depth, within a run (a shorter hit re-stamps only the front) and across
runs (a parent is held as long as its child, and stamped after it). So a queue of stretches in
order of their stamps, each eaten from its deep end, is LRU and never evicts a parent first.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
from numpy.typing import NDArray

from raykv.errors import IntegrityError

from .ledger import PIN, Ledger
from .namespace import DEFAULT, Namespace, RootKey
from .runs import ChildKey, Root, Run
from .tokens import NO_INDEX, Index, TokenIds, as_tokens

Path = list[tuple[Run, int]]
"""A match: runs from the root down, each with the number of its leading blocks that match."""


class PrefixCache:
    """Finds cached blocks by the tokens they hold. One manager owns it and its ledger.

    Attributes:
        run_of: int32 [num_blocks], the index of the run that holds a block, -1 if none does.
        num_evictable: blocks behind their run's ``protected`` mark.
    """

    def __init__(self, ledger: Ledger, block_size: int) -> None:
        self.block_size = block_size
        self.run_of = np.full(len(ledger.counts), -1, np.int32)
        self.num_evictable = 0
        self._counts = ledger.counts
        self._num_cached = 0
        self._roots: dict[RootKey, Root] = {}
        self._runs: list[Run | None] = []
        self._free_indices: list[int] = []
        self._queue: deque[tuple[Run, int]] = deque()  # (run, stamp), oldest first, some stale
        self._num_tails = 0
        self._clock = 0

    def __len__(self) -> int:
        return self._num_cached

    def match(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> Index:
        """Ids of the longest cached prefix, int64 [n]; takes no reference, changes nothing."""
        return path_ids(self.find(token_ids, namespace)).copy()

    def contains(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> bool:
        """Whether every full block of the tokens is cached, and there is one."""
        num_blocks = len(as_tokens(token_ids)) // self.block_size
        return 0 < num_blocks == path_length(self.find(token_ids, namespace))

    def find(self, token_ids: TokenIds, namespace: Namespace = DEFAULT) -> Path:
        """Walk down from the root as far as whole blocks of tokens are equal."""
        return self._walk(as_tokens(token_ids), namespace)

    def insert(self, token_ids: TokenIds, ids: Index, *, namespace: Namespace = DEFAULT) -> int:
        """Add the blocks whose content is not cached yet; return how many those are.

        Args:
            token_ids: at least ``len(ids) * block_size`` tokens; copied.
            ids: int64 [n], referenced by the caller.
            namespace: whose prefixes they are.

        Raises:
            ValueError: a block to add is cached already for other tokens; nothing changed.
        """
        size, stop = self.block_size, len(ids)
        tokens = as_tokens(token_ids)[: stop * size]
        path = self._walk(tokens, namespace)
        done = path_length(path)
        if done == stop:
            return 0
        new = ids[done:]
        cached = self.run_of[new] >= 0
        if cached[cached.argmax()]:
            raise ValueError(
                f"block {new[cached][0]} is cached already for other tokens: pass the tokens that "
                "its sequence computed"
            )
        self.protect(path)
        run: Run
        run, at = path[-1] if path else (self._root(namespace), 0)
        if run.parent is None or at < run.length:
            run = self._new_run(run, self._key(tokens, done, at, namespace), at)
        run.append(tokens[done * size :], new, namespace.items(done * size, stop * size))
        self.run_of[new] = run.index
        self._num_cached += len(new)
        self._hold_parent(run)
        run.protected = run.length
        return len(new)

    def protect(self, path: Path) -> None:
        """The blocks of the path have got a reference: they are no candidates for eviction."""
        for run, count in path:
            if count <= run.protected:
                continue
            self.num_evictable -= count - run.protected
            end = run.length
            for index, (start, _) in enumerate(run.tails):
                if start < count:
                    keep = index + (end > count)
                    if end > count:
                        run.tails[index][0] = count
                    self._num_tails -= len(run.tails) - keep
                    del run.tails[keep:]
                    break
                end = start
            self._hold_parent(run)
            run.protected = count

    def unprotect(self, ids: Index) -> None:
        """These cached blocks lost their last reference: stamp what nothing holds any more."""
        indices = self.run_of[ids]
        first = int(indices[0])
        others = indices != first
        touched = {first}
        if others[others.argmax()]:
            touched.update(np.unique(indices).tolist())
        # Deepest first, so that a child is stamped before the parent it lets go of.
        heap = [(-run.depth, run.index) for run in map(self._run, touched)]
        heapq.heapify(heap)
        while heap:
            run = self._run(heapq.heappop(heap)[1])
            old = run.protected
            new = self._last_held(run)
            if new == old:
                continue
            self._clock += 1
            run.tails.append([new, self._clock])
            self._num_tails += 1
            self._queue.append((run, self._clock))
            self.num_evictable += old - new
            run.protected = new
            parent = run.parent
            if new == 0 and parent is not None and parent.parent is not None:
                anchor = parent.ids[run.offset - 1]
                self._counts[anchor] -= PIN
                if self._counts[anchor] == 0 and parent.index not in touched:
                    touched.add(parent.index)
                    heapq.heappush(heap, (-parent.depth, parent.index))
        if len(self._queue) > 2 * self._num_tails + 64:
            self._compact()

    def evict(self, num_blocks: int) -> Index:
        """Forget the least recently released evictable blocks; return their ids.

        ``num_blocks`` is at most ``num_evictable``. The ids are the caller's to free: eviction
        only drops the cache's reference (the seed's section 4.3).
        """
        evicted = []
        left = num_blocks
        while left:
            run, stamp = self._queue[0]
            if not run.tails or run.tails[0][1] != stamp:
                self._queue.popleft()  # stale: held again since
                continue
            start = run.tails[0][0]
            length = max(start, run.length - left)
            left -= run.length - length
            evicted.append(run.shrink(length))
            if length == start:
                self._queue.popleft()
                del run.tails[0]
                self._num_tails -= 1
            if length == 0:
                self._remove(run)
        ids = np.concatenate(evicted) if evicted else NO_INDEX
        self.run_of[ids] = -1
        self._num_cached -= len(ids)
        self.num_evictable -= len(ids)
        return ids

    def clear(self) -> Index:
        """Forget everything; return the ids that were cached."""
        ids = np.flatnonzero(self.run_of >= 0)
        self.run_of[ids] = -1
        self._num_cached = self.num_evictable = self._num_tails = 0
        self._roots.clear()
        self._runs.clear()
        self._free_indices.clear()
        self._queue.clear()
        return ids

    def content(self, block_id: int) -> tuple[TokenIds, Namespace] | None:
        """Tokens from the root to a cached block's end, and their namespace; None if absent."""
        index = int(self.run_of[block_id])
        if index < 0:
            return None
        run: Run = self._run(index)
        count = int(np.flatnonzero(run.ids[: run.length] == block_id)[0]) + 1
        tokens, items = [], []
        while run.parent is not None:
            tokens.append(np.frombuffer(bytes(run.tokens), np.int32, count * self.block_size))
            end = (run.depth + count) * self.block_size
            items += [item for item in run.items if item[0] < end]
            count, run = run.offset, run.parent
        assert isinstance(run, Root), "the chain of parents ends in a root"
        return np.concatenate(tokens[::-1]), Namespace(*run.root_key, multimodal=tuple(items))

    # -- the tree -------------------------------------------------------------------------------

    def _walk(self, tokens: NDArray[np.int32], namespace: Namespace) -> Path:
        path: Path = []
        run: Run | None = self._roots.get(namespace.root)
        if run is None:
            return path
        size = self.block_size
        stop, done, at = len(tokens) // size, 0, 0
        while done < stop:
            child = run.children.get(self._key(tokens, done, at, namespace))
            if child is None:
                break
            at = child.common_blocks(tokens, done, stop, size, namespace)
            path.append((child, at))
            done += at
            run = child
        return path

    def _key(
        self, tokens: NDArray[np.int32], block: int, at: int, namespace: Namespace
    ) -> ChildKey:
        start = block * self.block_size
        stop = start + self.block_size
        items = namespace.items(start, stop) if namespace.multimodal else ()
        return at, tokens[start:stop].tobytes(), items

    def _run(self, index: int) -> Run:
        run = self._runs[index]
        assert run is not None, f"run {index} was removed"
        return run

    def _root(self, namespace: Namespace) -> Root:
        root = self._roots.get(namespace.root)
        if root is None:
            root = self._roots[namespace.root] = Root(namespace.root)
        return root

    def _new_run(self, parent: Run, key: ChildKey, at: int) -> Run:
        index = self._free_indices.pop() if self._free_indices else len(self._runs)
        run = Run(parent, key, parent.depth + at, index)
        if index == len(self._runs):
            self._runs.append(run)
        else:
            self._runs[index] = run
        parent.children[key] = run
        return run

    def _remove(self, run: Run) -> None:
        parent = run.parent
        assert parent is not None, "roots hold no blocks"
        assert not run.children, "a run was evicted before its children"
        assert parent.parent is None or parent.length >= run.offset, "a parent was cut first"
        del parent.children[run.key]
        self._runs[run.index] = None
        self._free_indices.append(run.index)
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.root_key]

    def _last_held(self, run: Run) -> int:
        """Where ``protected`` belongs: behind the last held block of those it covers."""
        if run.protected == 0:
            return 0
        held = self._counts[run.ids[: run.protected]][::-1] > 0
        behind = int(held.argmax())  # on booleans argmax stops at the first True
        return run.protected - behind if held[behind] else 0

    def _hold_parent(self, run: Run) -> None:
        """Call before ``protected`` rises: a run that begins to be held holds its parent."""
        parent = run.parent
        if run.protected == 0 and parent is not None and parent.parent is not None:
            self._counts[parent.ids[run.offset - 1]] += PIN

    def _compact(self) -> None:
        """Drop stale queue entries; amortised over the entries that made it necessary."""
        live = {stamp for run in self._runs if run is not None for _, stamp in run.tails}
        self._queue = deque(entry for entry in self._queue if entry[1] in live)

    # -- audit ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Walk the whole tree and compare it with the arrays, marks, stamps and the queue.

        Raises:
            IntegrityError: something disagrees.
        """
        run_of = np.full_like(self.run_of, -1)
        pins = np.zeros_like(self._counts)
        live: list[tuple[int, Run]] = []
        evictable = 0
        todo: list[Run] = list(self._roots.values())
        while todo:
            run = todo.pop()
            todo += run.children.values()
            if run.parent is None:
                _require(bool(run.children), "an empty root is kept")
                continue
            ids = run.ids[: run.length]
            _require(self._runs[run.index] is run, "a run is not at its index")
            _require(run.length > 0 and bool((run_of[ids] < 0).all()), "a block stands twice")
            run_of[ids] = run.index
            _require(run.block_size == self.block_size, "tokens do not fit ids")
            parent = run.parent
            limit = 0 if parent.parent is None else parent.length
            _require(run.offset <= limit, "a run hangs behind its parent's end")
            _require(run.depth == parent.depth + run.offset, "a depth is wrong")
            first = bytes(run.tokens[: 4 * self.block_size])
            _require(parent.children.get(run.key) is run and run.key[1] == first, "a key is wrong")
            if run.protected and parent.parent is not None:
                pins[parent.ids[run.offset - 1]] += PIN
            evictable += run.length - run.protected
            live += [(stamp, run) for _, stamp in run.tails]
            self._check_tails(run)
        for run in filter(None, self._runs):
            held = np.flatnonzero(self._counts[run.ids[: run.length]] > 0)
            last = int(held[-1]) + 1 if held.size else 0
            _require(run.protected == last, "a protected mark is not at the last held block")
        queue = [
            (stamp, run) for run, stamp in self._queue if [stamp] in [[s] for _, s in run.tails]
        ]
        _require(queue == sorted(live, key=lambda tail: tail[0]), "the queue misses a tail")
        _require(np.array_equal(run_of, self.run_of), "run_of disagrees with the tree")
        _require(len(live) == self._num_tails, "the count of tails is wrong")
        _require(evictable == self.num_evictable, "the count of evictable blocks is wrong")
        cached = run_of >= 0
        _require(self._num_cached == int(cached.sum()), "the count of cached blocks is wrong")
        got = np.where(self._counts > 0, self._counts & (((1 << 21) - 1) * PIN), 0)
        _require(np.array_equal(got, pins), "the pins of children are wrong")

    def _check_tails(self, run: Run) -> None:
        starts = [start for start, _ in run.tails]
        stamps = [stamp for _, stamp in run.tails]
        _require(starts == sorted(set(starts), reverse=True), "tails overlap")
        _require(stamps == sorted(set(stamps)), "a deep block is younger than a shallow one")
        _require((starts[-1] if starts else run.length) == run.protected, "tails miss a block")
        _require(not starts or starts[0] < run.length, "a tail is empty")
        parent = run.parent
        if run.protected == 0 and parent is not None and run.offset > parent.protected:
            end = parent.length
            for start, stamp in parent.tails:  # the stretch that holds the block it hangs on
                if start < run.offset <= end:
                    _require(stamp > stamps[-1], "a parent would be evicted before its child")
                end = start


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


def _require(condition: bool, message: str) -> None:  # noqa: FBT001
    if not condition:
        raise IntegrityError(f"prefix cache: {message}")
