"""The pool with host memory behind its devices (the seed's section 9.4)."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from pathlib import Path
from typing import Self, TypeAlias, TypeVar

from raykv.config import PoolConfig
from raykv.core.kv_cache_manager import Sequences, flatten
from raykv.core.sequence import Request, Sequence
from raykv.errors import ConfigError, RankUnavailableError, RaykvError
from raykv.host.handle import LocalTier, TierHandle
from raykv.host.state_stats import HostStatesStats
from raykv.host.stats import HostTierStats
from raykv.host.tier_host import TierHost
from raykv.pool import BlockManagerPool
from raykv.rank_handle import RankHandle, results
from raykv.transfer_report import TransferReport

T = TypeVar("T")
_Prefetch: TypeAlias = tuple[TierHandle, Future[bool]]

_LOOK_S = 0.001
_LOOK_EVERY_S = 0.02
_MAX_LOOK_S = 0.02


class HierarchyBlockManagerPool(BlockManagerPool):
    """A pool whose ranks keep in host memory what falls out of their devices, and get it back.

    ``deallocate`` queues what a sequence has computed and the host lacks; ``allocate`` looks what
    the host has beyond the device's hit, and plans to load it; ``transfer_blocks`` starts both. The
    built-in engine does so by itself.

    A sequence with ``is_loading`` set must not compute until ``transfer_blocks`` has reported its
    load; until that is started, whoever computes anyway calls it off.

    Attributes:
        tiers: the host tiers.
    """

    tiers: list[TierHandle]
    _tier_of: list[int]
    _has_tiers = True

    def __init__(self, config: PoolConfig, ranks: list[RankHandle]) -> None:
        super().__init__(config, ranks)
        self._prefetching: weakref.WeakKeyDictionary[Sequence, _Prefetch] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def local(
        cls, config: PoolConfig | str | Path, tiers: SequenceOf[TierHandle] | None = None
    ) -> Self:
        """A pool whose ranks and host tiers live in this process, without Ray.

        Args:
            config: the pool.
            tiers: those to use, which the pool closes in the end; None makes them.

        Raises:
            ConfigError: there is no ``host``, or the model, the memory or the routing policy cannot
                be had.
            StoreError: the store's folder cannot be used, or another pool uses it.
        """
        config = PoolConfig.of(config)
        if tiers is not None and not tiers:
            raise ConfigError("tiers is empty: give one at least, or None to have them made")
        if config.host is None:
            raise ConfigError("host is missing: give host.num_blocks, or use BlockManagerPool")
        pool = super().local(config)
        try:
            num_tiers = pool.config.dp_size if config.host.scope == "rank" else 1
            if tiers is None:
                tiers = [LocalTier(TierHost(pool.config, index)) for index in range(num_tiers)]
            pool.use_tiers([*tiers], [rank % len(tiers) for rank in range(pool.config.dp_size)])
        except BaseException:
            pool.close()
            raise
        return pool

    def use_tiers(self, tiers: list[TierHandle], tier_of: list[int]) -> None:
        """Connect ranks that nobody uses yet; called once.

        Args:
            tiers: the host tiers.
            tier_of: per rank, which of them it uses.

        Raises:
            ConfigError: the memory of one cannot be had.
        """
        self.tiers, self._tier_of = tiers, tier_of
        self.connect_ranks()

    def connect_ranks(self) -> None:
        """Let all ranks join their tiers, side by side."""
        results([rank.connect_tier(self.find_tier(rank)) for rank in self.ranks])

    def tier_of(self, rank: RankHandle) -> TierHandle:
        """The host tier that a rank uses, as far as is known here."""
        return self.tiers[self._tier_of[rank.dp_rank]]

    def find_tier(self, rank: RankHandle) -> TierHandle:
        """The host tier for a rank that is to join one, wherever it is by now."""
        return self.tier_of(rank)

    # -- transfers ------------------------------------------------------------------------------

    def transfer_blocks(
        self, batches: Sequences | Iterable[Sequences] | None = None, *, wait_s: float = 0.0
    ) -> TransferReport:
        """Start the queued loads, then the queued offloads; one call per rank, all at once.

        Call it once more between ``deallocate`` and the next ``allocate``: one that is short of
        blocks gives up the offloads that have not started.

        Args:
            batches: what is to compute next, each as ``allocate`` takes a list; None for all. All
                queued copies are started, but only loads of these are waited for.
            wait_s: seconds to wait until those are over; 0 only looks.

        Returns:
            What was started, and what was acknowledged since the call before.
        """
        if isinstance(batches, Sequence | Request):
            batches = [batches]
        members = None if batches is None else [s for batch in batches for s in flatten(batch)]
        deadline, pause_s = time.monotonic() + wait_s, _LOOK_S
        report = self._transfer()
        while report.num_loading if members is None else any(s.is_loading for s in members):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _MAX_LOOK_S)
            report = self._transfer().after(report)
        return report

    def _transfer(self) -> TransferReport:
        nothing = TransferReport()
        reports = self._of_all([rank.transfer() for rank in self.ranks], nothing)
        return sum(reports, nothing)

    # -- the store ------------------------------------------------------------------------------

    def prefetch_from_storage(self, request: Sequences) -> None:
        """Begin to read what the store has of prompts into host memory, while they wait.

        On the host tier of the rank that ``select_rank`` names now. Waits for nothing.
        """
        for sequence in flatten(request):
            tier = self.tier_of(self.ranks[self.select_rank(sequence)])
            begun = tier.prefetch(sequence.token_ids, sequence.namespace)
            self._prefetching[sequence] = (tier, begun)

    def update_prefetch_result(self, request: Sequences, timeout_s: float) -> bool:
        """Wait for what ``prefetch_from_storage`` began, then give up what has not arrived.

        What has arrived can be loaded: ``allocate`` finds it.

        Args:
            request: as given to ``prefetch_from_storage``.
            timeout_s: seconds to wait for all of it; ``host.timeout_s`` more for a tier that does
                not answer.

        Returns:
            Whether all that the store said it has is on the host. False too where a host tier is
            lost or silent: that costs hits only.
        """
        assert self.config.host is not None, "the pool has host tiers"
        deadline = time.monotonic() + timeout_s
        patience_s = self.config.host.timeout_s
        waiting = [(one, self._prefetching.pop(one, None)) for one in flatten(request)]
        is_complete = True
        for sequence, prefetch in waiting:
            if prefetch is None:
                continue
            tier, begun = prefetch
            try:
                begun.result(_left(deadline) + patience_s)
                left_s = _left(deadline)
                answer = tier.wait_prefetch(sequence.token_ids, sequence.namespace, left_s)
                is_complete &= answer.result(left_s + patience_s)
            except (TimeoutError, RankUnavailableError):
                is_complete = False
        return is_complete

    # -- counters -------------------------------------------------------------------------------

    def num_free_host_blocks(self) -> list[int]:
        """Host blocks that hold nothing, per host tier."""
        return [stats.free for stats in self.host_stats()]

    def num_blocks_in_host_prefix_cache(self) -> list[int]:
        """Host blocks that can be found, per host tier."""
        return [stats.cached for stats in self.host_stats()]

    def host_stats(self) -> list[HostTierStats]:
        """Counters of the host tiers."""
        return self._answers([tier.stats() for tier in self.tiers])

    def _answers(self, futures: list[Future[T]]) -> list[T]:
        limit_s = self.config.ray.call_timeout_s
        try:
            return [future.result(limit_s) for future in futures]
        except TimeoutError:
            raise RankUnavailableError(
                f"a host tier has not answered for {limit_s:g} s: try again, or make a new pool"
            ) from None

    def host_state_stats(self) -> list[HostStatesStats]:
        """Counters of the checkpoints of recurrent state on the hosts; of no tier without any."""
        answers = self._answers([tier.state_stats() for tier in self.tiers])
        return [answer for answer in answers if answer is not None]

    @property
    def has_transfers(self) -> bool:
        """Whether anything is on its way between a device and its host."""
        ranks = self.stats().ranks
        if any(rank.num_loading_sequences or rank.num_offloading_blocks for rank in ranks):
            return True
        if any(host.storing or host.pinned for host in self.host_stats()):
            return True
        return any(host.storing or host.pinned for host in self.host_state_stats())

    def wait_for_transfers(self, timeout_s: float) -> bool:
        """Wait until nothing is on its way to or from the host, nor to a store behind it.

        Returns:
            Whether that is so; False after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while self.has_transfers:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
            if self.config.model is None:
                self._transfer()
        drained: list[bool] = self._answers([tier.drain(_left(deadline)) for tier in self.tiers])
        return all(drained)

    # -- what also concerns the host ------------------------------------------------------------

    def reset_prefix_cache(self) -> list[int]:
        """See KVCacheManager; the host tiers forget everything, too.

        They do so first and count an epoch: what ranks had before their own reset is refused. Of
        several, each does it twice: in between, one may have read from another what that still had.
        A store's blocks of before are found by nobody in this pool, but by pools that start later.

        Raises:
            RankUnavailableError: a host tier does not answer; reset again when it does.
        """
        for _ in self.tiers[:2]:
            epochs = [epoch for epoch, _ in self._answers([tier.reset() for tier in self.tiers])]
        counts = super().reset_prefix_cache()
        replies = [rank.begin_epoch(epochs[self._tier_of[rank.dp_rank]]) for rank in self.ranks]
        self._of_all(replies, None)
        return counts

    def retire(self, version: int) -> list[int]:
        """See VersionedRanks; of the host tiers, too."""
        self._answers([tier.retire(version) for tier in self.tiers])
        return super().retire(version)

    def bring_up_to_date(self, rank: RankHandle) -> None:
        """See VersionedRanks; a rank that is back joins its host tier again.

        Where that does not answer, it serves without until it does.
        """
        super().bring_up_to_date(rank)
        rank.connect_tier(self.find_tier(rank), is_back=True).result()

    def check_integrity(self) -> None:
        """See KVCacheManager."""
        super().check_integrity()
        self._answers([tier.check_integrity() for tier in self.tiers])

    def close(self) -> None:
        """See BlockManagerPool; the host memory goes with the last rank that has it mapped.

        What is on the host has a few seconds to reach the store; what is not yet on the host is
        dropped: see ``wait_for_transfers``.
        """
        super().close()
        for tier in getattr(self, "tiers", []):
            with contextlib.suppress(RaykvError):
                tier.close()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def local_pool(config: PoolConfig | str | Path) -> BlockManagerPool:
    """A pool in this process, with host memory behind it where the configuration has some.

    Raises:
        ConfigError: the model, the memory or the routing policy cannot be had.
    """
    config = PoolConfig.of(config)
    kind = BlockManagerPool if config.host is None else HierarchyBlockManagerPool
    return kind.local(config)
