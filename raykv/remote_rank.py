"""A rank behind messages: the driver's end, without saying what carries them."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import RankStats
from raykv.core.sequence import KVCacheState, Sequence
from raykv.engine.params import GenerationRequest, TokenDelta
from raykv.engine.weights import SleepTag, UpdateMode, Weights, WeightsStatus
from raykv.errors import RequestError
from raykv.messages import Answer, Call, Operation, Outputs, RankInfo, SequenceState, SequenceUpdate
from raykv.rank_handle import Done, Failed, RankHandle, Reply


class RemoteRank(RankHandle):
    """A rank behind messages. Keeps the driver's copies of sequences and counters up to date.

    Args:
        info: what the rank said of itself.
        driver_id: who this driver is.
    """

    def __init__(self, info: RankInfo, driver_id: str) -> None:
        self.info = info
        self.dp_rank = info.dp_rank
        self.limits = info.limits
        self.block_size = info.block_size
        self.driver_id = driver_id
        self._stats = info.stats
        self._numbers = itertools.count(1)
        # Sequences with memory there, by id, and how many of their tokens the rank has.
        self._held: dict[Hashable, tuple[Sequence, int]] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def send(self, call: Call) -> Reply[Answer]:
        """Carry a call to the rank; calls arrive in the order they are sent."""

    @property
    def stats(self) -> RankStats:
        """The rank's counters as of its last reply."""
        return self._stats

    def allocate(self, sequences: list[Sequence], num_tokens: list[int]) -> Reply[bool]:
        """See RankHandle."""
        return self._call("allocate", sequences, num_tokens)

    def allocate_shared(self, sequence: Sequence) -> Reply[None]:
        """See RankHandle."""
        return self._call("allocate_shared", [sequence])

    def cache(self, sequence: Sequence, num_tokens: int | None) -> Reply[None]:
        """See RankHandle."""
        if sequence.single_block_id is None:
            return Done(None)
        return self._call("cache", [sequence], num_tokens)

    def release(self, sequences: list[Sequence], *, publish: bool) -> Reply[None]:
        """See RankHandle."""
        return self._call("release", sequences, publish)

    def undo(self, sequences: list[Sequence], num_blocks: list[int | None]) -> Reply[None]:
        """See RankHandle."""
        return self._call("undo", sequences, num_blocks)

    def fork(self, parent: Sequence, child: Sequence) -> Reply[None]:
        """See RankHandle."""
        return self._call("fork", [parent, child])

    def explain(self, sequence: Sequence) -> Reply[MissReport]:
        """See RankHandle."""
        return self._call("explain", [sequence])

    def take_swaps(self) -> Reply[list[tuple[int, int]]]:
        """See RankHandle."""
        return self._call("take_swaps")

    def ack_swaps(self) -> Reply[None]:
        """See RankHandle."""
        return self._call("ack_swaps")

    def reset_prefix_cache(self) -> Reply[int]:
        """See RankHandle."""
        return self._call("reset_prefix_cache")

    def check_integrity(self) -> Reply[None]:
        """See RankHandle."""
        return self._call("check_integrity")

    def refresh(self) -> Reply[None]:
        """See RankHandle."""
        return self._call("refresh")

    def submit(self, requests: SequenceOf[GenerationRequest]) -> Reply[None]:
        """See RankHandle."""
        return self._call("submit", argument=list(requests))

    def abort(self, request_ids: SequenceOf[str]) -> Reply[None]:
        """See RankHandle."""
        return self._call("abort", argument=list(request_ids))

    def prepare_weights(self, version: int, weights: Weights, mode: UpdateMode) -> Reply[None]:
        """See RankHandle."""
        argument = {"version": version, "weights": weights, "mode": mode}
        return self._call("prepare_weights", argument=argument)

    def apply_weights(self, version: int) -> Reply[None]:
        """See RankHandle."""
        with self._lock:
            held = [sequence for sequence, _ in self._held.values()]
        return self._call("apply_weights", held, {"version": version})

    def cancel_weights(self, version: int) -> Reply[None]:
        """See RankHandle."""
        return self._call("cancel_weights", argument={"version": version})

    def weights_status(self) -> Reply[WeightsStatus]:
        """See RankHandle."""
        return self._call("weights_status", argument={})

    def retire(self, version: int) -> Reply[int]:
        """See RankHandle."""
        return self._call("retire", argument={"version": version})

    def sleep(self, level: int, *, check_only: bool) -> Reply[None]:
        """See RankHandle."""
        return self._call("sleep", argument={"level": level, "check_only": check_only})

    def wake_up(self, tags: SequenceOf[SleepTag]) -> Reply[None]:
        """See RankHandle."""
        return self._call("wake_up", argument={"tags": tags})

    def take(self, outputs: Outputs) -> list[TokenDelta]:
        """Note the counters that came with outputs; for ``poll``."""
        with self._lock:
            self._stats = outputs.stats
        return outputs.deltas

    def _call(
        self, operation: Operation, sequences: list[Sequence] | None = None, argument: Any = None
    ) -> Reply[Any]:
        sequences = sequences or []
        with self._lock:
            try:
                updates = tuple(self._update(sequence) for sequence in sequences)
            except RequestError as error:
                return Failed(error)
            call = Call(
                self.driver_id, next(self._numbers), self.info.epoch, operation, updates, argument
            )
            return _RemoteReply(
                self.send(call), lambda answer: self._apply(answer, call, sequences)
            )

    def _update(self, sequence: Sequence) -> SequenceUpdate:
        holder, known = self._held.get(sequence.seq_id, (None, 0))
        if sequence.single_block_id is None:
            known = 0
        elif holder is not sequence:
            raise RequestError(
                f"{sequence!r} belongs to another pool or rank: deallocate it there first"
            )
        state = sequence.kv_state
        return SequenceUpdate(
            seq_id=sequence.seq_id,
            num_known_tokens=known,
            token_ids=sequence.token_ids[known:],
            num_computed_tokens=state.num_computed_tokens,
            num_known_blocks=state.num_blocks,
            namespace=sequence.namespace,
            retention=sequence.retention,
            counted=sequence.counted,
        )

    def _apply(self, answer: Answer, call: Call, sequences: list[Sequence]) -> Any:
        with self._lock:
            self._stats = answer.stats
            for sequence, update, state in zip(sequences, call.updates, answer.states, strict=True):
                # A failed call may have come to some of the sequences, but admitted none.
                if answer.error is None or self._holds(sequence):
                    num_sent = update.num_known_tokens + len(update.token_ids)
                    self._mirror(sequence, state, num_sent)
                    if call.operation in {"release", "undo"} and state.single_block_id is None:
                        sequence.forget()
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _holds(self, sequence: Sequence) -> bool:
        return self._held.get(sequence.seq_id, (None, 0))[0] is sequence

    def _mirror(self, sequence: Sequence, state: SequenceState, num_sent: int) -> None:
        """Bring the driver's copy of a sequence to what the rank holds."""
        if state.single_block_id is None:
            if self._holds(sequence):
                del self._held[sequence.seq_id]
                sequence.forget()
            return
        block_ids = sequence.kv_state.block_ids
        known = state.num_blocks - len(state.block_ids)
        if not np.array_equal(block_ids[known:], state.block_ids):
            block_ids = np.concatenate((block_ids[:known], state.block_ids))
            block_ids.flags.writeable = False
        if sequence.single_block_id is None:
            sequence.counted = True
            sequence.kv_state = KVCacheState(num_computed_tokens=state.num_computed_tokens)
        sequence.dp_rank, sequence.single_block_id = self.dp_rank, state.single_block_id
        sequence.kv_state.block_size = self.block_size
        sequence.kv_state.num_shared_blocks = state.num_shared_blocks
        sequence.kv_state.block_ids = block_ids
        self._held[sequence.seq_id] = (sequence, num_sent)


@dataclass(frozen=True, slots=True)
class _RemoteReply:
    """A reply that updates the driver's copies when it is read."""

    answer: Reply[Answer]
    apply: Callable[[Answer], Any]

    def result(self) -> Any:
        return self.apply(self.answer.result())
