"""A rank in the driver's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import NO_ROOM, RankStats, Room
from raykv.core.sequence import Sequence
from raykv.engine.lifecycle import Lifecycle
from raykv.engine.params import GenerationRequest, TokenDelta
from raykv.engine.weights import SleepTag, UpdateMode, Weights, WeightsStatus
from raykv.engine.worker import RankWorker
from raykv.errors import NotSupportedError, RankUnavailableError
from raykv.host.handle import TierHandle
from raykv.rank import RankKV
from raykv.rank_handle import Done, Failed, RankHandle, Reply
from raykv.rank_service import undo
from raykv.transfer_report import TransferReport

T = TypeVar("T")


class LocalRank(RankHandle):
    """A rank in this process. Without an engine, calls run on the caller's thread.

    Attributes:
        kv: the rank's block state.
        worker: the thread that owns it, where an engine runs.
    """

    def __init__(self, kv: RankKV, worker: RankWorker | None = None) -> None:
        self.kv = kv
        self.worker = worker
        self.dp_rank = kv.dp_rank
        self.limits = None if worker is None else worker.engine.limits
        self._lifecycle = Lifecycle(kv) if worker is None else worker.engine.lifecycle
        self._lock = threading.RLock()
        self._closed = False
        self._num_seen = 0  # deltas of the engine

    @property
    def stats(self) -> RankStats:
        """The rank's counters now."""
        if self.worker is not None:
            return self.worker.stats
        with self._lock:
            return self.kv.rank_stats()

    @property
    def room(self) -> Room:
        """See RankHandle."""
        if self._closed or (self.worker is not None and self.worker.is_closed):
            return NO_ROOM
        if self.worker is not None:
            return self.worker.stats.room
        with self._lock:
            return self.kv.room

    def allocate(self, sequences: list[Sequence], num_tokens: list[int]) -> Reply[bool]:
        """See RankHandle."""
        return self._do(lambda: self.kv.allocate_all(sequences, num_tokens))

    def allocate_shared(self, sequence: Sequence) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: self.kv.allocate_shared(sequence))

    def cache(self, sequence: Sequence, num_tokens: int | None) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: self.kv.cache(sequence, num_tokens))

    def release(self, sequences: list[Sequence], *, publish: bool) -> Reply[None]:
        """See RankHandle."""
        release = self.kv.deallocate if publish else self.kv.deallocate_without_cache
        return self._do(lambda: release(sequences))

    def undo(self, sequences: list[Sequence], num_blocks: list[int | None]) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: undo(self.kv, sequences, num_blocks))

    def fork(self, parent: Sequence, child: Sequence) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: self.kv.fork(parent, child))

    def explain(self, sequence: Sequence) -> Reply[MissReport]:
        """See RankHandle."""
        return self._do(lambda: self.kv.explain(sequence))

    def take_swaps(self) -> Reply[list[tuple[int, int]]]:
        """See RankHandle."""
        return self._do(lambda: self.kv.get_swap_block_transfer_infos()[0])

    def ack_swaps(self) -> Reply[None]:
        """See RankHandle."""
        return self._do(self.kv.ack_swaps)

    def take_state_copies(self) -> Reply[list[tuple[int, int]]]:
        """See RankHandle."""
        return self._do(lambda: self.kv.get_state_transfer_infos()[0])

    def ack_state_copies(self) -> Reply[None]:
        """See RankHandle."""
        return self._do(self.kv.ack_state_transfers)

    def connect_tier(self, tier: TierHandle, *, is_back: bool = False) -> Reply[None]:
        """See RankHandle."""
        worker = self.worker
        if worker is None:
            return self._do(lambda: self.kv.connect_tier(tier, is_back=is_back))
        engine, wake = worker.engine, worker.wake
        return self._do(
            lambda: self.kv.connect_tier(
                tier, is_back=is_back, wake=wake, prefill_rate=lambda: engine.tokens_per_s
            )
        )

    def transfer(self) -> Reply[TransferReport]:
        """See RankHandle."""
        return self._do(lambda: self.kv.transfer(""))

    def begin_epoch(self, epoch: int) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: self.kv.begin_epoch(epoch))

    def reset_prefix_cache(self) -> Reply[int]:
        """See RankHandle."""
        return self._do(lambda: self.kv.reset_prefix_cache()[0])

    def check_integrity(self) -> Reply[None]:
        """See RankHandle."""
        owner = self.kv if self.worker is None else self.worker.engine
        return self._do(owner.check_integrity)

    def refresh(self) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: None)

    def submit(self, requests: SequenceOf[GenerationRequest]) -> Reply[None]:
        """See RankHandle."""
        worker = self._engine()
        return self._do(lambda: worker.engine.submit(requests))

    def abort(self, request_ids: SequenceOf[str]) -> Reply[None]:
        """See RankHandle."""
        worker = self._engine()
        return self._do(lambda: worker.engine.abort(request_ids))

    def poll(self, wait_s: float) -> list[TokenDelta]:
        """See RankHandle."""
        first, deltas = self._engine().poll("", wait_s, self._num_seen)
        self._num_seen = first + len(deltas)
        return deltas

    def prepare_weights(self, version: int, weights: Weights, mode: UpdateMode) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: self._lifecycle.prepare_weights(version, weights, mode))

    def apply_weights(self, version: int) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: self._lifecycle.apply_weights(version))

    def cancel_weights(self, version: int) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: self._lifecycle.cancel_weights(version))

    def weights_status(self) -> Reply[WeightsStatus]:
        """See RankHandle."""
        return self._do(self._lifecycle.weights_status)

    def retire(self, version: int) -> Reply[int]:
        """See RankHandle."""
        return self._do(lambda: self._lifecycle.retire(version))

    def sleep(self, level: int, *, check_only: bool) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: self._lifecycle.sleep(level, check_only=check_only))

    def wake_up(self, tags: SequenceOf[SleepTag]) -> Reply[None]:
        """See RankHandle."""
        return self._do(lambda: self._lifecycle.wake_up(tags))

    def close(self) -> None:
        """See RankHandle."""
        self._closed = True
        if self.worker is not None:
            self.worker.close()
        with self._lock:
            self.kv.close_tier()

    def _do(self, function: Callable[[], T]) -> Reply[T]:
        if self._closed:
            return Failed(RankUnavailableError(f"rank {self.dp_rank} was closed: make a new pool"))
        try:
            if self.worker is not None:
                return self.worker.call(function)
            with self._lock:
                return Done(function())
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asks for the result
            return Failed(error)

    def _engine(self) -> RankWorker:
        if self.worker is None:
            raise NotSupportedError(
                f"rank {self.dp_rank} has no engine: configure a model to generate"
            )
        return self.worker
