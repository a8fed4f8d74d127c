"""A whole rank in one object: what runs in a rank actor's process, or beside a test."""

from __future__ import annotations

import os
import socket

from raykv.config import PoolConfig
from raykv.engine.build import build_rank
from raykv.engine.worker import RankWorker
from raykv.errors import NotSupportedError
from raykv.messages import Answer, Call, Outputs, RankInfo
from raykv.rank_service import RankService


class RankHost:
    """Builds a rank and answers messages. A plain class; ``raykv.actors`` makes it an actor.

    ``call`` and ``poll`` may run on different threads; the rank's own thread does the work where
    there is an engine, and ``call`` has one caller at a time where there is none.

    Args:
        config: the pool's configuration, its hash seed drawn.
        dp_rank: the rank's number.
        epoch: tells this start of the rank from earlier ones.
    """

    def __init__(self, config: PoolConfig, dp_rank: int, epoch: int) -> None:
        self._kv, engine = build_rank(config, dp_rank)
        self._service = RankService(self._kv, epoch, engine)
        self._stats = self._kv.rank_stats()
        self._worker = None if engine is None else RankWorker(engine)

    def info(self) -> RankInfo:
        """What drivers need to know; the first call of each, and the health check at start."""
        worker, buffers = self._worker, self._kv.buffers
        return RankInfo(
            dp_rank=self._kv.dp_rank,
            epoch=self._service.epoch,
            block_size=self._kv.block_size,
            pid=os.getpid(),
            node=socket.gethostname(),
            device=None if buffers is None else buffers.device,
            limits=None if worker is None else worker.engine.limits,
            stats=self._stats if worker is None else worker.stats,
        )

    def call(self, call: Call) -> Answer:
        """Apply a call; see RankService.apply."""
        if self._worker is None:
            answer = self._service.apply(call)
            self._stats = self._kv.rank_stats()  # `info` runs on a thread that may not look itself
            return answer
        return self._worker.call(lambda: self._service.apply(call)).result()

    def poll(self, driver_id: str, wait_s: float) -> Outputs:
        """What the engine produced for a driver since; waits up to ``wait_s`` seconds."""
        if self._worker is None:
            raise NotSupportedError(f"rank {self._kv.dp_rank} has no engine")
        deltas = self._worker.poll(driver_id, wait_s)
        return Outputs(deltas, self._worker.stats)

    def close(self) -> None:
        """Stop the engine after the step in progress; idempotent."""
        if self._worker is not None:
            self._worker.close()
