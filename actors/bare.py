"""A rank actor without a pool: what a step costs where nobody keeps copies or checks anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import ray

from raykv.actors.rank_actor import actor_class
from raykv.actors.wire import pack, split
from raykv.config import PoolConfig
from raykv.messages import Call


class BareRank:
    """Carries calls that were recorded elsewhere; for benchmarks. Ray must run.

    Args:
        config: as of the pool that the calls come from.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._actor = actor_class(num_cpus=0).remote(config, 0)
        info, _ = ray.get(self._actor.ready.remote())
        self._epoch = info.epoch
        self._echo: Any = ray.remote(num_cpus=0)(_Echo).remote()
        ray.get(self._echo.call.remote(0))

    def pack(self, call: Call) -> list[bytes]:
        """A call of another rank as bytes for this one."""
        return split(pack(replace(call, epoch=self._epoch)))

    def call(self, parts: list[bytes]) -> bytes:
        """One actor call that applies it."""
        answer: bytes = ray.get(self._actor.call.remote(*parts))
        return answer

    def echo(self, parts: list[bytes], num_reply_bytes: int) -> bytes:
        """One actor call of the same size both ways that does nothing."""
        answer: bytes = ray.get(self._echo.call.remote(num_reply_bytes, *parts))
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in (self._actor, self._echo):
            ray.kill(actor)


class _Echo:
    def call(self, num_reply_bytes: int, *parts: bytes) -> bytes:  # noqa: ARG002 - they travel
        return bytes(num_reply_bytes)
