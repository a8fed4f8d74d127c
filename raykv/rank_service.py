"""The rank's end of the messages: keeps the drivers' sequences, applies each call once."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable

import numpy as np

from raykv.core.sequence import Sequence
from raykv.core.tokens import BlockIds
from raykv.engine.engine import Engine
from raykv.engine.lifecycle import Lifecycle
from raykv.errors import NotSupportedError, RankUnavailableError, RequestError
from raykv.messages import Answer, Call, SequenceState, SequenceUpdate
from raykv.rank import RankKV

_NUM_REMEMBERED = 64


class RankService:
    """Applies calls to one rank. Called by the thread that owns the rank.

    Args:
        kv: the rank.
        epoch: tells this start of the rank from earlier ones.
        engine: the rank's engine, if it has one.
    """

    def __init__(self, kv: RankKV, epoch: int, engine: Engine | None = None) -> None:
        self.kv = kv
        self.epoch = epoch
        self._engine = engine
        self._lifecycle = Lifecycle(kv) if engine is None else engine.lifecycle
        self._sequences: dict[tuple[str, Hashable], Sequence] = {}
        self._answers: defaultdict[str, OrderedDict[int, Answer]] = defaultdict(OrderedDict)

    def apply(self, call: Call) -> Answer:
        """Apply a call, or repeat the answer if it was applied before.

        Raises:
            RankUnavailableError: the call is from before the rank's restart, or so late that its
                answer is forgotten; nothing changed.
        """
        if call.epoch != self.epoch:
            raise RankUnavailableError(
                f"rank {self.kv.dp_rank} restarted (epoch {self.epoch}, the call is of epoch "
                f"{call.epoch}): its sequences are gone, send them again"
            )
        answers = self._answers[call.driver_id]
        if call.number in answers:
            return answers[call.number]
        if answers and call.number < next(reversed(answers)):
            raise RankUnavailableError(
                f"rank {self.kv.dp_rank} refuses call {call.number}, which comes after call "
                f"{next(reversed(answers))}: it was given up"
            )
        answer = answers[call.number] = self._answer(call)
        if len(answers) > _NUM_REMEMBERED:
            answers.popitem(last=False)
        return answer

    def check_integrity(self) -> None:
        """Check the rank's books; raises IntegrityError."""
        if self._engine is None:
            self.kv.check_integrity()
        else:
            self._engine.check_integrity()

    def _answer(self, call: Call) -> Answer:
        value, error = None, None
        before = [self._block_ids(call.driver_id, update) for update in call.updates]
        try:
            value = self._run(call)
        except Exception as raised:  # noqa: BLE001 - it travels to the caller
            error = raised.with_traceback(None)  # its frames would keep what they held alive
        return Answer(
            number=call.number,
            epoch=self.epoch,
            value=value,
            error=error,
            states=tuple(
                self._state(call.driver_id, update, ids)
                for update, ids in zip(call.updates, before, strict=True)
            ),
            stats=self.kv.rank_stats(),
        )

    def _run(self, call: Call) -> object:
        match call.operation:
            case "refresh":
                pass
            case "check_integrity":
                self.check_integrity()
            case "reset_prefix_cache":
                return self.kv.reset_prefix_cache()[0]
            case "take_swaps":
                return self.kv.get_swap_block_transfer_infos()[0]
            case "ack_swaps":
                self.kv.ack_swaps()
            case "submit":
                self._running_engine().submit(call.argument, call.driver_id)
            case "abort":
                self._running_engine().abort(call.argument, call.driver_id)
            case (
                "prepare_weights"
                | "apply_weights"
                | "cancel_weights"
                | "weights_status"
                | "retire"
                | "sleep"
                | "wake_up"
            ):
                return self._run_lifecycle(call)
            case _:
                return self._run_on_sequences(call)
        return None

    def _run_on_sequences(self, call: Call) -> object:
        sequences: list[Sequence] = []
        try:
            sequences += (self._sequence(call.driver_id, update) for update in call.updates)
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
                    del self._sequences[call.driver_id, sequence.seq_id]
        return True

    def _run_lifecycle(self, call: Call) -> object:
        for update in call.updates:  # what the driver has computed, for an update publishes it
            if update.num_known_tokens and (call.driver_id, update.seq_id) in self._sequences:
                self._sequence(call.driver_id, update)
        return getattr(self._lifecycle, call.operation)(**call.argument)

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise NotSupportedError(
                f"rank {self.kv.dp_rank} has no engine: configure a model to generate"
            )
        return self._engine

    def _sequence(self, driver_id: str, update: SequenceUpdate) -> Sequence:
        """The rank's copy of a driver's sequence, brought up to date."""
        key = (driver_id, update.seq_id)
        sequence = self._sequences.get(key)
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
            self._sequences[key] = sequence
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

    def _block_ids(self, driver_id: str, update: SequenceUpdate) -> BlockIds:
        sequence = self._sequences.get((driver_id, update.seq_id))
        return np.empty(0, np.int32) if sequence is None else sequence.kv_state.block_ids

    def _state(self, driver_id: str, update: SequenceUpdate, before: BlockIds) -> SequenceState:
        sequence = self._sequences.get((driver_id, update.seq_id))
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


def undo(kv: RankKV, sequences: list[Sequence], num_blocks: list[int | None]) -> None:
    """Take an allocation back: None releases a sequence, a number shrinks it to those blocks."""
    for sequence, count in zip(sequences, num_blocks, strict=True):
        if count is None:
            kv.deallocate_without_cache(sequence)
        else:
            kv.shrink(sequence, count)
