"""The rank's end of the messages: keeps the drivers' sequences, applies each call once."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from raykv.core.sequence import Sequence
from raykv.core.tokens import BlockIds
from raykv.engine.engine import Engine
from raykv.errors import NotSupportedError, RankUnavailableError, RequestError
from raykv.leases import Lease, Leases
from raykv.messages import Answer, Call, SequenceState, SequenceUpdate
from raykv.rank import RankKV


class RankService:
    """Applies calls to one rank. Called by the thread that owns the rank.

    Args:
        kv: the rank.
        epoch: tells this start of the rank from earlier ones.
        engine: the rank's engine, if it has one.
        clock: seconds, for leases.
        on_end: called with the name of a session that ended.

    Attributes:
        leases: the drivers' sessions; ``leases.renew`` may be called from any thread.
    """

    def __init__(
        self,
        kv: RankKV,
        epoch: int,
        engine: Engine | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.kv = kv
        self._on_end = on_end
        self.epoch = epoch
        self._engine = engine
        self.leases = Leases(f"rank {kv.dp_rank}", kv.config.ray.lease_s, clock)

    def apply(self, call: Call) -> Answer:
        """Apply a call, or repeat the answer if it was applied before.

        Calls of one session may overtake each other: sequences that are used in several calls at a
        time are their driver's to keep apart.

        Raises:
            RankUnavailableError: the call is from before the rank's restart, of a session that is
                over, or so late that its answer is forgotten; nothing changed.
        """
        if call.epoch != self.epoch:
            raise RankUnavailableError(
                f"rank {self.kv.dp_rank} restarted (epoch {self.epoch}, the call is of epoch "
                f"{call.epoch}): its sequences are gone, send them again"
            )
        lease, older = self.leases.find(call.driver_id, call.session)
        if older is not None:
            self._end(older)
        if lease is None:
            lease = self.leases.open(call.driver_id, call.session)
        if call.number in lease.answers:
            return lease.answers[call.number]
        if call.number <= lease.forgotten:
            raise RankUnavailableError(
                f"rank {self.kv.dp_rank} refuses call {call.number}, which comes after call "
                f"{lease.forgotten + len(lease.answers)}: it may have been applied already"
            )
        answer = self._answer(call, lease)
        lease.remember(answer)
        if call.operation == "leave":
            self._end(lease)
        return answer

    def expire(self) -> int:
        """Take back what drivers hold that were silent for too long; returns how many those are."""
        expired = self.leases.expired()
        for lease in expired:
            self._end(lease)
        return len(expired)

    def _end(self, lease: Lease) -> None:
        """Everything of a session comes back; nothing of it is published any more."""
        if self._engine is not None:
            self._engine.drop(lease.name)
        self.kv.deallocate_without_cache(lease.sequences.values())
        self.kv.forget_driver(lease.driver_id)
        self.leases.end(lease)
        self._on_end(lease.name)

    def check_integrity(self) -> None:
        """Check the rank's books; raises IntegrityError."""
        if self._engine is None:
            self.kv.check_integrity()
        else:
            self._engine.check_integrity()

    def _answer(self, call: Call, lease: Lease) -> Answer:
        value, error = None, None
        before = [_block_ids(lease, update) for update in call.updates]
        try:
            value = self._run(call, lease)
        except Exception as raised:  # noqa: BLE001 - it travels to the caller
            error = raised.with_traceback(None)  # its frames would keep what they held alive
        return Answer(
            number=call.number,
            epoch=self.epoch,
            value=value,
            error=error,
            states=tuple(
                self._state(lease, update, ids)
                for update, ids in zip(call.updates, before, strict=True)
            ),
            stats=self.kv.rank_stats(),
        )

    def _run(self, call: Call, lease: Lease) -> object:
        match call.operation:
            case "refresh" | "leave":
                pass
            case "check_integrity":
                self.check_integrity()
            case "reset_prefix_cache":
                return self.kv.reset_prefix_cache()[0]
            case "take_swaps":
                return self.kv.take_swaps(call.driver_id)
            case "ack_swaps":
                self.kv.ack_swaps(call.driver_id)
            case "submit":
                self._running_engine().submit(call.argument, lease.name)
            case "abort":
                self._running_engine().abort(call.argument, lease.name)
            case _:
                return self._run_on_sequences(call, lease)
        return None

    def _run_on_sequences(self, call: Call, lease: Lease) -> object:
        sequences: list[Sequence] = []
        try:
            sequences += (self._sequence(lease, update) for update in call.updates)
            match call.operation:
                case "allocate":
                    return self.kv.allocate(sequences, call.argument)
                case "allocate_shared":
                    self.kv.allocate_shared(sequences[0])
                case "cache":
                    self.kv.cache(sequences[0], call.argument)
                case "release":
                    kv = self.kv
                    (kv.deallocate if call.argument else kv.deallocate_without_cache)(sequences)
                case "fork":
                    self.kv.fork(*sequences)
                case "explain":
                    return self.kv.explain(sequences[0])
                case "undo":
                    undo(self.kv, sequences, call.argument)
                case _:
                    raise NotSupportedError(f"operation {call.operation!r} is not known")
        finally:
            for sequence in sequences:
                if sequence.single_block_id is None:
                    del lease.sequences[sequence.seq_id]
        return True

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise NotSupportedError(
                f"rank {self.kv.dp_rank} has no engine: configure a model to generate"
            )
        return self._engine

    def _sequence(self, lease: Lease, update: SequenceUpdate) -> Sequence:
        """The rank's copy of a driver's sequence, brought up to date."""
        sequence = lease.sequences.get(update.seq_id)
        if sequence is None:
            if update.num_known_tokens:
                raise RequestError(
                    f"sequence {update.seq_id!r} is not known here: its blocks are gone"
                )
            sequence = Sequence(
                update.token_ids,
                seq_id=update.seq_id,
                namespace=update.namespace,
                retention=update.retention,
            )
            sequence.counted = update.counted
            sequence.driver_id = lease.driver_id
            lease.sequences[update.seq_id] = sequence
            return sequence
        if not update.num_known_tokens:
            raise RequestError(
                f"sequence id {update.seq_id!r} is in use by another sequence of this driver: "
                "deallocate that one first, or choose another id"
            )
        # A repeated or overtaken delta adds only what is new.
        sequence.extend(update.token_ids[sequence.num_tokens - update.num_known_tokens :])
        sequence.kv_state.num_computed_tokens = update.num_computed_tokens
        return sequence

    def _state(self, lease: Lease, update: SequenceUpdate, before: BlockIds) -> SequenceState:
        sequence = lease.sequences.get(update.seq_id)
        if sequence is None:
            return SequenceState(update.seq_id, None, 0, np.empty(0, np.int32), 0, 0)
        state = sequence.kv_state
        known = update.num_known_blocks
        if not np.array_equal(state.block_ids[:known], before[:known]):
            known = state.num_computed_tokens // self.kv.block_size  # copied on write from here
        return SequenceState(
            seq_id=update.seq_id,
            single_block_id=sequence.single_block_id,
            num_blocks=state.num_blocks,
            block_ids=state.block_ids[known:],
            num_shared_blocks=state.num_shared_blocks,
            num_computed_tokens=state.num_computed_tokens,
        )


def _block_ids(lease: Lease, update: SequenceUpdate) -> BlockIds:
    sequence = lease.sequences.get(update.seq_id)
    return np.empty(0, np.int32) if sequence is None else sequence.kv_state.block_ids


def undo(kv: RankKV, sequences: list[Sequence], num_blocks: list[int | None]) -> None:
    """Take an allocation back: None releases a sequence, a number shrinks it to those blocks."""
    for sequence, count in zip(sequences, num_blocks, strict=True):
        if count is None:
            kv.deallocate_without_cache(sequence)
        else:
            kv.shrink(sequence, count)
