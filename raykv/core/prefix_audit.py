"""The audit of a prefix cache: everything it keeps, recomputed from the tree and the counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raykv.errors import IntegrityError

from .ledger import PIN, PIN_MASK
from .retired_order import RetiredFirst
from .runs import Run

if TYPE_CHECKING:
    from .prefix_cache import PrefixCache


def audit(cache: PrefixCache) -> None:
    """Compare the tree with the arrays, marks, stamps and counters.

    Raises:
        IntegrityError: something disagrees.
    """
    counts = cache._counts
    run_of = np.full_like(cache.run_of, -1)
    pins = np.zeros_like(counts)
    stretches: set[tuple[Run, int]] = set()
    runs = _runs(cache)
    for run in runs:
        ids = run.ids[: run.length]
        _require(cache._runs[run.index] is run, "a run is not at its index")
        _require(cache.roots.get(run.root.root_key) is run.root, "a run knows another root")
        _require(run.length > 0 and bool((run_of[ids] < 0).all()), "a block stands twice")
        run_of[ids] = run.index
        if run.protected and run.parent is not None and run.parent.parent is not None:
            pins[run.parent.ids[run.offset - 1]] += PIN
        stretches.update((run, stamp) for _, stamp in run.tails())
        _check_place(run, cache.block_size)
        _check_tails(run)
        _check_protected(run, counts)
    _require(np.array_equal(run_of, cache.run_of), "run_of disagrees with the tree")
    _require(stretches <= cache._order.entries(), "the eviction order misses a stretch")
    _check_retired(cache, runs)
    evictable = sum(run.length - run.protected for run in runs)
    _require(evictable == cache.num_evictable, "the count of evictable blocks is wrong")
    _require(len(cache) == int((run_of >= 0).sum()), "the count of cached blocks is wrong")
    _require(sum(run is not None for run in cache._runs) == len(runs), "a run was lost")
    got = np.where(counts > 0, counts & PIN_MASK, 0)
    _require(np.array_equal(got, pins), "the pins of children are wrong")


def _check_retired(cache: PrefixCache, runs: list[Run]) -> None:
    if isinstance(cache._order, RetiredFirst):
        versions, queued = cache._order.versions, cache._order.retired.entries()
        retired = [run for run in runs if run.root.weights_version in versions]
        stretches = {(run, stamp) for run in retired for _, stamp in run.tails()}
        _require(stretches <= queued, "a retired stretch would not go first")


def _runs(cache: PrefixCache) -> list[Run]:
    """All runs, roots left out, parents first."""
    found: list[Run] = []
    todo: list[Run] = list(cache.roots.values())
    while todo:
        run = todo.pop()
        todo += run.children.values()
        anchors: dict[int, int] = {}
        for child in run.children.values():
            anchors[child.offset] = anchors.get(child.offset, 0) + 1
        if run.anchors is not None:
            live = {offset: count for offset, count in run.anchors.counts.items() if count}
            _require(anchors == live, "the anchors of children are wrong")
            _require(run.deepest_child() == max(anchors), "the deepest child is wrong")
        if run.parent is None:
            _require(bool(run.children), "an empty root is kept")
        else:
            found.append(run)
    return found


def _check_place(run: Run, block_size: int) -> None:
    parent = run.parent
    assert parent is not None, "roots are not checked"
    limit = 0 if parent.parent is None else parent.length
    _require(len(run.key[1]) == 4 * block_size, "a key is not one block")
    _require(len(run.rest) == 4 * block_size * (run.length - 1), "tokens do not fit ids")
    _require(run.offset <= limit, "a run hangs behind its parent's end")
    _require(run.depth == parent.depth + run.offset, "a depth is wrong")
    _require(parent.children.get(run.key) is run, "a key is wrong")


def _check_protected(run: Run, counts: NDArray[np.int64]) -> None:
    held = np.flatnonzero(counts[run.ids[: run.length]] > 0)
    last = int(held[-1]) + 1 if held.size else 0
    _require(run.protected == last, "a protected mark is not at the last held block")


def _check_tails(run: Run) -> None:
    tails = run.tails()
    starts = [start for start, _ in tails]
    stamps = [stamp for _, stamp in tails]
    _require(starts == sorted(set(starts), reverse=True), "tails overlap")
    _require(stamps == sorted(set(stamps)), "a deep block is younger than a shallow one")
    _require((starts[-1] if starts else run.length) == run.protected, "tails miss a block")
    _require(not starts or starts[0] < run.length, "a tail is empty")
    parent = run.parent
    if run.protected == 0 and parent is not None and run.offset > parent.protected:
        end = parent.length
        for start, stamp in parent.tails():  # the stretch that holds the block it hangs on
            if start < run.offset <= end:
                _require(stamp > stamps[-1], "a parent was released before its child")
            end = start


def _require(condition: bool, message: str) -> None:  # noqa: FBT001
    if not condition:
        raise IntegrityError(f"prefix cache: {message}")
