"""What one rank counts, in the shapes that pools, routing and people want."""

from __future__ import annotations

from dataclasses import replace

from raykv.core.block_manager import BlockManagerImpl
from raykv.core.kv_cache_manager import KVCacheManager, PoolStats, RankStats, Room
from raykv.core.single import SingleBlockManager
from raykv.memory.state_buffers import StateBuffers
from raykv.rank_states import RankStates
from raykv.tiering.rank_tier import RankTier


class RankCounters(KVCacheManager):
    """The counters of a RankKV.

    Attributes:
        block_manager: hands out KV blocks.
        single_block_manager: hands out rows of the block table, one per sequence.
        states: recurrent state; None where sequences have none.
    """

    block_manager: BlockManagerImpl
    single_block_manager: SingleBlockManager
    states: RankStates | None
    tier: RankTier | None
    _num_host_hit: int
    _num_admissions: int = 0
    _num_queried: int = 0
    _num_hit: int = 0

    def num_free_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [self.block_manager.num_free_blocks]

    def num_used_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [self.block_manager.num_used_blocks]

    def num_available_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [self.block_manager.num_available_blocks]

    def num_blocks_in_prefix_cache(self) -> list[int]:
        """See KVCacheManager."""
        return [self.block_manager.num_blocks_in_prefix_cache]

    def kv_cache_utilization(self) -> float:
        """See KVCacheManager."""
        return self.block_manager.kv_cache_utilization

    @property
    def state_buffers(self) -> StateBuffers | None:
        """The memory of recurrent state; None where only books are kept, or there is none."""
        return None if self.states is None else self.states.buffers

    @property
    def room(self) -> Room:
        """What routing looks at; cheaper than all counters."""
        manager = self.block_manager
        num_free = manager.num_free_blocks
        num_available = num_free + manager.num_evictable_blocks
        if self.tier is not None:  # offloads make room where it is needed
            num_available += self.tier.num_offloading_blocks
        return Room(num_available, num_free, self._num_free_singles)

    def rank_stats(self) -> RankStats:
        """This rank's counters."""
        manager, states = self.block_manager, self.states
        stats = RankStats(
            num_total_blocks=manager.num_total_blocks,
            num_free_blocks=manager.num_free_blocks,
            num_used_blocks=manager.num_used_blocks,
            num_evictable_blocks=manager.num_evictable_blocks,
            num_blocks_in_prefix_cache=manager.num_blocks_in_prefix_cache,
            num_free_single_blocks=self._num_free_singles,
            num_admissions_total=self._num_admissions,
            prefix_cache_queries_total=self._num_queried,
            prefix_cache_hits_total=self._num_hit,
            num_evicted_blocks_total=manager.num_evicted_blocks,
        )
        if states is not None:
            stats = replace(stats, **states.counters())
        if self.tier is not None:
            stats = replace(stats, host_hits_total=self._num_host_hit, **self.tier.counters())
        return stats

    def stats(self) -> PoolStats:
        """See KVCacheManager."""
        return PoolStats((self.rank_stats(),))

    @property
    def _num_free_singles(self) -> int:
        """Sequences that can be admitted: each needs a row and, where it has state, a live slot."""
        num_rows = self.single_block_manager.num_free_blocks
        return num_rows if self.states is None else min(num_rows, self.states.num_obtainable_slots)
