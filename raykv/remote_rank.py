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

from raykv.core.kv_cache_manager import RankStats
from raykv.core.sequence import KVCacheState, Sequence
from raykv.engine.params import GenerationRequest, TokenDelta
from raykv.messages import Answer, Call, Operation, Outputs, RankInfo, SequenceState, SequenceUpdate
from raykv.rank_handle import Done, RankHandle, Reply


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
        self._num_sent: dict[Hashable, int] = {}  # tokens that the rank has, by sequence id
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

    def take(self, outputs: Outputs) -> list[TokenDelta]:
        """Note the counters that came with outputs; for ``poll``."""
        with self._lock:
            self._stats = outputs.stats
        return outputs.deltas

    def _call(
        self, operation: Operation, sequences: list[Sequence] | None = None, argument: Any = None
    ) -> _RemoteReply:
        sequences = sequences or []
        with self._lock:
            updates = tuple(self._update(sequence) for sequence in sequences)
            call = Call(
                self.driver_id, next(self._numbers), self.info.epoch, operation, updates, argument
            )
            return _RemoteReply(self.send(call), lambda answer: self._apply(answer, sequences))

    def _update(self, sequence: Sequence) -> SequenceUpdate:
        known = self._num_sent.get(sequence.seq_id, 0) if sequence.single_block_id else 0
        state = sequence.kv_state
        return SequenceUpdate(
            seq_id=sequence.seq_id,
            num_known_tokens=known,
            token_ids=sequence.token_ids[known:],
            num_computed_tokens=state.num_computed_tokens,
            num_known_blocks=state.num_blocks,
            namespace=sequence.namespace,
            counted=sequence.counted,
        )

    def _apply(self, answer: Answer, sequences: list[Sequence]) -> Any:
        with self._lock:
            self._stats = answer.stats
            if answer.error is None:
                for sequence, state in zip(sequences, answer.states, strict=True):
                    self._mirror(sequence, state)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _mirror(self, sequence: Sequence, state: SequenceState) -> None:
        """Bring the driver's copy of a sequence to what the rank holds."""
        if state.single_block_id is None:
            self._num_sent.pop(sequence.seq_id, None)
            if sequence.single_block_id is not None or sequence.dp_rank is not None:
                sequence.reset()
            return
        block_ids = sequence.kv_state.block_ids
        if state.num_blocks != len(block_ids):
            known = block_ids[: state.num_blocks - len(state.block_ids)]
            block_ids = np.concatenate((known, state.block_ids))
            block_ids.flags.writeable = False
        if sequence.single_block_id is None:
            sequence.counted = True
            sequence.kv_state = KVCacheState(
                num_shared_blocks=state.num_shared_blocks,
                num_computed_tokens=state.num_computed_tokens,
            )
        sequence.dp_rank, sequence.single_block_id = self.dp_rank, state.single_block_id
        sequence.kv_state.block_size = self.block_size
        sequence.kv_state.block_ids = block_ids
        self._num_sent[sequence.seq_id] = sequence.num_tokens


@dataclass(frozen=True, slots=True)
class _RemoteReply:
    """A reply that updates the driver's copies when it is read."""

    answer: Reply[Answer]
    apply: Callable[[Answer], Any]

    def result(self) -> Any:
        return self.apply(self.answer.result())
