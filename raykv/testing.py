"""Parts for tests of code that uses raykv: ranks without processes, and faults on demand."""

from __future__ import annotations

import contextlib
import pickle
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from raykv.config import PoolConfig
from raykv.errors import RankUnavailableError, RaykvError
from raykv.hierarchy import HierarchyBlockManagerPool
from raykv.host.handle import LocalTier, TierHandle
from raykv.host.tier_host import TierHost
from raykv.messages import Answer, Call, Health, Outputs, RankInfo
from raykv.pool import BlockManagerPool
from raykv.rank_handle import Done, Failed, RankHandle, Reply
from raykv.rank_host import RankHost
from raykv.remote_rank import RemoteRank, ReplyLostError

T = TypeVar("T")


class Host(Protocol):
    """What a loopback rank talks to: a RankHost, or a MortalHost around one."""

    config: PoolConfig

    def info(self) -> RankInfo:
        """See RankHost."""
        ...

    def health(self, driver_id: str, session: int) -> Health:
        """See RankHost."""
        ...

    def call(self, call: Call) -> Answer:
        """See RankHost."""
        ...

    def poll(self, driver_id: str, session: int, seen: int, wait_s: float) -> Outputs:
        """See RankHost."""
        ...

    def connect_tier(self, handle: TierHandle, *, is_back: bool = False) -> None:
        """See RankHost."""
        ...

    def close(self) -> None:
        """See RankHost."""
        ...


