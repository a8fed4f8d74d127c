"""The ordinary allocator: free list, prefix cache, padding block (the seed's section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raykv.errors import DoubleFreeError, IntegrityError

from .base import LedgerBlockManager
from .blocks import Blocks
from .explain import MissReport, TokenRow, explain
from .ledger import PIN_MASK, REF, USE
from .manager import AdmitRequest, Admitted
from .namespace import DEFAULT, Namespace
from .prefix_cache import PrefixCache
from .retention import DEFAULT_RETENTION, Retention
from .runs import Path, Run, path_ids, path_length
from .tokens import BlockIds, Index, TokenIds, as_index, as_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


class BlockManagerImpl(LedgerBlockManager):
    """Blocks with an optional prefix cache.

    Ids are padding {0}, free, used (a sequence side holds them), pending (logically released, but
    a reference or a held descendant remains) or evictable; the states partition the ids.

    Args:
        num_blocks: blocks, the padding block included.
        block_size: tokens per block.
        enable_prefix_cache: False makes every lookup miss and every publication a no-op.
        hash_seed: the pool's secret for prefix hashes; None draws one.
        eviction: which cached blocks go first: "lru", "lrfu", "priority", or ``module:Class`` of
            an EvictionPolicy.

    Raises:
        ConfigError: impossible sizes or an unknown eviction policy.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        hash_seed: bytes | None = None,
        eviction: str = "lru",
    ) -> None:
        super().__init__(num_blocks, block_size, hash_seed)
        self.enable_prefix_cache = enable_prefix_cache
        self._cache = PrefixCache(self._ledger, block_size, eviction)
        # Blocks that were held when they were forgotten, at the last reset or one by one, and not
        # freed since: True per id. None as long as there are none, so that sequences pay nothing.
        self._stale: NDArray[np.bool_] | None = None

    def admit(self, requests: Sequence[AdmitRequest]) -> list[Admitted] | None:
        """See BlockManager."""
        self._begin_admission(requests)
        paths = [self._path(request) for request in requests]
        wanted = sum(request.num_blocks for request in requests) - sum(map(path_length, paths))
        if wanted > self._ledger.num_free + self._cache.num_evictable - _newly_held(paths):
            return None
        return self._grant(requests, [self._hold(path) for path in paths])

    def allocate_shared(
        self,
        token_ids: TokenIds,
        *,
        existing: Blocks | None = None,
        namespace: Namespace = DEFAULT,
    ) -> Blocks:
        """See BlockManager."""
        if existing is not None:
            return self._share_more(token_ids, existing, namespace)
        self._settle_dropped()
        path = self._cache.find(token_ids, namespace) if self.enable_prefix_cache else []
        return Blocks(self, self._hold(path), USE + REF)

    def num_matching_blocks(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> int:
        """See BlockManager."""
        if not self.enable_prefix_cache:
            return 0
        return path_length(self._cache.find(token_ids, namespace))

    def matching_ids(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> Index:
        """Ids of the longest cached prefix, int64 [n]; holds none of them, changes nothing."""
        return self._cache.match(token_ids, namespace=namespace)

    def cache(
        self,
        token_ids: TokenIds,
        blocks: Blocks,
        *,
        num_existing_shared: int = 0,  # noqa: ARG002 - the walk costs microseconds, a wrong hint a wrong hit
        namespace: Namespace = DEFAULT,
        retention: Retention = DEFAULT_RETENTION,
    ) -> int:
        """See BlockManager."""
        self._own(blocks)
        self._settle_dropped()
        tokens = as_tokens(token_ids)
        ids = blocks.index[: len(tokens) // self.block_size]
        if self._stale is not None:
            stale = self._stale[ids]
            if stale.any():
                ids = ids[: int(stale.argmax())]
        if not self.enable_prefix_cache or not len(ids):
            return 0
        if not blocks.is_unique and len(np.unique(ids)) < len(ids):
            raise ValueError(f"a block is listed twice among the {len(ids)} blocks to publish")
        return self._cache.insert(tokens, ids, namespace=namespace, retention=retention)

    def explain(
        self,
        token_ids: TokenIds,
        num_hit_blocks: int,
        *,
        namespace: Namespace = DEFAULT,
        others: Iterable[TokenRow] = (),
    ) -> MissReport:
        """Why a prompt's hit ended where it did.

        Args:
            token_ids: the prompt.
            num_hit_blocks: blocks that ``allocate_shared`` or ``admit`` found for it.
            namespace: whose it is.
            others: running sequences that were admitted before it.
        """
        tokens = as_tokens(token_ids)
        if not self.enable_prefix_cache:
            return MissReport("cache_off", 0, 0)
        return explain(self._cache, tokens, namespace, num_hit_blocks, others)

    def set_time(self, now_s: float) -> None:
        """Tell the time, seconds on any clock, for retention priorities that end."""
        self._cache.now_s = now_s

    def reset_prefix_cache(self) -> int:
        """See BlockManager."""
        self._settle_dropped()
        counts = self._ledger.counts
        ids = self._cache.clear()
        counts[ids] &= ~PIN_MASK
        self._give_back(ids[counts[ids] == 0])
        stale = counts > 0
        self._stale = stale if stale.any() else None
        return len(ids)

    def forget(self, block_ids: Iterable[int] | BlockIds | Index) -> Index:
        """Take blocks, and all cached ones behind them, out of the prefix cache.

        For content that turned out to be wrong, or that never came. None of them is ever matched
        again. Those that nobody holds are free now; others are when they are let go, and until
        then they cannot be published again. Ids that are not cached are passed over.

        Returns:
            The ids that were cached until now, int64 [n].

        Raises:
            ValueError: an id is outside the pool; nothing changed.
        """
        self._settle_dropped()
        ids, counts = as_index(block_ids), self._ledger.counts
        outside = ids[(ids < 0) | (ids >= len(counts))]
        if outside.size:
            raise ValueError(
                f"block {outside[0]} cannot be forgotten: ids are 1..{len(counts) - 1}"
            )
        forgotten = self._cache.forget(ids)
        held = counts[forgotten] > 0
        self._give_back(forgotten[~held])
        if held.any():
            if self._stale is None:
                self._stale = np.zeros(len(counts), np.bool_)
            self._stale[forgotten[held]] = True
        return forgotten

    def is_cached(self, block_ids: BlockIds | Index) -> NDArray[np.bool_]:
        """Whether the prefix cache holds each block, bool [n]."""
        return self._cache.run_of[block_ids] >= 0

    def ref_counts(self, ids: Index) -> NDArray[np.int32]:
        """int32 [n]: live handles per id, plus one where the prefix cache holds it."""
        return super().ref_counts(ids) + (self._cache.run_of[ids] >= 0)

    def hash_of(self, block_id: int) -> bytes | None:
        """The prefix hash of a cached block, else None."""
        content = self._cache.content(block_id)
        if content is None:
            return None
        tokens, namespace = content
        return self.prefix_hashes(tokens, namespace=namespace)[-1]

    def retire(self, weights_version: int) -> int:
        """See BlockManager."""
        self._settle_dropped()
        return self._cache.retire(weights_version)

    @property
    def num_evictable_blocks(self) -> int:
        """See BlockManager."""
        self._settle_dropped()
        return self._cache.num_evictable

    @property
    def num_blocks_in_prefix_cache(self) -> int:
        """See BlockManager."""
        return len(self._cache)

    @property
    def num_evicted_blocks(self) -> int:
        """See BlockManager."""
        return self._cache.num_evicted

    def check_integrity(self) -> None:
        """See BlockManager."""
        super().check_integrity()
        self._cache.check_integrity()
        counts, cached = self._ledger.counts, self._cache.run_of >= 0
        if (counts[cached] < 0).any():
            raise IntegrityError("a cached block is on the free list")
        if ((counts == 0) & ~cached).any():
            raise IntegrityError("a block that nobody holds is neither cached nor free")
        if self._stale is not None and (cached | (counts <= 0))[self._stale].any():
            raise IntegrityError("a stale block is free or cached")

    def _path(self, request: AdmitRequest) -> Path:
        if request.token_ids is None or not self.enable_prefix_cache:
            return []
        tokens = as_tokens(request.token_ids)[: request.num_blocks * self.block_size]
        return self._cache.find(tokens, request.namespace)

    def _make_room(self, num_blocks: int) -> bool:
        short = num_blocks - self._ledger.num_free
        if short <= 0:
            return True
        if short > self._cache.num_evictable:
            return False
        self._give_back(self._cache.evict(short))
        return True

    def _share_more(self, token_ids: TokenIds, existing: Blocks, namespace: Namespace) -> Blocks:
        """Existing blocks, then what the cache has behind as many."""
        start = super().allocate_shared(token_ids, existing=existing, namespace=namespace)
        path = self._cache.find(token_ids, namespace) if self.enable_prefix_cache else []
        ids = path_ids(path)[len(start) :]
        if not len(ids):
            return start
        self._ledger.add(ids, USE + REF)
        self._cache.protect(path)
        return Blocks.concat((start, Blocks(self, ids, USE + REF)))

    def _hold(self, path: Path) -> Index:
        """Take one use of each block along a match."""
        ids = path_ids(path)
        if path:
            self._ledger.add(ids, USE + REF)
            self._cache.protect(path)
        return ids

    def _unreferenced(self, ids: Index) -> None:
        cached = self._cache.run_of[ids] >= 0
        if cached[cached.argmin()]:  # all of them
            self._cache.unprotect(ids)
            return
        self._give_back(ids[~cached])
        if cached[cached.argmax()]:  # any of them
            self._cache.unprotect(ids[cached])

    def _check_returnable(self, ids: Index) -> None:
        cached = self._cache.run_of[ids] >= 0
        if cached.any():
            raise DoubleFreeError(
                f"block {ids[cached][0]} is held by the prefix cache: it returns by eviction"
            )

    def _give_back(self, ids: Index) -> None:
        super()._give_back(ids)
        if self._stale is not None:
            self._stale[ids] = False
            if not self._stale.any():
                self._stale = None


def _newly_held(paths: list[Path]) -> int:
    """Evictable blocks that holding all the matches would take away, shared ones counted once."""
    held: dict[Run, int] = {}
    total = 0
    for path in paths:
        for run, count in path:
            before = held.get(run, run.protected)
            if count > before:
                held[run] = count
                total += count - before
    return total
