"""The actor around a rank: concurrency groups, and errors of the start kept for who asks."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NoReturn

import ray
from ray.util import get_current_placement_group

from raykv.actors.tier_actor import RayTier, in_group
from raykv.actors.wire import pack, unpack
from raykv.config import PoolConfig
from raykv.errors import RankUnavailableError
from raykv.messages import Call, Health, Outputs, RankInfo
from raykv.rank_host import RankHost

CONCURRENCY_GROUPS = {"call": 1, "poll": 16, "health": 2}
"""Threads per group: calls are applied one by one, in the order they came; a long poll holds a
thread per driver; heartbeats and closing never wait behind either."""

_START_AGAIN_S = 1.0


class RankActor:
    """A RankHost that answers from several threads.

    Ray turns what a constructor raises into text, so it is kept here and raised by ``ready``.

    Args:
        config: the pool's configuration, its hash seed drawn.
        dp_rank: the rank's number.
    """

    def __init__(self, config: PoolConfig, dp_rank: int) -> None:
        self._host: RankHost | None = None
        self._failure: Exception | None = None
        self._tier: Any = None
        try:
            self._host = RankHost(config, dp_rank)
            self._host.watch(_end_process)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
            self._failure = error
            if ray.get_runtime_context().was_current_actor_reconstructed:
                # Its drivers were served by it before. What keeps it from starting, such as memory
                # that the one before still holds, may pass; a rank that only says so would not.
                time.sleep(_START_AGAIN_S)
                _end_process(f"it cannot start again: {type(error).__name__}: {error}")

    @in_group("health")
    def ready(self) -> tuple[RankInfo, str]:
        """What the rank says of itself, and the id of the Ray node it runs on.

        Raises:
            ConfigError: the rank could not be built.
        """
        return self._started().info(), ray.get_runtime_context().get_node_id()

    @in_group("call")
    def call(self, *parts: bytes) -> bytes:
        """See RankHost.call; packed both ways."""
        call: Call = unpack(parts)
        return pack(self._started().call(call))

    @in_group("poll")
    def poll(self, driver_id: str, session: int, seen: int, wait_s: float) -> Outputs:
        """See RankHost.poll."""
        return self._started().poll(driver_id, session, seen, wait_s)

    @in_group("health")
    def health(self, driver_id: str, session: int) -> Health:
        """See RankHost.health."""
        return self._started().health(driver_id, session)

    @in_group("health")
    def config(self) -> PoolConfig:
        """What the pool was made from, for whoever attaches to it."""
        return self._started().config

    @in_group("health")
    def connect_tier(self, actor: Any, *, is_back: bool) -> None:
        """See RankHost.connect_tier; of the tier that it uses already, it keeps what it has."""
        if self._tier is None or _id(self._tier) != _id(actor):
            self._started().connect_tier(RayTier(actor), is_back=is_back)
            self._tier = actor

    @in_group("health")
    def tier(self) -> Any:
        """The host tier's actor.

        Raises:
            RankUnavailableError: none is connected yet.
        """
        if self._tier is None:
            raise RankUnavailableError("the rank has no host tier yet: try again")
        return self._tier

    @in_group("health")
    def placement_group(self) -> Any:
        """Where the rank lies; None if it lies in no group."""
        return get_current_placement_group()

    @in_group("health")
    def close(self) -> None:
        """See RankHost.close."""
        if self._host is not None:
            self._host.close()

    def _started(self) -> RankHost:
        if self._host is None:
            assert self._failure is not None, "the constructor keeps one or the other"
            raise self._failure
        return self._host


def actor_class(**options: Any) -> Any:
    """RankActor as an actor class of Ray's, with these options."""
    groups = dict(CONCURRENCY_GROUPS)
    return ray.remote(concurrency_groups=groups, max_task_retries=0, **options)(RankActor)


def _id(actor: Any) -> str:
    return str(actor._actor_id.hex())  # noqa: SLF001 - handles of one actor are not equal


def _end_process(reason: str) -> NoReturn:
    """End this actor's process, which Ray may then start again."""
    sys.stderr.write(f"raykv: rank (pid {os.getpid()}) ends itself: {reason}\n")
    sys.stderr.flush()
    os._exit(1)
