"""The interface that schedulers see, at the level of whole sequences (the seed's section 2.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeAlias

from .explain import MissReport
from .sequence import Request, Sequence

Sequences: TypeAlias = Sequence | Request | Iterable["Sequence | Request"]
"""One sequence, a request, or any number of both."""


class Room(NamedTuple):
    """What a rank has to give: what routing looks at.

    Attributes:
        num_available_blocks: free and evictable blocks.
        num_free_blocks: blocks on the free list.
        num_free_single_blocks: sequences that can still be admitted.
    """

    num_available_blocks: int
    num_free_blocks: int
    num_free_single_blocks: int


NO_ROOM = Room(-(1 << 62), -(1 << 62), -(1 << 62))
"""Of a rank that is lost: chosen only if all are."""


class Packed:
    """Makes a frozen dataclass pickle as its class and values: several times faster."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        names: tuple[str, ...] = type(self).__slots__
        return type(self), tuple([getattr(self, name) for name in names])


@dataclass(frozen=True, slots=True)
class RankStats(Packed):
    """Counters of one rank; totals count from its start.

    Attributes:
        num_total_blocks: blocks that can be handed out.
        num_free_blocks: blocks on the free list.
        num_used_blocks: blocks that sequences use.
        num_evictable_blocks: cached blocks that allocation may take.
        num_blocks_in_prefix_cache: cached blocks, in use or not.
        num_free_single_blocks: sequences that can still be admitted.
        num_admissions_total: sequences admitted, each counted once however often preempted.
        prefix_cache_queries_total: tokens of admitted sequences that a hit could have covered.
        prefix_cache_hits_total: tokens that hits covered.
        num_evicted_blocks_total: cached blocks that were taken for others.
        num_free_state_slots: slots of recurrent state that nobody holds.
        num_live_state_slots: those of running sequences.
        num_checkpoints: those that keep the state of a cached prefix.
        state_hits_total: admissions that began from a checkpoint.
        state_checkpoints_total: checkpoints that were taken.
        state_skipped_total: checkpoints that found no slot.
        state_bytes: bytes of all checkpoints as they are kept now.
        host_hits_total: tokens that came from the host instead of being computed.
        num_loaded_blocks_total: blocks that were copied from the host.
        num_offloaded_blocks_total: blocks that were copied to the host.
        num_loading_sequences: sequences that wait for the host.
        num_offloading_blocks: blocks that are pinned until they are on the host.
        num_tier_faults_total: blocks whose copy failed, was late, stale or corrupt, and losses of
            the tier.
    """

    num_total_blocks: int = 0
    num_free_blocks: int = 0
    num_used_blocks: int = 0
    num_evictable_blocks: int = 0
    num_blocks_in_prefix_cache: int = 0
    num_free_single_blocks: int = 0
    num_admissions_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    num_evicted_blocks_total: int = 0
    num_free_state_slots: int = 0
    num_live_state_slots: int = 0
    num_checkpoints: int = 0
    state_hits_total: int = 0
    state_checkpoints_total: int = 0
    state_skipped_total: int = 0
    state_bytes: int = 0
    host_hits_total: int = 0
    num_loaded_blocks_total: int = 0
    num_offloaded_blocks_total: int = 0
    num_loading_sequences: int = 0
    num_offloading_blocks: int = 0
    num_tier_faults_total: int = 0

    @property
    def num_available_blocks(self) -> int:
        """Free and evictable blocks."""
        return self.num_free_blocks + self.num_evictable_blocks

    @property
    def room(self) -> Room:
        """What routing looks at; offloads make room where it is needed."""
        num_available = self.num_available_blocks + self.num_offloading_blocks
        return Room(num_available, self.num_free_blocks, self.num_free_single_blocks)

    @property
    def num_pending_blocks(self) -> int:
        """Blocks that are neither free, used nor evictable: a reference remains."""
        return self.num_total_blocks - self.num_used_blocks - self.num_available_blocks

    @property
    def kv_cache_usage_perc(self) -> float:
        """Used over total blocks, 0 to 1."""
        return self.num_used_blocks / self.num_total_blocks if self.num_total_blocks else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of queried tokens that hits covered, 0 to 1."""
        queries = self.prefix_cache_queries_total
        return self.prefix_cache_hits_total / queries if queries else 0.0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters of all ranks, in order of dp_rank."""

    ranks: tuple[RankStats, ...]

    @property
    def total(self) -> RankStats:
        """The sum over ranks."""
        names = [item.name for item in fields(RankStats)]
        return RankStats(**{n: sum(getattr(rank, n) for rank in self.ranks) for n in names})


