"""Starting and finding the host tiers of a pool: one actor per node, or per rank."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.actors.errors import translate
from raykv.actors.process import RankProcess
from raykv.actors.ray_pool import RayHierarchyPool
from raykv.actors.ray_rank import RayRank
from raykv.actors.tier_actor import RayTier, tier_class
from raykv.config import PoolConfig
from raykv.errors import ConfigError, RankUnavailableError
from raykv.host.handle import TierHandle
from raykv.messages import RankInfo

_READY_S = 60.0
_KILL_S = 2.0
_CLOSE_S = 6.0


class TierStarter:
    """Starts host tiers.

    Args:
        config: the pool's.
        name: prefix of the actors' names, ``name-host-0`` and so on; None leaves them unnamed.
        namespace: the Ray namespace of those names.
        lifetime: of the actors.
        cleanup: where it leaves how they are ended.
    """

    def __init__(
        self,
        config: PoolConfig,
        name: str | None,
        namespace: str | None,
        lifetime: str | None,
        cleanup: contextlib.ExitStack,
    ) -> None:
        self._config = config
        self._name = name
        self._namespace = namespace
        self._lifetime = lifetime
        self._cleanup = cleanup
        self._num_started = 0

    def start(self, node_id: str, info: RankInfo) -> RayTier:
        """Start one on a node, and wait until it is there.

        Raises:
            ConfigError: the node has not that much memory for actors, or the name is taken.
            RankUnavailableError: it died, or was not there in time, since others hold the memory.
        """
        host = self._config.host
        assert host is not None, "tiers are started where host is configured"
        num_bytes, what = host.num_blocks * info.block_bytes, f"{host.num_blocks} blocks"
        states = self._config.linear_state
        if states is not None and info.checkpoint_bytes:
            num_slots = host.num_state_slots or states.num_slots
            num_bytes += num_slots * info.checkpoint_bytes
            what += f" and {num_slots} checkpoints"
        need = f"a host tier of {what} needs {num_bytes / 2**30:.2f} GiB"
        node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
        total = node["Resources"].get("memory", 0)
        if num_bytes > total:
            raise ConfigError(
                f"{need}, but its node gives Ray's actors {total / 2**30:.2f} GiB: lower "
                "host.num_blocks, or start the node with `ray start --memory`"
            )
        options: dict[str, Any] = {
            "num_cpus": 0, "memory": num_bytes, "lifetime": self._lifetime,
            "max_restarts": self._config.ray.max_restarts,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }  # fmt: skip
        if self._name is not None:
            options |= {"name": f"{self._name}-host-{self._num_started}"}
            options |= {"namespace": self._namespace}
        try:
            actor = tier_class(**options).remote(self._config, self._num_started)
        except ValueError as error:  # Ray's word for a taken name
            raise ConfigError(
                f"ray: a host tier cannot be started: {error}; choose another name"
            ) from None
        self._num_started += 1
        processes: list[RankProcess] = []
        self._cleanup.callback(_kill, actor, processes)
        try:
            pid = ray.get(actor.ready.remote(), timeout=_READY_S)
        except GetTimeoutError:
            free = ray.available_resources().get("memory", 0)
            raise RankUnavailableError(
                f"{need}, and was not there within {_READY_S:g} s: {free / 2**30:.2f} GiB are free "
                "in the cluster; end what holds the rest, or lower host.num_blocks"
            ) from None
        except RayError as error:
            raise translate(error, "a host tier that was just started", _READY_S) from error
        if node_id == ray.get_runtime_context().get_node_id():
            process = RankProcess.find(pid)
            processes += [] if process is None else [process]
        return RayTier(actor)

    def connect(self, pool: RayHierarchyPool, ranks: list[RayRank]) -> None:
        """Start the tiers that a new pool needs, and connect its ranks."""
        by_rank = self._config.host is not None and self._config.host.scope == "rank"
        tiers: list[TierHandle] = []
        tier_on: dict[str, int] = {}
        tier_of = []
        for rank in ranks:
            if by_rank or rank.node_id not in tier_on:
                tier_on[rank.node_id] = len(tiers)
                tiers.append(self.start(rank.node_id, rank.info))
            tier_of.append(tier_on[rank.node_id])
        pool.start_tier = self.start
        pool.adopt_tiers(tiers, tier_of, tier_on)
        pool.connect_ranks()
        pool.introduce_tiers()


def find_tiers(pool: RayHierarchyPool, ranks: list[RayRank], starter: TierStarter) -> None:
    """Let a pool know the tiers that its ranks use already.

    Raises:
        RankUnavailableError: a rank does not say.
    """
    actors = [rank.find_tier() for rank in ranks]
    tiers: list[TierHandle] = []
    tier_of, tier_on, seen = [], {}, {}
    for rank, actor in zip(ranks, actors, strict=True):
        key = actor._actor_id.hex()  # noqa: SLF001 - handles of one actor are not equal
        if key not in seen:
            seen[key] = len(tiers)
            tiers.append(RayTier(actor))
        tier_on[rank.node_id] = seen[key]
        tier_of.append(seen[key])
    pool.start_tier = starter.start
    pool.adopt_tiers(tiers, tier_of, tier_on)


def _kill(actor: Any, processes: list[RankProcess]) -> None:
    if ray.is_initialized():
        with contextlib.suppress(RayError, ValueError):
            ray.get(actor.close.remote(), timeout=_CLOSE_S)  # what was noted reaches its store
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor)
    for process in processes:
        if not process.wait(_KILL_S):
            process.kill()  # a stopped process does not hear Ray
            process.wait(_KILL_S)
