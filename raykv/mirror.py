"""The driver's copies of the sequences that a rank holds for it."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

import numpy as np

from raykv.core.sequence import KVCacheState, Sequence
from raykv.errors import RankUnavailableError, RequestError
from raykv.messages import Answer, Call, SequenceState, SequenceUpdate


class Mirror:
    """Turns sequences into updates for a rank, and a rank's answers into their new state.

    Not safe to call from several threads at a time.

    Args:
        dp_rank: the rank.
        block_size: tokens per block.
    """

    def __init__(self, dp_rank: int, block_size: int) -> None:
        self._dp_rank = dp_rank
        self._block_size = block_size
        # Sequences with memory there, by id, and how many of their tokens the rank has.
        self._held: dict[Hashable, tuple[Sequence, int]] = {}
        self._gone: dict[int, Sequence] = {}  # by identity: what was held when the rank was lost

    def lose_all(self) -> None:
        """The rank holds nothing any more; the sequences hear of it when they are used next."""
        self._gone |= {id(sequence): sequence for sequence, _ in self._held.values()}
        self._held.clear()

    def take_lost(self, sequence: Sequence) -> bool:
        """Whether the sequence's blocks went with the rank; says so once."""
        if self._gone.get(id(sequence)) is not sequence:
            return False
        del self._gone[id(sequence)]
        return True

    def update(self, sequence: Sequence) -> SequenceUpdate:
        """What the rank has to know of a sequence.

        Raises:
            RankUnavailableError: its blocks were lost.
            RequestError: another pool or rank holds it.
        """
        holder, known = self._held.get(sequence.seq_id, (None, 0))
        if sequence.single_block_id is None:
            known = 0
        elif self._gone.get(id(sequence)) is sequence:
            raise RankUnavailableError(f"{sequence!r} was lost with rank {self._dp_rank}")
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

    def apply(self, answer: Answer, call: Call, sequences: SequenceOf[Sequence]) -> None:
        """Bring sequences to what the rank holds after a call."""
        for sequence, update, state in zip(sequences, call.updates, answer.states, strict=True):
            # A failed call may have come to some of the sequences, but admitted none.
            if answer.error is None or self._holds(sequence):
                num_sent = update.num_known_tokens + len(update.token_ids)
                self._apply_one(sequence, state, num_sent)
                if call.operation in {"release", "undo"} and state.single_block_id is None:
                    sequence.forget()

    def _holds(self, sequence: Sequence) -> bool:
        return self._held.get(sequence.seq_id, (None, 0))[0] is sequence

    def _apply_one(self, sequence: Sequence, state: SequenceState, num_sent: int) -> None:
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
        sequence.dp_rank, sequence.single_block_id = self._dp_rank, state.single_block_id
        sequence.kv_state.block_size = self._block_size
        sequence.kv_state.num_shared_blocks = state.num_shared_blocks
        sequence.kv_state.block_ids = block_ids
        self._held[sequence.seq_id] = (sequence, num_sent)