class KVCacheManager(ABC):
    """Gives sequences their KV memory, shares prefixes, and takes memory back.

    Implemented by one rank (``RankKV``) and by the pool over many ranks.
    """

    @abstractmethod
    def allocate(self, sequences: Sequences, num_tokens: int | Iterable[int] | None = None) -> bool:
        """Give each sequence blocks for its first ``num_tokens`` tokens (default: all it has).

        A sequence without blocks gets a single block and its cached prefix first; at least one
        token is always left to compute. All or nothing over the list.

        Returns:
            False if memory is short: no sequence of the call holds anything new.

        Raises:
            RequestError: a sequence is empty, or longer than the pool or the model can ever hold.
        """

    def try_allocate(self, sequence: Sequence) -> bool:
        """Allocate the whole prompt at once."""
        return self.allocate(sequence)

    @abstractmethod
    def deallocate(self, sequences: Sequences) -> None:
        """Cache computed blocks, release everything, reset the sequences (the seed's section 8)."""

    @abstractmethod
    def deallocate_without_cache(self, sequences: Sequences) -> None:
        """Release everything and publish nothing; reset the sequences."""

    @abstractmethod
    def allocate_shared(self, sequence: Sequence) -> None:
        """Give the sequence its cached prefix, and a single block, and nothing else."""

    @abstractmethod
    def cache(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """Publish full blocks of the first ``num_tokens`` computed tokens (default: all)."""

    @abstractmethod
    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share its parent's computed blocks; what ``Sequence.fork`` calls."""

    @abstractmethod
    def get_swap_block_transfer_infos(self) -> list[list[tuple[int, int]]]:
        """Per rank the (source, target) block copies due before the next write.

        Handed out once, to be done in order; the blocks stay referenced until ``ack_swaps``. The
        built-in engine does this by itself.
        """

    @abstractmethod
    def ack_swaps(self) -> None:
        """All copies that were handed out are done."""

    def next_checkpoint(self, sequence: Sequence) -> int | None:  # noqa: ARG002
        """The token position of its prompt where a checkpoint of its state is due next.

        Whoever computes stops there, sets ``num_computed_tokens`` and calls ``cache``. None where
        none is due any more.
        """
        return None

    @abstractmethod
    def get_state_transfer_infos(self) -> list[list[tuple[int, int]]]:
        """Per rank the (source, target) copies of recurrent state due before the next step.

        Addresses are those of ``StateBuffers.copy``. What ``allocate`` asks for fills live slots
        from checkpoints; what ``cache`` asks for keeps the state just computed as a checkpoint, so
        fetch it before the sequence computes on; what is still due when it ends is given up.
        A live slot that nothing is copied to is not cleared: where no token is computed yet, begin
        from zeros.
        Handed out once; slots stay referenced, and checkpoints cannot be found, until
        ``ack_state_transfers``. The built-in engine does this by itself.
        """

    @abstractmethod
    def ack_state_transfers(self) -> None:
        """All copies of state that were handed out are done."""

    @abstractmethod
    def explain(self, sequence: Sequence) -> MissReport:
        """Why the sequence's last allocation hit no further.

        Raises:
            RequestError: it holds no blocks.
        """

    @abstractmethod
    def num_free_blocks(self) -> list[int]:
        """Blocks on the free list, per rank."""

    @abstractmethod
    def num_used_blocks(self) -> list[int]:
        """Blocks in use by sequences, per rank."""

    @abstractmethod
    def num_available_blocks(self) -> list[int]:
        """Free and evictable blocks, per rank."""

    @abstractmethod
    def num_blocks_in_prefix_cache(self) -> list[int]:
        """Cached blocks, per rank."""

    @abstractmethod
    def kv_cache_utilization(self) -> float:
        """Used over total blocks, 0 to 1, the mean over ranks."""

    @abstractmethod
    def reset_prefix_cache(self) -> list[int]:
        """Forget all cached prefixes; entries forgotten, per rank."""

    @abstractmethod
    def stats(self) -> PoolStats:
        """Counters of all ranks."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Recompute all books; raises IntegrityError if they do not balance."""


def flatten(sequences: Sequences) -> list[Sequence]:
    """The sequences of a call, in order.

    Raises:
        TypeError: something else was passed.
        ValueError: a sequence is listed twice.
    """
    if isinstance(sequences, Sequence):
        return [sequences]
    flat: list[Sequence] = []
    for item in [sequences] if isinstance(sequences, Request) else sequences:
        if isinstance(item, Sequence):
            flat.append(item)
        elif isinstance(item, Request):
            flat += item.sequences
        else:
            raise TypeError(f"expected a Sequence or a Request, got {type(item).__name__}")
    if len(set(flat)) != len(flat):
        raise ValueError(f"a sequence is listed twice among {len(flat)}")
    return flat


def token_targets(sequences: list[Sequence], num_tokens: int | Iterable[int] | None) -> list[int]:
    """Tokens to cover per sequence, from what a caller of ``allocate`` passed."""
    if num_tokens is None:
        return [sequence.num_tokens for sequence in sequences]
    if not isinstance(num_tokens, Iterable):
        return [int(num_tokens)] * len(sequences)
    targets = list(num_tokens)
    if len(targets) != len(sequences):
        raise ValueError(f"{len(targets)} token counts for {len(sequences)} sequences")
    return targets
