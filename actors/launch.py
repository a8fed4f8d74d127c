"""Starting a pool whose ranks are Ray actors."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raykv.actors import cluster
from raykv.actors.errors import translate
from raykv.actors.rank_actor import actor_class
from raykv.actors.ray_pool import RayHierarchyPool, RayPool
from raykv.actors.ray_rank import RayRank
from raykv.actors.tiers import TierStarter
from raykv.config import PoolConfig
from raykv.errors import ConfigError, RankUnavailableError
from raykv.messages import RankInfo
from raykv.pool import BlockManagerPool
from raykv.routing_policy import make_policy


def launch(
    config: PoolConfig | str | Path,
    *,
    name: str | None = None,
    namespace: str | None = None,
    placement_group: Any = None,
    lifetime: Literal["detached", "non_detached"] | None = None,
) -> BlockManagerPool:
    """Start a pool whose ranks are Ray actors, and wait until all of them are ready.

    Runs on the Ray that is initialised, and leaves it running. Where none is: joins the cluster
    that the environment variable RAY_ADDRESS names, as in a Ray job, or else starts a local Ray
    (loopback, no dashboard, quiet), which ends when the last pool on it is closed. Call
    ``ray.init`` first to have another one.

    Args:
        config: the pool, or its YAML file's path; ``config.ray`` holds resources per rank and time
            limits. With ``num_gpus`` 0 Ray hides the GPUs from the ranks.
        name: prefix of the actors' names, ``name-rank-0`` and so on; None leaves them unnamed.
        namespace: the Ray namespace of those names; None for the driver's.
        placement_group: where to put the ranks, rank i in bundle i if it has that many; it stays
            yours. None reserves one for the pool if there are several ranks or GPUs.
        lifetime: of the actors; ``detached`` ones outlive the driver, but not ``pool.close()``.

    Raises:
        ConfigError: the cluster can never hold the ranks, a name is taken, or a rank cannot be
            built: its model or its memory cannot be had.
        StoreError: the folder of the host tiers' store cannot be used, or another pool uses it.
        RankUnavailableError: a rank died, or was not ready within ``config.ray.start_timeout_s``.

    After an error, nothing that was started is left.
    """
    config = PoolConfig.of(config).with_seed()
    _check(config, lifetime, name)
    deadline = time.monotonic() + config.ray.start_timeout_s
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(cluster.acquire(config, namespace))
        if name is not None:
            cluster.check_free(f"{name}-rank-0", namespace)
        group = placement_group
        if group is None:
            cluster.check_resources(config)
            group = cluster.reserve(config, lifetime, None if name is None else f"{name}-ranks")
            if group is not None:
                cleanup.callback(cluster.remove, group)
        if group is not None:
            cluster.await_reserved(group, config, _left(deadline))
        actors: list[Any] = []
        for dp_rank in range(config.dp_size):
            options = _options(config, dp_rank, group)
            if name is not None:
                options |= {"name": f"{name}-rank-{dp_rank}", "namespace": namespace}
            actors.append(_start(options, config, dp_rank, lifetime))
            cleanup.callback(_kill, actors[-1])
        driver_id = uuid.uuid4().hex
        ranks = [
            RayRank(
                actor,
                info,
                node_id,
                driver_id=driver_id,
                config=config.ray,
            )
            for actor, (info, node_id) in zip(
                actors, await_ready(actors, config, deadline), strict=True
            )
        ]
        if config.host is None:
            return RayPool(config, ranks, cleanup.pop_all())
        starter = TierStarter(config, name, namespace, lifetime, cleanup)
        pool = RayHierarchyPool(config, ranks, cleanup)
        cleanup.callback(pool.monitor.stop)
        starter.connect(pool, ranks)
        pool.keep(cleanup.pop_all())
        return pool


def _check(config: PoolConfig, lifetime: str | None, name: str | None) -> None:
    if lifetime not in {None, "detached", "non_detached"}:
        raise ConfigError(f"lifetime is {lifetime!r}: use 'detached', 'non_detached' or None")
    if not (name is None or (isinstance(name, str) and name)):
        raise ConfigError(f"name is {name!r}, but must be text")
    make_policy(config.routing.policy)
    if lifetime == "detached" and cluster.is_local():
        raise ConfigError(
            "lifetime is 'detached', but this process is connected to no cluster, and the local "
            "Ray that launch starts ends with the pool: start one with `ray start --head`, and "
            "call ray.init(address=...) or set RAY_ADDRESS"
        )
    if config.memory is not None and config.memory.device == "cuda" and not config.ray.num_gpus:
        raise ConfigError(
            "memory.device is 'cuda', but ray.num_gpus is 0, and Ray hides the GPUs from actors "
            "that ask for none: set ray.num_gpus"
        )


def _options(config: PoolConfig, dp_rank: int, group: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_cpus": config.ray.num_cpus, "num_gpus": config.ray.num_gpus,
        "max_restarts": config.ray.max_restarts,
    }  # fmt: skip
    if group is not None:
        has_bundle_each = group.bundle_count >= config.dp_size
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=dp_rank if has_bundle_each else -1,
        )
    return options


def _start(options: dict[str, Any], config: PoolConfig, dp_rank: int, lifetime: str | None) -> Any:
    try:
        return actor_class(lifetime=lifetime, **options).remote(config, dp_rank)
    except ValueError as error:  # Ray's word for a taken name, or a bundle that is too small
        raise ConfigError(
            f"ray: rank {dp_rank} cannot be started: {error}; choose another name, or settings "
            "that the placement group fits"
        ) from None


def await_ready(
    actors: list[Any], config: PoolConfig, deadline: float
) -> list[tuple[RankInfo, str]]:
    """Each rank's word that it is ready, in order."""
    waiting = {actor.ready.remote(): dp_rank for dp_rank, actor in enumerate(actors)}
    answers: dict[int, tuple[RankInfo, str]] = {}
    while waiting:
        done, _ = ray.wait([*waiting], num_returns=1, timeout=_left(deadline))
        if not done:
            late = ", ".join(map(str, sorted(waiting.values())))
            raise RankUnavailableError(
                f"of {len(actors)} ranks, these were not ready within "
                f"{config.ray.start_timeout_s:g} s: {late} ({cluster.free_resources()}); raise "
                "ray.start_timeout_s if the model loads slowly, or end what holds the cluster"
            )
        for reference in done:
            dp_rank = waiting.pop(reference)
            try:
                answers[dp_rank] = ray.get(reference)
            except RayError as error:
                cause = translate(error, f"rank {dp_rank}", math.inf)
                raise cause from error
    return [answers[dp_rank] for dp_rank in range(len(actors))]


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _kill(actor: Any) -> None:
    if ray.is_initialized():
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor)
