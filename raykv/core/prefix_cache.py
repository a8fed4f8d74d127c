"""The prefix cache: a radix tree of runs, matched by the tokens themselves.

Closure: no ancestor of a referenced cached block is evicted, whoever holds what. Per run the
blocks ``[0, protected)`` are those that are referenced or have a referenced descendant; a run with
protected blocks adds one ``PIN`` to the count of the block it hangs on, so that "held" is simply a
count above zero, and ``protected`` ends after the run's last held block.

Eviction: the blocks behind ``protected`` form stretches stamped when they lost their last holder.
Stamps never grow with depth, within a run (a shorter hit re-stamps only the front) and across
runs (a parent is held as long as its child, and stamped after it). So a queue of stretches in
order of their stamps, each eaten from its deep end, is LRU and never evicts a parent first. Other
policies order the stretches by scores; see eviction_order.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from .eviction_order import EvictionOrder, make_order
from .ledger import PIN, Ledger
from .namespace import DEFAULT, MultimodalItems, Namespace, RootKey
from .prefix_audit import audit
from .retention import DEFAULT_RETENTION, Retention
from .retired_order import RetiredFirst
from .runs import (
    ChildKey,
    Path,
    Root,
    Run,
    content_until,
    path_ids,
    path_length,
    with_subtrees,
)
from .tokens import NO_INDEX, Index, TokenIds, as_tokens


class PrefixCache:
    """Finds cached blocks by the tokens they hold. One manager owns it and its ledger.

    Attributes:
        run_of: int32 [num_blocks], the index of the run that holds a block, -1 if none does.
        num_evictable: blocks behind their run's ``protected`` mark.
        num_evicted: blocks evicted since the start.
        roots: the trees, by tenant, LoRA and weights version.
        now_s: seconds on the owner's clock, for priorities with a time limit.
    """

    def __init__(self, ledger: Ledger, block_size: int, eviction: str = "lru") -> None:
        self.block_size = block_size
        self.run_of = np.full(len(ledger.counts), -1, np.int32)
        self.num_evictable = 0
        self.num_evicted = 0
        self._counts = ledger.counts
        self._num_cached = 0
        self.roots: dict[RootKey, Root] = {}
        self._runs: list[Run | None] = []
        self._free_indices: list[int] = []
        self._eviction = eviction
        self._order: EvictionOrder = make_order(eviction, len(ledger.counts))
        self.now_s = 0.0
        self._clock = 0  # counts releases
        self._compact_at = 64
        self._serials = itertools.count()
        # Where evicted blocks stood: (run, blocks before, tokens, items), oldest first.
        # Ordered, since a dict takes ever longer to find its first entry as old ones are deleted.
        self._ghosts: OrderedDict[tuple[Hashable, int, bytes, MultimodalItems], None] = (
            OrderedDict()
        )
        self._max_ghosts = max(64, len(ledger.counts) // 64)

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
        return self._walk(as_tokens(token_ids).data, namespace)

    def insert(
        self,
        token_ids: TokenIds,
        ids: Index,
        *,
        namespace: Namespace = DEFAULT,
        retention: Retention = DEFAULT_RETENTION,
    ) -> int:
        """Add the blocks whose content is not cached yet; return how many those are.

        Args:
            token_ids: at least ``len(ids) * block_size`` tokens; copied.
            ids: int64 [n], referenced by the caller.
            namespace: whose prefixes they are.
            retention: how dearly to keep them; what a run of blocks was given last counts.

        Raises:
            ValueError: a block to add is cached already for other tokens; nothing changed.
        """
        size, stop = self.block_size, len(ids)
        tokens = as_tokens(token_ids)[: stop * size].data
        path = self._walk(tokens, namespace)
        done = path_length(path)
        if done == stop:
            if path and retention is not DEFAULT_RETENTION:
                path[-1][0].retain(retention, self.now_s)
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
        if retention is not run.retention or retention.duration_s is not None:
            run.retain(retention, self.now_s)
        run.append(tokens[done * size :], new, namespace.items(done * size, stop * size))
        self.run_of[new] = run.index
        self._num_cached += len(new)
        self._order.published(len(new))
        if not run.protected and run.depth:
            self._counts[run.anchor()] += PIN
        run.protected = run.length
        return len(new)

    def protect(self, path: Path) -> None:
        """The blocks of the path have got a reference: they are no candidates for eviction."""
        anchors = []  # blocks that runs hang on which begin to be held; all distinct
        evictable = self.num_evictable
        parent, at = None, 0
        for run, count in path:
            protected = run.protected
            if count > protected:
                evictable -= count - protected
                if not protected and parent is not None:
                    anchors.append(parent.ids[at - 1])
                run.take_back(count)
            parent, at = run, count
        self.num_evictable = evictable
        if anchors:
            self._counts[anchors] += PIN

    def unprotect(self, ids: Index) -> None:
        """These cached blocks lost their last reference: stamp what nothing holds any more."""
        indices = self.run_of[ids]
        first = int(indices[0])
        others = indices != first
        touched = {first}
        if others[others.argmax()]:
            touched.update(np.unique(indices).tolist())
        self._let_go(touched, len(ids))

    def evict(self, num_blocks: int) -> Index:
        """Forget the least recently released evictable blocks; return their ids.

        ``num_blocks`` is at most ``num_evictable``. The ids are the caller's to free: eviction
        only drops the cache's reference (the seed's section 4.3).
        """
        evicted = []
        left = num_blocks
        victims = self._order.victims(self.now_s)
        while left:
            run, floor = next(victims)
            length = max(floor, run.length - left)
            left -= run.length - length
            self._remember(run, length)
            evicted.append(run.shrink(length))
            if length == 0:
                self._remove(run)
        ids = np.concatenate(evicted) if evicted else NO_INDEX
        self.run_of[ids] = -1
        self._num_cached -= len(ids)
        self.num_evictable -= len(ids)
        self.num_evicted += len(ids)
        return ids

    def forget(self, ids: Index) -> Index:
        """Take blocks and all that stands behind them out of the tree, whoever holds them.

        Ids that are not cached are passed over. What is held keeps its references; what is not is
        the caller's to free.

        Returns:
            The ids that were cached until now, int64 [n].
        """
        keep: dict[Run, int] = {}
        for block_id in ids[self.run_of[ids] >= 0].tolist():
            run = self._run(int(self.run_of[block_id]))
            keep[run] = min(keep.get(run, run.length), run.position(block_id))
        gone, touched = [NO_INDEX], []
        for run, length in with_subtrees(keep):
            is_held = run.protected > 0
            self.num_evictable -= run.length - max(run.protected, length)
            gone.append(run.cut(length))
            touched.append(run)
            if length == 0:
                assert run.parent is not None, "roots hold no blocks"
                if run.depth:
                    self._counts[run.anchor()] -= is_held * PIN
                    touched.append(run.parent)
                self._remove(run)
        forgotten = np.concatenate(gone)
        self.run_of[forgotten] = -1
        self._num_cached -= len(forgotten)
        self._let_go({run.index for run in touched if run.length}, len(forgotten))
        return forgotten

    def retire(self, version: int) -> int:
        """Evict what these weights computed before all else, also what is released later.

        Returns:
            Their blocks that are evictable now.
        """
        runs = [
            run for run in self._runs if run is not None and run.root.weights_version == version
        ]
        if not isinstance(self._order, RetiredFirst):
            self._order = RetiredFirst(self._order)
        self._order.retire(version, runs)
        return sum(run.length - run.protected for run in runs)

    def was_evicted(
        self, run: Run, at: int, tokens: NDArray[np.int32], items: MultimodalItems
    ) -> bool:
        """Whether this block stood behind the first ``at`` blocks of a run until it was evicted.

        Remembers a bounded number of evictions, the latest ones.
        """
        return (run.serial, at, tokens.tobytes(), items) in self._ghosts

    def clear(self) -> Index:
        """Forget everything; return the ids that were cached."""
        ids = np.flatnonzero(self.run_of >= 0)
        self.run_of[ids] = -1
        self._num_cached = self.num_evictable = 0
        self.roots.clear()
        self._runs.clear()
        self._free_indices.clear()
        self._ghosts.clear()
        before, self._order = self._order, make_order(self._eviction, len(self._counts))
        if isinstance(before, RetiredFirst):
            self._order = RetiredFirst(self._order, before.versions)
        return ids

    def content(self, block_id: int) -> tuple[TokenIds, Namespace] | None:
        """Tokens from the root to a cached block's end, and their namespace; None if absent."""
        index = int(self.run_of[block_id])
        if index < 0:
            return None
        return content_until(self._run(index), block_id)

    # -- the tree -------------------------------------------------------------------------------

    def _walk(self, tokens: memoryview, namespace: Namespace) -> Path:
        path: Path = []
        size = self.block_size
        stop, done = len(tokens) // size, 0
        root = self.roots.get(namespace.root)
        if root is None or not stop:
            return path
        run = root.children.get(self._key(tokens, 0, 0, namespace))
        while run is not None:
            following, at = None, 0
            if not namespace.multimodal:
                following, at = run.branch(tokens, done, stop, size)
            if following is None:
                at = run.common_blocks(tokens, done, stop, size, namespace)
                if run.children and done + at < stop:
                    key = self._key(tokens, done + at, at, namespace)
                    following = run.children.get(key)
            path.append((run, at))
            done += at
            run = following
        return path

    def _key(self, tokens: memoryview, block: int, at: int, namespace: Namespace) -> ChildKey:
        start = block * self.block_size
        stop = start + self.block_size
        items = namespace.items(start, stop) if namespace.multimodal else ()
        return at, tokens[start:stop].tobytes(), items

    def _run(self, index: int) -> Run:
        run = self._runs[index]
        assert run is not None, f"run {index} was removed"
        return run

    def _root(self, namespace: Namespace) -> Root:
        root = self.roots.get(namespace.root)
        if root is None:
            root = self.roots[namespace.root] = Root(namespace.root)
        return root

    def _new_run(self, parent: Run, key: ChildKey, at: int) -> Run:
        index = self._free_indices.pop() if self._free_indices else len(self._runs)
        run = Run(parent, key, parent.depth + at, index)
        if index == len(self._runs):
            self._runs.append(run)
        else:
            self._runs[index] = run
        parent.add_child(run)
        return run

    def _remove(self, run: Run) -> None:
        parent = run.parent
        assert parent is not None, "roots hold no blocks"
        assert not run.children, "a run was evicted before its children"
        assert parent.parent is None or parent.length >= run.offset, "a parent was cut first"
        parent.remove_child(run)
        self._runs[run.index] = None
        self._free_indices.append(run.index)
        self._order.child_removed(parent)
        if isinstance(parent, Root) and not parent.children:
            del self.roots[parent.root_key]

    def _let_go(self, touched: set[int], width: int) -> None:
        """Stamp what nothing holds any more in the runs with these indices, and above them.

        ``width`` is about how many blocks were let go in one run.
        """
        # Deepest first, so that a child is stamped before the parent it lets go of.
        heap = [(-run.depth, run.index) for run in map(self._run, touched)]
        heapq.heapify(heap)
        while heap:
            run = self._run(heapq.heappop(heap)[1])
            old = run.protected
            new = run.last_held(self._counts, width)
            if new == old:
                continue
            self._clock += 1
            run.let_go(new, self._clock)
            self._order.add(run, self._clock)
            self.num_evictable += old - new
            if new == 0 and run.depth:
                anchor = run.anchor()
                self._counts[anchor] -= PIN
                parent = run.parent
                assert parent is not None, "a run of some depth has a parent"
                if self._counts[anchor] == 0 and parent.index not in touched:
                    touched.add(parent.index)
                    heapq.heappush(heap, (-parent.depth, parent.index))
        if self._clock >= self._compact_at:
            # As much is released until the next time as there is to look through at this time.
            num_live = self._order.compact(run for run in self._runs if run is not None)
            self._compact_at = self._clock + 2 * max(num_live, len(self._runs)) + 64

    def _remember(self, run: Run, length: int) -> None:
        """Note what stood behind the first ``length`` blocks of a run that is being cut there."""
        after = run if length else run.parent
        assert after is not None, "roots hold no blocks"
        if after.serial is None:
            after.serial = next(self._serials)
        if length:
            start = (run.depth + length) * self.block_size
            items = tuple(i for i in run.items if start <= i[0] < start + self.block_size)
            ghost = (after.serial, length, run.block(length), items)
        else:
            ghost = (after.serial, *run.key)
        self._ghosts[ghost] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def check_integrity(self) -> None:
        """Walk the whole tree and compare it with the arrays, marks and stamps.

        Raises:
            IntegrityError: something disagrees.
        """
        audit(self)
