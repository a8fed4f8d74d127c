"""Pools over Ray actors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import ray

from raykv.actors.ray_rank import RayRank
from raykv.actors.tier_actor import RayTier
from raykv.config import PoolConfig
from raykv.hierarchy import HierarchyBlockManagerPool
from raykv.host.handle import TierHandle
from raykv.messages import RankInfo
from raykv.pool import BlockManagerPool
from raykv.rank_handle import RankHandle

_LEAVE_S = 2.0


class RayPool(BlockManagerPool):
    """A pool over Ray actors.

    Closing it ends them and gives back what was reserved for them, or, where another driver
    launched them, takes leave of them.

    Args:
        config: what the ranks were made from.
        ranks: one handle per dp_rank, in order.
        cleanup: what to do in the end.
        ends_ranks: whether the ranks are this pool's to end.
    """

    def __init__(
        self,
        config: PoolConfig,
        ranks: list[RayRank],
        cleanup: contextlib.ExitStack,
        *,
        ends_ranks: bool = True,
    ) -> None:
        handles: list[RankHandle] = [*ranks]
        super().__init__(config, handles)
        self._ray_ranks = ranks
        self._cleanup = cleanup
        self._ends_ranks = ends_ranks
        self.monitor.start()

    def keep(self, cleanup: contextlib.ExitStack) -> None:
        """Do this in the end."""
        self._cleanup = cleanup

    def close(self) -> None:
        """End all ranks, or take leave of them; idempotent. Requests under way fail."""
        self.monitor.stop()
        with self._cleanup:
            if self._ends_ranks:
                for rank in self._ray_ranks:
                    rank.ask_to_close()
            else:
                asked = [rank.ask_to_leave() for rank in self._ray_ranks]
                leaving = [reference for reference in asked if reference is not None]
                if leaving:
                    ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_S)
            super().close()


class RayHierarchyPool(RayPool, HierarchyBlockManagerPool):
    """A pool over Ray actors with host tiers, which are actors too.

    Attributes:
        start_tier: starts one on a node, for a rank that has come back on another one than before.
    """

    start_tier: Callable[[str, RankInfo], RayTier]
    _tier_on: dict[str, int]  # by Ray node

    def adopt_tiers(
        self, tiers: list[TierHandle], tier_of: list[int], tier_on: dict[str, int]
    ) -> None:
        """Know the tiers: all, per rank, and by Ray node."""
        self.tiers, self._tier_of, self._tier_on = tiers, tier_of, tier_on

    def introduce_tiers(self) -> None:
        """Let the tiers of different nodes read each other's blocks."""
        host = self.config.host
        if host is None or not host.peers or host.scope == "rank" or len(self.tiers) < 2:
            return
        tiers = [tier for tier in self.tiers if isinstance(tier, RayTier)]
        actors = {str(index): tier.actor for index, tier in enumerate(tiers)}
        for index, tier in enumerate(tiers):
            others = {name: actor for name, actor in actors.items() if name != str(index)}
            tier.call("set_peers", others)

    def find_tier(self, rank: RankHandle) -> TierHandle:
        """See HierarchyBlockManagerPool; Ray may have restarted the rank on another node."""
        assert isinstance(rank, RayRank), "the pool is one over Ray"
        node_id = rank.find_node()
        if self.config.host is not None and self.config.host.scope == "node":
            if node_id not in self._tier_on:
                self.tiers.append(self.start_tier(node_id, rank.info))
                self._tier_on[node_id] = len(self.tiers) - 1
                self.introduce_tiers()
            self._tier_of[rank.dp_rank] = self._tier_on[node_id]
        return self.tiers[self._tier_of[rank.dp_rank]]
