"""Parts for tests of code that uses raykv."""

from __future__ import annotations

import pickle
from typing import TypeVar

from raykv.config import PoolConfig
from raykv.engine.params import TokenDelta
from raykv.errors import RankUnavailableError
from raykv.messages import Answer, Call
from raykv.pool import BlockManagerPool
from raykv.rank_handle import Done, Failed, Reply
from raykv.rank_host import RankHost
from raykv.remote_rank import RemoteRank

T = TypeVar("T")


class LoopbackRank(RemoteRank):
    """A rank in this process that is spoken to in messages, pickled both ways.

    Attributes:
        host: the rank itself.
    """

    def __init__(self, host: RankHost, driver_id: str = "driver") -> None:
        super().__init__(host.info(), driver_id)
        self.host = host
        self._is_closed = False

    def send(self, call: Call) -> Reply[Answer]:
        """Apply the call at once."""
        try:
            return Done(_copy(self._open_host().call(_copy(call))))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asks for the result
            return Failed(error)

    def poll(self, wait_s: float) -> list[TokenDelta]:
        """See RankHandle."""
        return self.take(_copy(self._open_host().poll(self.driver_id, wait_s)))

    def close(self) -> None:
        """See RankHandle."""
        self._is_closed = True
        self.host.close()

    def _open_host(self) -> RankHost:
        if self._is_closed:
            raise RankUnavailableError(f"rank {self.dp_rank} was closed: make a new pool")
        return self.host


def loopback_pool(config: PoolConfig) -> BlockManagerPool:
    """A pool over messages without processes: what Ray carries, minus Ray."""
    config = config.with_seed()
    hosts = [RankHost(config, dp_rank, epoch=1) for dp_rank in range(config.dp_size)]
    return BlockManagerPool(config, [LoopbackRank(host) for host in hosts])


def _copy(value: T) -> T:
    """What arrives at the other end of a pipe."""
    copy: T = pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes
    return copy
