"""A whole rank in one object: what runs in a rank actor's process, or beside a test."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from raykv.config import PoolConfig
from raykv.engine.build import build_rank
from raykv.engine.worker import RankWorker
from raykv.errors import NotSupportedError, RankUnavailableError
from raykv.host.handle import TierHandle
from raykv.leases import session_name
from raykv.messages import Answer, Call, Health, Outputs, RankInfo
from raykv.rank_service import RankService

T = TypeVar("T")

_LOOKS_PER_LEASE = 4


class RankHost:
    """Builds a rank and answers messages. A plain class; ``raykv.actors`` makes it an actor.

    Its methods may be called from any thread; the rank's own thread does the work where there is an
    engine, and one caller at a time where there is none.

    Args:
        config: the pool's configuration, its hash seed drawn.
        dp_rank: the rank's number.
        epoch: tells this start of the rank from earlier ones; None draws a later one.
        clock: seconds, for leases.
    """

    def __init__(
        self,
        config: PoolConfig,
        dp_rank: int,
        epoch: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._kv, engine = build_rank(config, dp_rank)
        epoch = time.time_ns() if epoch is None else epoch
        self._worker = None if engine is None else RankWorker(engine)
        self._service = RankService(
            self._kv, epoch, engine, clock=clock, on_end=self._forget_outputs
        )
        self._stats = self._kv.rank_stats()
        self._lock = threading.Lock()  # in place of the owning thread
        self._busy_since: float | None = None  # since when somebody holds it
        self._closed = threading.Event()

    def info(self) -> RankInfo:
        """What drivers need to know; the first call of each."""
        worker, buffers, states = self._worker, self._kv.buffers, self._kv.state_buffers
        return RankInfo(
            dp_rank=self._kv.dp_rank,
            epoch=self._service.epoch,
            block_size=self._kv.block_size,
            pid=os.getpid(),
            node=socket.gethostname(),
            device=None if buffers is None else buffers.device,
            block_bytes=0 if buffers is None else buffers.spec.block_bytes,
            checkpoint_bytes=0 if states is None else states.checkpoint_bytes,
            limits=None if worker is None else worker.engine.limits,
            stats=self._stats if worker is None else worker.stats,
        )

    def health(self, driver_id: str, session: int) -> Health:
        """Answer a heartbeat, which renews the driver's lease; waits for nothing.

        Raises:
            RankUnavailableError: the rank's engine stopped on a failure.
        """
        self._check_alive()
        known = self._service.leases.renew(driver_id, session)
        return Health(self.info(), known, self.idle_s)

    @property
    def idle_s(self) -> float:
        """Seconds since the owner last moved, while it has work; else 0."""
        worker = self._worker
        since = self._busy_since
        if worker is not None:
            since = worker.last_moved if worker.is_busy else None
        return 0.0 if since is None else time.monotonic() - since

    def call(self, call: Call) -> Answer:
        """Apply a call; see RankService.apply."""
        return self._owned(lambda: self._service.apply(call))

    def poll(self, driver_id: str, session: int, seen: int, wait_s: float) -> Outputs:
        """What the engine produced for a driver's session; waits up to ``wait_s`` seconds.

        Args:
            driver_id: whose.
            session: which; it gets nothing of an earlier one's, even before it began here.
            seen: how many deltas it has had.
            wait_s: seconds to wait for something new.

        Raises:
            RankUnavailableError: the session is over.
        """
        if self._worker is None:
            raise NotSupportedError(f"rank {self._kv.dp_rank} has no engine")
        if not self._service.leases.renew(driver_id, session):
            raise RankUnavailableError(
                f"rank {self._kv.dp_rank} knows session {session} of driver {driver_id} no more: "
                "its requests were ended, send them again"
            )
        first, deltas = self._worker.poll(session_name(driver_id, session), wait_s, seen)
        return Outputs(first, deltas, self._worker.stats)

    def connect_tier(self, handle: TierHandle, *, is_back: bool = False) -> None:
        """Use this host tier from now on; see RankKV.connect_tier."""
        worker = self._worker
        if worker is None:
            self._owned(lambda: self._kv.connect_tier(handle, is_back=is_back))
        else:
            self._owned(
                lambda: self._kv.connect_tier(
                    handle,
                    is_back=is_back,
                    wake=worker.wake,
                    prefill_rate=lambda: worker.engine.tokens_per_s,
                )
            )

    def expire(self) -> int:
        """Take back what silent drivers hold; how many drivers that were."""
        return self._owned(self._service.expire)

    def watch(self, end_process: Callable[[str], object]) -> None:
        """Look after the rank from a thread of its own, until it is closed.

        It takes back what silent drivers hold, and ends the process once the engine is dead or
        stuck: an actor whose engine is dead looks alive to Ray (Ray 60088).

        Args:
            end_process: called with the reason.
        """
        threading.Thread(
            target=self._watch, args=(end_process,), name="raykv-watch", daemon=True
        ).start()

    def close(self) -> None:
        """Stop the engine after the step in progress; idempotent."""
        self._closed.set()
        if self._worker is not None:
            self._worker.close()
        self._kv.close_tier()

    def _watch(self, end_process: Callable[[str], object]) -> None:
        limit_s = self.config.ray.stuck_timeout_s
        interval_s = min(self.config.ray.lease_s / _LOOKS_PER_LEASE, 1.0)
        while not self._closed.wait(interval_s):
            if self.idle_s > limit_s:
                end_process(f"its engine has not moved for {self.idle_s:.0f} s")
                return
            try:
                self._check_alive()
                # Not awaited: the owner may be stuck.
                if self._worker is not None:
                    self._worker.call(self._service.expire)
                elif self._lock.acquire(timeout=interval_s):
                    self._lock.release()
                    self.expire()
            except RankUnavailableError as error:
                if not self._closed.is_set():
                    end_process(str(error))
                return

    def _forget_outputs(self, session: str) -> None:
        if self._worker is not None:
            self._worker.forget(session)

    def _check_alive(self) -> None:
        if self._worker is not None:
            self._worker.check_alive()

    def _owned(self, function: Callable[[], T]) -> T:
        """Run a function as the owner of the rank."""
        if self._worker is not None:
            return self._worker.call(function).result()
        with self._lock:
            self._busy_since = time.monotonic()
            try:
                result = function()
                self._stats = self._kv.rank_stats()  # heartbeats may not look for themselves
            finally:
                self._busy_since = None
            return result
