"""The actor around a host tier, and the handle that ranks and drivers talk to it through."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import ray

from raykv.actors.errors import translate
from raykv.actors.wire import pack, split, unpack
from raykv.config import PoolConfig
from raykv.errors import RankUnavailableError
from raykv.host_stats import HostTierStats
from raykv.tier_handle import TierHandle
from raykv.tier_host import TierHost
from raykv.tier_messages import TierInfo

_MAX_CONCURRENCY = 8  # calls are short, but for those that wait for a store


class TierActor:
    """A TierHost that answers from several threads.

    Args:
        config: the pool's configuration.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._host = TierHost(config)

    def ready(self) -> int:
        """The process that it runs in, once it runs."""
        return self._host.pid()

    def exchange(self, *parts: bytes) -> bytes:
        """See TierHost.exchange; packed both ways."""
        return pack(self._host.exchange(unpack(parts)))

    def join(self, client_id: str, pid: int, block_bytes: int, replaces: str = "") -> TierInfo:
        """See TierHost."""
        return self._host.join(client_id, pid, block_bytes, replaces)

    def renew(self, client_id: str) -> bool:
        """See TierHost."""
        return self._host.renew(client_id)

    def unmapped(self, client_id: str) -> None:
        """See TierHost."""
        self._host.unmapped(client_id)

    def reset(self) -> tuple[int, int]:
        """See TierHost."""
        return self._host.reset()

    def retire(self, weights_version: int) -> int:
        """See TierHost."""
        return self._host.retire(weights_version)

    def stats(self) -> HostTierStats:
        """See TierHost."""
        return self._host.stats()

    def check_integrity(self) -> None:
        """See TierHost."""
        self._host.check_integrity()

    def close(self) -> None:
        """See TierHost."""
        self._host.close()


class RayTier(TierHandle):
    """A host tier in an actor.

    Args:
        actor: the handle of its TierActor.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """See TierHandle; Ray keeps the order of one caller's calls."""
        answer: Future[Any] = Future()
        is_packed = method == "exchange"
        parts = split(pack(arguments[0])) if is_packed else arguments

        def take(done: Future[Any]) -> None:
            try:
                value = done.result()
            except Exception as error:  # noqa: BLE001 - whatever Ray raises, the tier is not there
                answer.set_exception(translate(error, "the host tier", 0))
            else:
                answer.set_result(unpack([value]) if is_packed else value)

        if not ray.is_initialized():  # a call on a handle would start another Ray by itself
            answer.set_exception(RankUnavailableError("Ray was shut down: launch another pool"))
            return answer
        try:
            getattr(self.actor, method).remote(*parts).future().add_done_callback(take)
        except Exception as error:  # noqa: BLE001 - Ray raises bare ones once it was shut down
            answer.set_exception(translate(error, "the host tier", 0))
        return answer


def tier_class(**options: Any) -> Any:
    """TierActor as an actor class of Ray's, with these options."""
    return ray.remote(max_concurrency=_MAX_CONCURRENCY, max_task_retries=0, **options)(TierActor)