class MortalHost:
    """A RankHost that can be killed, frozen, and started again, for every driver that talks to it.

    Args:
        config: the pool's configuration.
        dp_rank: the rank's number.
        clock: seconds, for leases.

    Attributes:
        config: the pool's configuration.
        host: the rank, as started last.
        is_dead: whether it was killed, and not started again.
    """

    def __init__(
        self, config: PoolConfig, dp_rank: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self._dp_rank = dp_rank
        self._clock = clock
        self.host = RankHost(config, dp_rank, clock=clock)
        self.is_dead = False
        self._failure: str | None = None

    def kill(self) -> None:
        """As SIGKILL: from now on nothing answers, and all that it held is gone."""
        self.is_dead = True
        self._failure = f"rank {self._dp_rank} was killed"
        self.host.close()

    def freeze(self) -> None:
        """As SIGSTOP: from now on nothing answers, but what it holds is still there."""
        if not self.is_dead:
            self._failure = f"rank {self._dp_rank} is silent"

    def thaw(self) -> None:
        """As SIGCONT."""
        if not self.is_dead:
            self._failure = None

    def restart(self) -> None:
        """Start again, empty, in a new epoch."""
        self.host.close()
        self.host = RankHost(self.config, self._dp_rank, clock=self._clock)
        self.is_dead = False
        self._failure = None

    def info(self) -> RankInfo:
        """See RankHost."""
        return self._there().info()

    def health(self, driver_id: str, session: int) -> Health:
        """See RankHost."""
        return self._there().health(driver_id, session)

    def call(self, call: Call) -> Answer:
        """See RankHost."""
        return self._there().call(call)

    def poll(self, driver_id: str, session: int, seen: int, wait_s: float) -> Outputs:
        """See RankHost."""
        outputs = self._there().poll(driver_id, session, seen, wait_s)
        self._there()  # an answer of one that died meanwhile does not arrive
        return outputs

    def connect_tier(self, handle: TierHandle, *, is_back: bool = False) -> None:
        """See RankHost."""
        self._there().connect_tier(handle, is_back=is_back)

    def close(self) -> None:
        """See RankHost."""
        self.host.close()

    def _there(self) -> RankHost:
        if self._failure is not None:
            raise RankUnavailableError(self._failure)
        return self.host


class LoopbackRank(RemoteRank):
    """A rank in this process that is spoken to in messages, pickled both ways.

    Attributes:
        host: the rank itself.
    """

    def __init__(self, host: Host, driver_id: str = "driver") -> None:
        super().__init__(host.info(), driver_id, host.config.ray)
        self.host = host
        self._is_closed = False

    def send(self, call: Call) -> Reply[Answer]:
        """Apply the call at once."""
        try:
            return Done(_copy(self._open_host().call(_copy(call))))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asks for the result
            return Failed(error)

    def fetch(self, session: int, seen: int, wait_s: float) -> Outputs:
        """See RemoteRank."""
        return _copy(self._open_host().poll(self.driver_id, session, seen, wait_s))

    def beat(self) -> None:
        """See RankHandle; here a rank that is back is there at once."""
        if self._is_closed:
            return
        try:
            health = _copy(self.host.health(self.driver_id, self.session))
        except RankUnavailableError as error:
            self.lose(str(error))
        else:
            self.hear(health)
            if self._welcomer is not None:
                self._welcomer.join()

    def connect_tier(self, tier: TierHandle, *, is_back: bool = False) -> Reply[None]:
        """See RankHandle."""
        try:
            self._open_host().connect_tier(tier, is_back=is_back)
            return Done(None)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asks for the result
            return Failed(error)

    def close(self) -> None:
        """See RankHandle."""
        self._is_closed = True
        self.host.close()

    def _open_host(self) -> Host:
        if self._is_closed:
            raise RankUnavailableError(f"rank {self.dp_rank} was closed: make a new pool")
        return self.host


def loopback_pool(
    config: PoolConfig, tiers: Sequence[TierHandle] | None = None
) -> BlockManagerPool:
    """A pool over messages without processes: what Ray carries, minus Ray.

    Nothing beats by itself: ``pool.monitor.beat()`` is one heartbeat to every rank.

    Args:
        config: the pool.
        tiers: the host tiers to use, by rank in turn; None makes them.
    """
    config = config.with_seed()
    hosts = [RankHost(config, dp_rank) for dp_rank in range(config.dp_size)]
    return loopback_driver(hosts, tiers=tiers)


def loopback_driver(
    hosts: Sequence[Host],
    driver_id: str = "driver",
    tiers: Sequence[TierHandle] | None = None,
) -> BlockManagerPool:
    """One of several drivers of the same ranks; closing it ends them, and the tiers."""
    ranks: list[RankHandle] = [LoopbackRank(host, driver_id) for host in hosts]
    config = hosts[0].config
    if config.host is None:
        return BlockManagerPool(config, ranks)
    pool = HierarchyBlockManagerPool(config, ranks)
    if tiers is None:
        num_tiers = len(ranks) if config.host.scope == "rank" else 1
        tiers = [LocalTier(TierHost(config)) for _ in range(num_tiers)]
    pool.use_tiers([*tiers], [rank % len(tiers) for rank in range(len(ranks))])
    return pool


@dataclass
class Faults:
    """What goes wrong on the way to a rank and back, each with a probability per message.

    Attributes:
        rng: decides.
        lost_call: the call does not arrive.
        lost_reply: it is applied, but the answer does not arrive.
        doubled: it arrives twice.
        late: it arrives after the next one, when its driver has stopped waiting for it.
        overtaken: it arrives after the next one, and is answered then.
        death_before: the rank dies before it applies the call.
        death_after: the rank dies after that, and before it answers.
        counts: how often each came to pass.
    """

    rng: random.Random
    lost_call: float = 0.0
    lost_reply: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    overtaken: float = 0.0
    death_before: float = 0.0
    death_after: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    def draw(self, kinds: tuple[str, ...]) -> str:
        """The fault of one message, mostly ``""``."""
        point = self.rng.random()
        for kind in kinds:
            point -= getattr(self, kind)
            if point < 0:
                self.counts[kind] = self.counts.get(kind, 0) + 1
                return kind
        return ""


CALL_FAULTS = (
    "lost_call", "lost_reply", "doubled", "late", "overtaken", "death_before", "death_after",
)  # fmt: skip
POLL_FAULTS = ("lost_call", "lost_reply")


def inject(rank: RemoteRank, faults: Faults, kill: Callable[[], object] = lambda: None) -> None:
    """Let faults happen to all that this handle sends from now on, over loopback or over Ray.

    Args:
        rank: the handle.
        faults: what, and how often.
        kill: ends the rank, for deaths.
    """
    link = _FaultyLink(rank, faults, kill)
    rank.send = link.send  # type: ignore[method-assign]
    rank.fetch = link.fetch  # type: ignore[method-assign]


class _FaultyLink:
    def __init__(self, rank: RemoteRank, faults: Faults, kill: Callable[[], object]) -> None:
        self._send, self._fetch = rank.send, rank.fetch
        self._faults = faults
        self._kill = kill
        self._waiting: list[_Deferred] = []
        self._lock = threading.RLock()

    def send(self, call: Call) -> Reply[Answer]:
        with self._lock:
            due, self._waiting = self._waiting, []
            try:
                return self._carry(call)
            finally:
                for one in due:
                    one.arrive()

    def _carry(self, call: Call) -> Reply[Answer]:  # noqa: PLR0911 - one for each fault
        match self._faults.draw(CALL_FAULTS):
            case "lost_call":
                return _LOST
            case "lost_reply":
                self._send(call)
                return _LOST
            case "doubled":
                self._send(call)
                return self._send(call)
            case "late":
                self._waiting.append(_Deferred(self._send, call))
                return _LOST
            case "overtaken":
                self._waiting.append(_Deferred(self._send, call))
                return self._waiting[-1]
            case "death_before":
                self._kill()
                return self._send(call)
            case "death_after":
                reply = self._send(call)
                with contextlib.suppress(RaykvError):
                    reply.result()
                self._kill()
                return _LOST
        return self._send(call)

    def fetch(self, session: int, seen: int, wait_s: float) -> Outputs:
        fault = self._faults.draw(POLL_FAULTS)
        if fault == "lost_call":
            raise _lost()
        outputs = self._fetch(session, seen, wait_s)
        if fault == "lost_reply":
            raise _lost()
        return outputs


class _Deferred:
    """A call that arrives when the next one has, or when somebody waits for its answer."""

    def __init__(self, send: Callable[[Call], Reply[Answer]], call: Call) -> None:
        self._send = send
        self._call = call
        self._reply: Reply[Answer] | None = None
        self._lock = threading.Lock()

    def arrive(self) -> Reply[Answer]:
        with self._lock:
            if self._reply is None:
                self._reply = self._send(self._call)
            return self._reply

    def result(self) -> Answer:
        return self.arrive().result()


def _lost() -> ReplyLostError:
    return ReplyLostError("the answer was lost on the way, as asked for")


_LOST = Failed(_lost())


def _copy(value: T) -> T:
    """What arrives at the other end of a pipe."""
    copy: T = pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes
    return copy
