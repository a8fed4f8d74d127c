"""Ray itself: which one to use, whether it can hold the ranks, and where they go."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray._private import ray_constants
from ray.util import placement_group as make_placement_group
from ray.util import placement_group_table, remove_placement_group

from raykv.config import PoolConfig, RayConfig
from raykv.errors import ConfigError, RankUnavailableError, RequestError

_OBJECT_STORE_BYTES = 256 * 2**20  # messages only: KV never travels through the object store

_lock = threading.Lock()
_own_address: str | None = None  # of the Ray that was started or joined here
_is_own_local = False
_num_users = 0


def acquire(config: PoolConfig, namespace: str | None) -> Callable[[], None]:
    """Make sure that Ray runs.

    A Ray that is initialised is used and left running. Otherwise the cluster that ``RAY_ADDRESS``
    names is joined, as in a Ray job; without one a local Ray is started: loopback only, no
    dashboard, quiet, with as many (logical) CPUs as the ranks ask for.

    Returns:
        What to call when the pool is closed: it leaves or stops a Ray that was joined or started
        here, once the last pool that uses it is closed.
    """
    global _own_address, _is_own_local, _num_users  # noqa: PLW0603 - Ray is global to the process
    with _lock:
        if not ray.is_initialized():
            _is_own_local = is_local()
            _start(config, namespace)
            _own_address, _num_users = _address(), 0
        if _address() != _own_address:
            return _nothing
        _num_users += 1
    return _release


def acquire_running(namespace: str | None) -> Callable[[], None]:
    """Make sure that a Ray that others started runs here; see ``acquire``.

    Raises:
        RequestError: there is none to join.
    """
    global _own_address, _is_own_local, _num_users  # noqa: PLW0603 - Ray is global to the process
    with _lock:
        if not ray.is_initialized():
            if is_local():
                raise RequestError(
                    "this process is connected to no Ray, so there is no pool to be found: call "
                    "ray.init(address=...) first, or set RAY_ADDRESS, as in a Ray job"
                )
            ray.init(namespace=namespace)
            _own_address, _is_own_local, _num_users = _address(), False, 0
        if _address() != _own_address:
            return _nothing
        _num_users += 1
    return _release


def is_local() -> bool:
    """Whether the Ray in use, or the one that ``acquire`` would start, ends with this process."""
    if ray.is_initialized():
        return _is_own_local and _address() == _own_address
    return os.environ.get("RAY_ADDRESS", "") in {"", "local"}


def check_resources(config: PoolConfig) -> None:
    """See that the cluster, if nothing else ran on it, could hold the ranks.

    Raises:
        ConfigError: it never can, as it is now.
    """
    ray_config, dp_size = config.ray, config.dp_size
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    slots = [_num_ranks_on(node, ray_config) for node in nodes]
    match ray_config.placement_strategy:
        case "STRICT_PACK":
            fitting = max(slots, default=0)
            where = "on one node, as STRICT_PACK wants"
        case "STRICT_SPREAD":
            fitting = sum(slot > 0 for slot in slots)
            where = "on a node each, as STRICT_SPREAD wants"
        case _:
            fitting, where = sum(min(slot, dp_size) for slot in slots), "together"
    if fitting >= dp_size:
        return
    cpus, gpus = _total(nodes, "CPU"), _total(nodes, "GPU")
    raise ConfigError(
        f"ray: {dp_size} ranks of {_amounts(ray_config)} need {dp_size * ray_config.num_cpus:g} "
        f"CPUs and {dp_size * ray_config.num_gpus:g} GPUs {where}, but the cluster has {cpus:g} "
        f"CPUs and {gpus:g} GPUs on {len(nodes)} nodes, room for {fitting} ranks: lower dp_size, "
        "ray.num_cpus or ray.num_gpus, add nodes, or pass a placement_group of nodes to come"
    )


def reserve(config: PoolConfig, lifetime: str | None, name: str | None) -> Any:
    """A placement group with a bundle per rank, or None where nothing needs one."""
    bundle = {"CPU": config.ray.num_cpus, "GPU": config.ray.num_gpus}
    bundle = {resource: amount for resource, amount in bundle.items() if amount}
    if not bundle or (config.dp_size == 1 and not config.ray.num_gpus):
        return None
    return make_placement_group(
        [bundle] * config.dp_size,
        strategy=config.ray.placement_strategy,
        lifetime=lifetime if lifetime == "detached" else None,  # the other word is for actors only
        name=name or "",
    )


def await_reserved(group: Any, config: PoolConfig, timeout_s: float) -> None:
    """Wait until the group's resources are set aside.

    Raises:
        RankUnavailableError: others hold them.
    """
    if not group.wait(timeout_s):
        raise RankUnavailableError(
            f"no room for {config.dp_size} ranks of {_amounts(config.ray)} within "
            f"{config.ray.start_timeout_s:g} s: {free_resources()}; end what holds the rest, or "
            "raise ray.start_timeout_s"
        )


def free_resources() -> str:
    """What the cluster has left, in words."""
    free = ray.available_resources()
    return f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free"


def check_free(actor_name: str, namespace: str | None) -> None:
    """See that no actor has this name.

    Raises:
        ConfigError: one has.
    """
    try:
        ray.get_actor(actor_name, namespace)
    except ValueError:
        return
    raise ConfigError(
        f"a pool runs already whose first rank is called {actor_name!r}: choose another name, "
        "attach to that pool, or end it with raykv.actors.end"
    )


def remove_named(group: Any, name: str) -> None:
    """Give a placement group back if it has this name, for one of another name is somebody's own.

    Ray finds groups by name only in the namespace of the driver that made them, which may be gone.
    """
    if placement_group_table(group).get("name") == name:
        remove_placement_group(group)


def remove(group: Any) -> None:
    """Give a placement group back; fine if Ray is gone."""
    if ray.is_initialized():
        remove_placement_group(group)


def _start(config: PoolConfig, namespace: str | None) -> None:
    if not is_local():
        ray.init(namespace=namespace)
        return
    num_cpus = max(os.cpu_count() or 1, math.ceil(config.dp_size * config.ray.num_cpus))
    with _loopback_only():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            namespace=namespace,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
        )


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """While this lasts, a Ray that starts listens on 127.0.0.1 only.

    On Linux Ray listens on all interfaces, for others may join it; on macOS it does not. The
    switch between the two has no public name, and where it is missing nothing is changed.
    """
    switch = "ENABLE_RAY_CLUSTER"
    before = getattr(ray_constants, switch, None)
    if before is None:
        yield
        return
    setattr(ray_constants, switch, False)
    try:
        yield
    finally:
        setattr(ray_constants, switch, before)


def _release() -> None:
    global _num_users, _own_address  # noqa: PLW0603 - Ray is global to the process
    with _lock:
        _num_users -= 1
        if _num_users == 0 and ray.is_initialized() and _address() == _own_address:
            _own_address = None
            ray.shutdown()


def _nothing() -> None:
    """Leave a Ray that somebody else started."""


def _address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _num_ranks_on(node: dict[str, float], config: RayConfig) -> int:
    limits = [math.inf]
    if config.num_cpus:
        limits.append(_num_times(node.get("CPU", 0), config.num_cpus))
    if config.num_gpus:
        gpus = node.get("GPU", 0)
        # Shares of a GPU lie on one GPU each.
        is_share = config.num_gpus < 1
        per_gpu = _num_times(1, config.num_gpus) if is_share else 1
        limits.append(per_gpu * int(gpus) if is_share else _num_times(gpus, config.num_gpus))
    return int(min(*limits, 2**31))


def _num_times(whole: float, part: float) -> int:
    return math.floor(whole / part + 1e-6)


def _amounts(config: RayConfig) -> str:
    return f"{config.num_cpus:g} CPUs and {config.num_gpus:g} GPUs"


def _total(nodes: list[dict[str, float]], resource: str) -> float:
    return sum(node.get(resource, 0) for node in nodes)
