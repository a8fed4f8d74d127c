"""Using a pool that another process launched, and ending one by its name."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from typing import Any

import ray
from ray.exceptions import RayError

from raykv.actors import cluster
from raykv.actors.launch import await_ready
from raykv.actors.ray_pool import RayHierarchyPool, RayPool
from raykv.actors.ray_rank import RayRank
from raykv.actors.tiers import TierStarter, find_tiers
from raykv.config import PoolConfig
from raykv.errors import RankUnavailableError, RequestError

_CONFIG_S = 20.0


def attach(name: str, *, namespace: str | None = None) -> RayPool:
    """Use a pool that was launched under a name, from another Ray job or a Serve replica.

    Every driver has its own sequences and requests, and shares the ranks' prefix caches with the
    others. Closing this pool detaches: what this driver holds comes back, and the ranks go on. So
    they do if this process dies, once its lease (``config.ray.lease_s``) has run out.

    Args:
        name: as given to ``launch``.
        namespace: the Ray namespace of the pool; None for this driver's. Drivers without a
            namespace of their own are in one each, so give both ``launch`` and ``attach`` one.

    Raises:
        RequestError: there is no such pool.
        RankUnavailableError: a rank does not answer.
    """
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(cluster.acquire_running(namespace))
        first = _find(name, 0, namespace)
        config = _config(first, name)
        actors = [first, *(_find(name, rank, namespace) for rank in range(1, config.dp_size))]
        driver_id = uuid.uuid4().hex
        deadline = time.monotonic() + config.ray.start_timeout_s
        ranks = [
            RayRank(actor, info, node_id, driver_id=driver_id, config=config.ray)
            for actor, (info, node_id) in zip(
                actors, await_ready(actors, config, deadline), strict=True
            )
        ]
        if config.host is None:
            return RayPool(config, ranks, cleanup.pop_all(), ends_ranks=False)
        starter = TierStarter(config, None, namespace, None, contextlib.ExitStack())
        pool = RayHierarchyPool(config, ranks, cleanup, ends_ranks=False)
        cleanup.callback(pool.monitor.stop)
        find_tiers(pool, ranks, starter)
        pool.keep(cleanup.pop_all())
        return pool


def end(name: str, *, namespace: str | None = None) -> None:
    """End a pool by its name, whoever launched it: what a detached pool needs in the end.

    Raises:
        RequestError: there is no such pool.
    """
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(cluster.acquire_running(namespace))
        actors = [_find(name, 0, namespace)]
        with contextlib.suppress(RequestError):
            while True:
                actors.append(_find(name, len(actors), namespace))
        with contextlib.suppress(ValueError):
            actors.extend(
                ray.get_actor(f"{name}-host-{index}", namespace) for index in itertools.count()
            )
        group = _group(actors[0])
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            cluster.remove_named(group, f"{name}-ranks")


def _find(name: str, dp_rank: int, namespace: str | None) -> Any:
    try:
        return ray.get_actor(f"{name}-rank-{dp_rank}", namespace)
    except ValueError:
        where = ray.get_runtime_context().namespace if namespace is None else namespace
        raise RequestError(
            f"no pool {name!r} in Ray namespace {where!r} (its rank {dp_rank} is not there): check "
            "the name, pass the namespace that it was launched in, or launch it"
        ) from None


def _group(actor: Any) -> Any:
    """The placement group of a rank; None if it has none, or does not answer."""
    with contextlib.suppress(RayError):
        return ray.get(actor.placement_group.remote(), timeout=_CONFIG_S)
    return None


def _config(actor: Any, name: str) -> PoolConfig:
    try:
        config: PoolConfig = ray.get(actor.config.remote(), timeout=_CONFIG_S)
    except RayError as error:
        raise RankUnavailableError(
            f"rank 0 of pool {name!r} does not say what it is ({type(error).__name__}): it may be "
            "starting or dead, try again, or end the pool and launch another"
        ) from error
    return config
