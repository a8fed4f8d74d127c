"""The calls of a rank behind messages that are nothing but a message and its answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as SequenceOf
from typing import Any

from raykv.core.explain import MissReport
from raykv.core.sequence import Sequence
from raykv.engine.params import GenerationRequest
from raykv.engine.weights import SleepTag, UpdateMode, Weights, WeightsStatus
from raykv.messages import Operation
from raykv.rank_handle import Done, RankHandle, Reply


class RemoteCalls(RankHandle):
    """Turns calls into messages; subclasses send them."""

    @abstractmethod
    def _call(
        self, operation: Operation, sequences: list[Sequence] | None = None, argument: Any = None
    ) -> Reply[Any]:
        """Send a call, and bring the sequences up to date with its answer."""

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

    def take_state_copies(self) -> Reply[list[tuple[int, int]]]:
        """See RankHandle."""
        return self._call("take_state_copies")

    def ack_state_copies(self) -> Reply[None]:
        """See RankHandle."""
        return self._call("ack_state_copies")

    def begin_epoch(self, epoch: int) -> Reply[None]:
        """See RankHandle."""
        return self._call("begin_epoch", argument=epoch)

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
