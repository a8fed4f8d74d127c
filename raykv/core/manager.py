"""The interface of everything that hands out block ids (the seed's section 2.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from .namespace import DEFAULT, Namespace
from .retention import DEFAULT_RETENTION, Retention

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .blocks import Blocks
    from .tokens import BlockIds, Index, TokenIds


class AdmitRequest(NamedTuple):
    """What one sequence asks of ``BlockManager.admit``.

    Attributes:
        num_blocks: blocks wanted, those taken from the prefix cache included.
        token_ids: tokens whose cached prefix may be shared (at most ``num_blocks`` full blocks);
            None for a running sequence that only grows.
        namespace: whose prefixes may match.
    """

    num_blocks: int
    token_ids: TokenIds | None = None
    namespace: Namespace = DEFAULT


class Admitted(NamedTuple):
    """Blocks given to one sequence; the caller owes ``adopt(block_ids)`` when it is done."""

    block_ids: Index
    num_shared: int


class BlockManager(ABC):
    """Allocates physical blocks, and shares those whose content it knows."""

    block_size: int

    @abstractmethod
    def allocate(self, num_blocks: int) -> Blocks | None:
        """Take blocks off the free list, evicting just enough cached ones if it is too short.

        Returns:
            A handle with one use of each block; None if not even eviction can satisfy it, and
            then nothing was evicted and nothing changed.

        Raises:
            ValueError: ``num_blocks`` is negative.
        """

    @abstractmethod
    def admit(self, requests: Sequence[AdmitRequest]) -> list[Admitted] | None:
        """Share and allocate for several sequences at once, all or nothing.

        The hits of the whole list are held before anything is evicted for it. On failure (None)
        nothing changed, the order of eviction included.
        """

    @abstractmethod
    def adopt(self, block_ids: Iterable[int] | BlockIds | Index) -> Blocks:
        """Make a handle of uses that ``admit`` or ``Blocks.detach`` gave to the caller."""

    @abstractmethod
    def use_counts(self, block_ids: BlockIds | Index) -> NDArray[np.int64]:
        """Sequence sides that use each block, int64 [n]."""

    @abstractmethod
    def deallocate(self, blocks: Blocks) -> None:
        """Settle a handle's uses: the used count falls now, ids return with the last reference.

        Raises:
            DoubleFreeError: the handle was deallocated or released before, or is a pin.
        """

    @abstractmethod
    def allocate_shared(
        self,
        token_ids: TokenIds,
        *,
        existing: Blocks | None = None,
        namespace: Namespace = DEFAULT,
    ) -> Blocks:
        """Take the longest cached prefix of the tokens, in full blocks; maybe empty.

        Args:
            token_ids: int32 [n] or any int sequence.
            existing: blocks that the sequence has already; they come first in the result, which
                holds a reference of its own to them.
            namespace: whose prefixes may match.
        """

    @abstractmethod
    def num_matching_blocks(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> int:
        """Blocks that ``allocate_shared`` would find; takes no reference, refreshes nothing."""

    @abstractmethod
    def cache(
        self,
        token_ids: TokenIds,
        blocks: Blocks,
        *,
        num_existing_shared: int = 0,
        namespace: Namespace = DEFAULT,
        retention: Retention = DEFAULT_RETENTION,
    ) -> int:
        """Publish the full blocks of ``token_ids``, whose KV must be computed.

        A block whose content is cached already is not cached twice. ``num_existing_shared`` is a
        hint; the cache is always walked from the root. ``retention`` is a wish to the eviction
        policy "priority".

        Returns:
            How many blocks are new in the prefix cache.

        Raises:
            ValueError: a block stands in the cache for other tokens; nothing changed.
        """

    def free(self, block_id: int) -> None:
        """Return one id that nobody holds; see ``free_many``."""
        self.free_many([block_id])

    @abstractmethod
    def free_many(self, block_ids: Iterable[int] | BlockIds) -> None:
        """Return ids to the free list: what the last reference calls (the seed's section 3.1).

        Raises:
            ValueError: an id is padding or outside the pool; nothing changed.
            DoubleFreeError: an id is free already or still held; nothing changed.
        """

    @abstractmethod
    def prefix_hashes(self, token_ids: TokenIds, *, namespace: Namespace = DEFAULT) -> list[bytes]:
        """One 16-byte name per full block i, of tokens [0, (i + 1) * block_size)."""

    @property
    @abstractmethod
    def num_total_blocks(self) -> int:
        """Blocks that can be handed out: all but the padding block 0."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks on the free list."""

    @property
    @abstractmethod
    def num_used_blocks(self) -> int:
        """Blocks that a sequence side uses."""

    @property
    @abstractmethod
    def num_evictable_blocks(self) -> int:
        """Cached blocks without reference whose cached descendants have none either."""

    @property
    @abstractmethod
    def num_blocks_in_prefix_cache(self) -> int:
        """Blocks that the prefix cache holds, in use or not."""

    @property
    @abstractmethod
    def num_evicted_blocks(self) -> int:
        """Cached blocks that were taken for others since the start."""

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``allocate`` can give: free and evictable ones."""
        return self.num_free_blocks + self.num_evictable_blocks

    @property
    def kv_cache_utilization(self) -> float:
        """Used blocks over total blocks, 0 to 1."""
        return self.num_used_blocks / self.num_total_blocks

    @abstractmethod
    def reset_prefix_cache(self) -> int:
        """Forget every entry, those of blocks in use included; return how many.

        Nothing computed before the reset is ever matched again, nor what sequences that hold such
        blocks publish later (vLLM 28827).
        """

    @abstractmethod
    def retire(self, weights_version: int) -> int:
        """Let the cached blocks of this version of the weights go before all others.

        That holds for good, also for blocks that are published or released later, and under every
        eviction policy. They can be matched as long as they are there.

        Returns:
            How many of them are evictable now.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Recompute all books from scratch.

        Raises:
            IntegrityError: something disagrees.
        """
