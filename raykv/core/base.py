"""What all managers over one ledger share: handles, references, the free list."""

from __future__ import annotations

import operator
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from raykv.errors import ConfigError

from .blocks import Blocks
from .ledger import REF, REF_MASK, USE, Ledger
from .manager import AdmitRequest, Admitted, BlockManager
from .namespace import DEFAULT, Namespace
from .prefix_hash import PrefixHasher
from .retention import DEFAULT_RETENTION, Retention
from .tokens import NO_INDEX, BlockIds, Index, TokenIds, as_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


class LedgerBlockManager(BlockManager):
    """A manager without prefix cache; subclasses say where more room comes from.

    Attributes:
        block_size: tokens per block.
        hasher: names prefixes.
        dropped: what garbage-collected handles held, as (ids, weight, unique). Finalisers only
            append here, since collection can strike in the middle of an update and in any thread;
            every operation and every read of a counter settles it first.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_seed: bytes | None = None) -> None:
        if not isinstance(block_size, int) or not 1 <= block_size < 1 << 31:
            raise ConfigError(
                f"block_size is {block_size!r} tokens, but must be a whole number of at least 1"
            )
        self.block_size = block_size
        self.dropped: deque[tuple[Index, int, bool]] = deque()
        self._ledger = Ledger(num_blocks)
        self.hasher = PrefixHasher(block_size, hash_seed)

    # -- what sequences call --------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> Blocks | None:
        """See BlockManager."""
        self._settle_dropped()
        num_blocks = operator.index(num_blocks)  # a float would poison the counters
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if not num_blocks:
            return Blocks(self, NO_INDEX, USE + REF)
        if not self._make_room(num_blocks):
            return None
        return Blocks(self, self._ledger.take(num_blocks), USE + REF)

    def admit(self, requests: Sequence[AdmitRequest]) -> list[Admitted] | None:
        """See BlockManager."""
        self._begin_admission(requests)
        return self._grant(requests, [NO_INDEX] * len(requests))

    def adopt(self, block_ids: Iterable[int] | BlockIds | Index) -> Blocks:
        """See BlockManager."""
        return Blocks(self, as_index(block_ids), USE + REF)

    def pin(self, block_ids: Index) -> Blocks:
        """A pin of blocks that somebody holds; see ``Blocks.pin``."""
        return self.make_handle(block_ids, REF)

    def use_counts(self, block_ids: BlockIds | Index) -> NDArray[np.int64]:
        """See BlockManager."""
        self._settle_dropped()
        return np.maximum(self._ledger.counts[block_ids], 0) // USE

    def deallocate(self, blocks: Blocks) -> None:
        """See BlockManager."""
        self._own(blocks)
        blocks.settle()

    def allocate_shared(
        self,
        token_ids: TokenIds,  # noqa: ARG002 - no cache to look into
        *,
        existing: Blocks | None = None,
        namespace: Namespace = DEFAULT,  # noqa: ARG002
    ) -> Blocks:
        """Without a prefix cache: just ``existing``."""
        if existing is None:
            return self.adopt(NO_INDEX)
        return self.make_handle(self._own(existing).index, USE + REF, unique=existing.is_unique)

    def num_matching_blocks(
        self,
        token_ids: TokenIds,  # noqa: ARG002 - no cache to look into
        *,
        namespace: Namespace = DEFAULT,  # noqa: ARG002
    ) -> int:
        """Without a prefix cache: 0."""
        return 0

    def cache(
        self,
        token_ids: TokenIds,  # noqa: ARG002 - no cache to publish to
        blocks: Blocks,
        *,
        num_existing_shared: int = 0,  # noqa: ARG002
        namespace: Namespace = DEFAULT,  # noqa: ARG002
        retention: Retention = DEFAULT_RETENTION,  # noqa: ARG002
    ) -> int:
        """Without a prefix cache: nothing, 0."""
        self._own(blocks)
        return 0

    def free_many(self, block_ids: Iterable[int] | BlockIds) -> None:
        """See BlockManager."""
        self._settle_dropped()
        ids = np.asarray(block_ids if isinstance(block_ids, np.ndarray) else list(block_ids))
        if ids.size:
            self._ledger.check_returnable(ids)
            self._check_returnable(ids)
            self._give_back(ids.astype(np.int64))

    def prefix_hashes(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> list[bytes]:
        """See BlockManager."""
        return self.hasher.names(token_ids, namespace=namespace)

    # -- what handles call ----------------------------------------------------------------------

    def make_handle(self, ids: Index, weight: int, *, unique: bool = True) -> Blocks:
        """One more handle of blocks that are held by one already."""
        self._settle_dropped()
        if weight:
            self._ledger.add(ids, weight, unique=unique)
        return Blocks(self, ids, weight, unique=unique)

    def drop(self, ids: Index, weight: int, *, unique: bool) -> None:
        """Take a handle's references or uses off the books."""
        self._settle_dropped()
        self._drop(ids, weight, unique)

    def ref_counts(self, ids: Index) -> NDArray[np.int32]:
        """int32 [n]: live handles per id."""
        self._settle_dropped()
        return (np.maximum(self._ledger.counts[ids], 0) & REF_MASK).astype(np.int32)

    def hash_of(self, block_id: int) -> bytes | None:  # noqa: ARG002 - nothing is cached
        """The prefix hash of a cached block, else None."""
        return None

    # -- counters -------------------------------------------------------------------------------

    @property
    def num_total_blocks(self) -> int:
        """See BlockManager."""
        return self._ledger.num_total

    @property
    def num_free_blocks(self) -> int:
        """See BlockManager."""
        self._settle_dropped()
        return self._ledger.num_free

    @property
    def num_used_blocks(self) -> int:
        """See BlockManager."""
        self._settle_dropped()
        return self._ledger.num_used

    @property
    def num_evictable_blocks(self) -> int:
        """Without a prefix cache: 0."""
        return 0

    @property
    def num_blocks_in_prefix_cache(self) -> int:
        """Without a prefix cache: 0."""
        return 0

    @property
    def num_evicted_blocks(self) -> int:
        """Without a prefix cache: 0."""
        return 0

    def retire(self, weights_version: int) -> int:  # noqa: ARG002 - nothing is cached
        """Without a prefix cache: nothing, 0."""
        return 0

    def reset_prefix_cache(self) -> int:
        """Without a prefix cache: nothing, 0."""
        return 0

    def check_integrity(self) -> None:
        """See BlockManager."""
        self._settle_dropped()
        self._ledger.check_integrity()

    # -- for subclasses -------------------------------------------------------------------------

    def _make_room(self, num_blocks: int) -> bool:
        """Bring the free list to at least ``num_blocks`` ids, or change nothing."""
        return num_blocks <= self._ledger.num_free

    def _unreferenced(self, ids: Index) -> None:
        """The last handle of these ids is gone."""
        self._give_back(ids)

    def _check_returnable(self, ids: Index) -> None:
        """Raise DoubleFreeError if anything but a handle holds one of the ids."""

    def _give_back(self, ids: Index) -> None:
        self._ledger.give_back(ids)

    def _begin_admission(self, requests: Sequence[AdmitRequest]) -> None:
        self._settle_dropped()
        for request in requests:
            if request.num_blocks < 0:
                raise ValueError(f"cannot admit {request.num_blocks} blocks")

    def _grant(
        self, requests: Sequence[AdmitRequest], shared: list[Index]
    ) -> list[Admitted] | None:
        """Complete each request's shared ids with fresh ones, in one step for all."""
        wanted = [
            request.num_blocks - len(ids) for request, ids in zip(requests, shared, strict=True)
        ]
        if not self._make_room(sum(wanted)):
            return None
        fresh = self._ledger.take(sum(wanted))
        granted, start = [], 0
        for ids, count in zip(shared, wanted, strict=True):
            new = fresh[start : start + count]
            start += count
            granted.append(Admitted(np.concatenate((ids, new)) if len(ids) else new, len(ids)))
        return granted

    def _drop(self, ids: Index, weight: int, unique: bool) -> None:  # noqa: FBT001
        unreferenced = self._ledger.subtract(ids, weight, unique=unique)
        if len(unreferenced):
            self._unreferenced(unreferenced)

    def _settle_dropped(self) -> None:
        while self.dropped:
            self._drop(*self.dropped.popleft())

    def _own(self, blocks: Blocks) -> Blocks:
        if blocks.manager is not self:
            raise ValueError(f"{blocks!r} belongs to another manager")
        return blocks
