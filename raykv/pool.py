"""The pool: routes sequences to ranks, batches calls, generates (the seed's section 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from raykv.aio import AsyncPool
from raykv.config import PoolConfig
from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import (
    KVCacheManager,
    PoolStats,
    RankStats,
    Sequences,
    flatten,
    token_targets,
)
from raykv.core.sequence import Sequence, next_checkpoint
from raykv.engine.build import build_rank
from raykv.engine.worker import RankWorker
from raykv.errors import ConfigError, RankUnavailableError, RequestError
from raykv.generating import GeneratingRanks
from raykv.generation import Generations
from raykv.list_allocation import Groups, allocate_over_ranks
from raykv.local_rank import LocalRank
from raykv.lost_replies import ReleasedOrLost, answers_of_all
from raykv.monitor import Monitor
from raykv.rank_handle import RankHandle, Reply, results
from raykv.routing import Choice, Router
from raykv.routing_policy import make_policy
from raykv.versions import VersionedRanks

T = TypeVar("T")


class BlockManagerPool(GeneratingRanks, VersionedRanks, KVCacheManager):
    """All ranks as one KV cache manager. Make one with ``local`` or ``raykv.actors.launch``.

    Args:
        config: what the ranks were made from.
        ranks: one handle per dp_rank, in order.

    Attributes:
        num_lost_sequences: sequences whose blocks went with a rank that was lost.
        monitor: heartbeats; runs by itself over Ray.
        generations: requests of this driver that are under way.
    """

    _has_tiers = False

    def __init__(self, config: PoolConfig, ranks: list[RankHandle]) -> None:
        self.config = config
        self.ranks = ranks
        self.num_lost_sequences = 0
        self._router = Router(config, len(ranks))
        self.generations = Generations(ranks, self._router, config)
        self.monitor = Monitor(ranks, config.ray.heartbeat_s)
        for rank in ranks:
            rank.welcome = self.bring_up_to_date

    @classmethod
    def local(cls, config: PoolConfig | str | Path) -> Self:
        """A pool whose ranks live in this process, without Ray.

        Raises:
            ConfigError: the model, the memory or the routing policy cannot be had.
        """
        config = PoolConfig.of(config).with_seed()
        if config.host is not None and not cls._has_tiers:
            raise ConfigError(
                "host is configured, but BlockManagerPool has no host tier: use "
                "HierarchyBlockManagerPool.local, or leave host out"
            )
        make_policy(config.routing.policy)  # a wrong one is told before anything is started
        ranks: list[RankHandle] = []
        for dp_rank in range(config.dp_size):
            kv, engine = build_rank(config, dp_rank)
            ranks.append(LocalRank(kv, None if engine is None else RankWorker(engine)))
        return cls(config, ranks)

    # -- your scheduler -------------------------------------------------------------------------

    def allocate(self, sequences: Sequences, num_tokens: int | Iterable[int] | None = None) -> bool:
        """See KVCacheManager. One call per rank, all ranks at once.

        A sequence whose rank was lost begins anew on another one: its ``num_computed_tokens`` is
        what that one has cached.

        Raises:
            RankUnavailableError: no rank is left, or one was lost and ``on_rank_loss`` says
                ``report``; nothing new is held.
        """
        members = flatten(sequences)
        targets = token_targets(members, num_tokens)
        return self._over_losses(lambda: self._allocate(members, targets))

    def _allocate(self, members: list[Sequence], targets: list[int]) -> bool:
        home = self._home_of(members)
        if home is not None:
            return self.ranks[home].allocate(members, targets).result()
        groups: Groups = {}
        ranks, choice = self._select(members, targets)
        for rank, sequence, target in zip(ranks, members, targets, strict=True):
            if rank not in groups:
                groups[rank] = ([], [])
            groups[rank][0].append(sequence)
            groups[rank][1].append(target)
            if sequence.single_block_id is None:
                sequence.owner = self
        if len(groups) == 1:
            is_done = self.ranks[rank].allocate(*groups[rank]).result()
        else:
            is_done = allocate_over_ranks(self.ranks, groups)
        if is_done and choice is not None:
            choice.settle()
        return is_done

    def deallocate(self, sequences: Sequences) -> None:
        """See KVCacheManager."""
        self._release(sequences, publish=True)

    def deallocate_without_cache(self, sequences: Sequences) -> None:
        """See KVCacheManager."""
        self._release(sequences, publish=False)

    def allocate_shared(self, sequence: Sequence) -> None:
        """See KVCacheManager."""

        def allocate() -> None:
            rank = self.select_rank(sequence)
            if sequence.single_block_id is None:
                sequence.owner = self
            self.ranks[rank].allocate_shared(sequence).result()

        self._over_losses(allocate)

    def cache(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """See KVCacheManager; what went with a lost rank is not published."""

        def cache() -> None:
            rank = self._rank_of(sequence)
            if rank is not None:
                self.ranks[rank].cache(sequence, num_tokens).result()

        self._over_losses(cache)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """See KVCacheManager; of a parent that went with a lost rank, the child holds nothing."""

        def fork() -> None:
            rank = self._rank_of(parent)
            if rank is not None:
                child.owner = self
                self.ranks[rank].fork(parent, child).result()

        self._over_losses(fork)

    def get_swap_block_transfer_infos(self) -> list[list[tuple[int, int]]]:
        """See KVCacheManager."""
        return self._of_all([rank.take_swaps() for rank in self.ranks], [])

    def ack_swaps(self) -> None:
        """See KVCacheManager."""
        self._of_all([rank.ack_swaps() for rank in self.ranks], None)

    def next_checkpoint(self, sequence: Sequence) -> int | None:
        """See KVCacheManager; found out here, without a call."""
        states = self.config.linear_state
        if not self.config.has_linear_state or not self.config.enable_prefix_cache:
            return None
        assert states is not None, "it is enabled"
        return next_checkpoint(
            sequence.kv_state, states.stride_tokens if states.at_stride else None
        )

    def get_state_transfer_infos(self) -> list[list[tuple[int, int]]]:
        """See KVCacheManager."""
        return self._of_all([rank.take_state_copies() for rank in self.ranks], [])

    def ack_state_transfers(self) -> None:
        """See KVCacheManager."""
        self._of_all([rank.ack_state_copies() for rank in self.ranks], None)

    def explain(self, sequence: Sequence) -> MissReport:
        """See KVCacheManager."""
        rank = self._rank_of(sequence)
        if rank is None:
            raise RequestError(f"{sequence!r} holds no blocks: explain it while it is allocated")
        return self.ranks[rank].explain(sequence).result()

    def select_rank(self, sequence: Sequence) -> int:
        """The rank that holds the sequence, or the one that ``allocate`` would choose now."""
        [rank], _ = self._select([sequence], [sequence.num_tokens])
        return rank

    @property
    def aio(self) -> AsyncPool:
        """The same methods as coroutines, and ``stream``."""
        return AsyncPool(self)

    # -- counters -------------------------------------------------------------------------------

    def num_free_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [rank.num_free_blocks for rank in self._rank_stats()]

    def num_used_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [rank.num_used_blocks for rank in self._rank_stats()]

    def num_available_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [rank.num_available_blocks for rank in self._rank_stats()]

    def num_blocks_in_prefix_cache(self) -> list[int]:
        """See KVCacheManager."""
        return [rank.num_blocks_in_prefix_cache for rank in self._rank_stats()]

    def kv_cache_utilization(self) -> float:
        """See KVCacheManager."""
        stats = self._rank_stats()
        return sum(rank.kv_cache_usage_perc for rank in stats) / len(stats)

    def reset_prefix_cache(self) -> list[int]:
        """See KVCacheManager."""
        counts = self._of_all([rank.reset_prefix_cache() for rank in self.ranks], 0)
        for rank in range(len(self.ranks)):
            self._router.forget(rank)
        return counts

    def stats(self) -> PoolStats:
        """See KVCacheManager."""
        return PoolStats(tuple(self._rank_stats()))

    def check_integrity(self) -> None:
        """See KVCacheManager."""
        self._of_all([rank.check_integrity() for rank in self.ranks], None)
        self._router.check_integrity()

    def close(self) -> None:
        """Let go of all ranks; idempotent. Requests under way fail."""
        self.monitor.stop()
        self.generations.close()
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- details --------------------------------------------------------------------------------

    def _over_losses(self, function: Callable[[], T]) -> T:
        """Do it, and again where a rank turned out to be lost and the others can go on."""
        for _ in range(len(self.ranks)):
            try:
                return function()
            except RankUnavailableError:
                if not self._fails_over or all(rank.lost for rank in self.ranks):
                    raise
        return function()

    def _rank_of(self, sequence: Sequence) -> int | None:
        """The rank that holds a sequence, or that its caller chose; None if another may."""
        rank = sequence.dp_rank
        if rank is not None and not 0 <= rank < len(self.ranks):
            raise RequestError(
                f"{sequence!r} belongs to another pool, for this one's ranks are "
                f"0..{len(self.ranks) - 1}: deallocate it there first"
            )
        if rank is not None and self.ranks[rank].session and self._fails_over:  # it was lost once
            if self.ranks[rank].take_lost(sequence):
                self.num_lost_sequences += 1
                sequence.forget()
                return None
            if self.ranks[rank].lost is not None and sequence.single_block_id is None:
                return None
        return rank

    def _home_of(self, members: list[Sequence]) -> int | None:
        """The one rank that holds all of a list, as in a decode step; found without ado."""
        homes = {sequence.dp_rank for sequence in members}
        if len(homes) != 1 or None in {sequence.single_block_id for sequence in members}:
            return None
        rank = self._rank_of(members[0])
        return None if rank is None or self.ranks[rank].session else rank

    def _rank_stats(self) -> list[RankStats]:
        self._of_all([rank.refresh() for rank in self.ranks], None)
        return [rank.stats for rank in self.ranks]

    def _of_all(self, replies: SequenceOf[Reply[T]], if_lost: T) -> list[T]:
        return answers_of_all(replies, if_lost, fails_over=self._fails_over)

    def _select(
        self, members: list[Sequence], targets: list[int]
    ) -> tuple[list[int], Choice | None]:
        """A rank per sequence; what the list itself takes counts against its later members."""
        choice = None
        ranks = []
        for sequence, target in zip(members, targets, strict=True):
            rank = self._rank_of(sequence)
            if rank is None:
                if choice is None:
                    choice = self._router.begin([handle.room for handle in self.ranks])
                rank = choice.take(sequence, target)
            ranks.append(rank)
        return ranks, choice

    def _release(self, sequences: Sequences, *, publish: bool) -> None:
        groups: dict[int, list[Sequence]] = {}
        for sequence in flatten(sequences):
            rank = self._rank_of(sequence)
            if rank is None:
                sequence.forget()
            else:
                groups.setdefault(rank, []).append(sequence)
        replies = [
            ReleasedOrLost(handle.release(group, publish=publish), group, self._count_lost)
            for handle, group in ((self.ranks[rank], group) for rank, group in groups.items())
        ]
        results(replies)

    def _count_lost(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            if sequence.dp_rank is not None:
                self.ranks[sequence.dp_rank].take_lost(sequence)
            sequence.forget()
        self.num_lost_sequences += len(sequences)
