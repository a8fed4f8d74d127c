"""The actor around a host tier, and the handle that ranks and drivers talk to it through."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util import get_node_ip_address

from raykv.actors.errors import translate
from raykv.actors.groups import in_group
from raykv.actors.wire import pack, split, unpack
from raykv.config import PoolConfig
from raykv.core.namespace import Namespace
from raykv.errors import RankUnavailableError
from raykv.host.handle import TierHandle
from raykv.host.messages import BlockKind, TierInfo
from raykv.host.state_stats import HostStatesStats
from raykv.host.stats import HostTierStats
from raykv.host.tickets import LoadResult, LoadTicket, Want
from raykv.host.tier_host import TierHost
from raykv.host.transport import ObjectStoreTransport, RowRequest

_MAX_CONCURRENCY = 8
_NUM_WAITING = 16  # calls that wait for a store hold a thread each, which none of the others needs


class TierActor:
    """A TierHost that answers from several threads.

    None of its methods is a coroutine: one would make Ray run all of them in one event loop, where
    who waits keeps all others waiting.

    Args:
        config: the pool's configuration.
        index: which of the pool's tiers it is.
    """

    def __init__(self, config: PoolConfig, index: int) -> None:
        assert config.host is not None, "a host tier is asked for"
        self._peers: dict[str, RayPeer] = {}
        self._index = index
        self._by_objects = config.host.transport == "object_store"
        fetch = ObjectFetch(self._peers)
        transport = ObjectStoreTransport(fetch.fetch) if self._by_objects else None
        self._host = TierHost(config, index, transport=transport)

    def ready(self) -> int:
        """The process that it runs in, once it runs."""
        return self._host.pid()

    def exchange(self, *parts: bytes) -> bytes:
        """See TierHost.exchange; packed both ways."""
        return pack(self._host.exchange(unpack(parts)))

    def join(self, client_id: str, pid: int, kind: BlockKind, replaces: str = "") -> TierInfo:
        """See TierHost."""
        return self._host.join(client_id, pid, kind, replaces)

    def renew(self, client_id: str) -> bool:
        """See TierHost."""
        return self._host.renew(client_id)

    def unmapped(self, client_id: str) -> None:
        """See TierHost."""
        self._host.unmapped(client_id)

    def prefetch(self, tokens: NDArray[np.int32], namespace: Namespace) -> bool:
        """See TierHost."""
        return self._host.prefetch(tokens, namespace)

    @in_group("wait")
    def wait_prefetch(
        self, tokens: NDArray[np.int32], namespace: Namespace, timeout_s: float
    ) -> bool:
        """See TierHost."""
        return self._host.wait_prefetch(tokens, namespace, timeout_s)

    @in_group("wait")
    def drain(self, timeout_s: float) -> bool:
        """See TierHost."""
        return self._host.drain(timeout_s)

    def source_stats(self) -> dict[str, Any]:
        """See TierHost."""
        return self._host.source_stats()

    def set_peers(self, actors: dict[str, Any]) -> None:
        """Know the other nodes' tiers, by name."""
        self._peers.clear()
        self._peers |= {name: RayPeer(name, self._index, actor) for name, actor in actors.items()}
        self._host.set_peers([*self._peers.values()])

    def lend(self, peer: str, want: Want) -> tuple[str, LoadTicket]:
        """See TierHost.lend; with the address to read from: a name, where objects are carried."""
        if self._by_objects:
            return f"{self._index}", self._host.lend(peer, want)
        return self._host.serve(get_node_ip_address()), self._host.lend(peer, want)

    def give_back(self, peer: str, result: LoadResult) -> None:
        """See TierHost."""
        self._host.give_back(peer, result)

    def take_rows(self, request: RowRequest) -> list[NDArray[np.uint8]]:
        """See TierHost; through Ray's object store."""
        return self._host.take_rows(request)

    def reset(self) -> tuple[int, int]:
        """See TierHost."""
        return self._host.reset()

    def retire(self, weights_version: int) -> int:
        """See TierHost."""
        return self._host.retire(weights_version)

    def stats(self) -> HostTierStats:
        """See TierHost."""
        return self._host.stats()

    def state_stats(self) -> HostStatesStats | None:
        """See TierHost."""
        return self._host.state_stats()

    def check_integrity(self) -> None:
        """See TierHost."""
        self._host.check_integrity()

    def close(self) -> None:
        """See TierHost."""
        self._host.close()


class RayPeer:
    """Another node's tier, for this one to read from; see PeerHandle.

    Args:
        name: its own.
        index: of the tier that reads.
        actor: the handle of its TierActor.
    """

    def __init__(self, name: str, index: int, actor: Any) -> None:
        self.name = self.address = name
        self.actor = actor
        self._reader = str(index)

    async def find(self, want: Want) -> LoadTicket | None:
        """See PeerHandle."""
        ticket: LoadTicket
        self.address, ticket = await self.actor.lend.remote(self._reader, want)
        return ticket

    async def loaded(self, result: LoadResult) -> None:
        """See PeerHandle."""
        await self.actor.give_back.remote(self._reader, result)


class ObjectFetch:
    """Carries rows of peers through Ray's object store; see ObjectStoreTransport.

    Args:
        peers: by name, which is their address here; may change.
    """

    def __init__(self, peers: dict[str, RayPeer]) -> None:
        self._peers = peers

    async def fetch(self, address: str, request: RowRequest) -> list[NDArray[np.uint8]]:
        """See ``raykv.host.transport.object_store.Fetch``."""
        rows: list[NDArray[np.uint8]] = await self._peers[address].actor.take_rows.remote(request)
        return rows


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
    return ray.remote(
        max_concurrency=_MAX_CONCURRENCY,
        concurrency_groups={"wait": _NUM_WAITING},
        max_task_retries=0,
        **options,
    )(TierActor)
