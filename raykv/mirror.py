"""The driver's copies of the sequences that a rank holds for it."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

import numpy as np

from raykv.core.sequence import KVCacheState, Sequence
from raykv.core.tokens import BlockIds
from raykv.errors import RankUnavailableError, RaykvError, RequestError
from raykv.messages import Answer, Call, Origin, SequenceStates, SequenceUpdates


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

    def updates(self, sequences: SequenceOf[Sequence]) -> SequenceUpdates:
        """What the rank has to know of sequences.

        Raises:
            RankUnavailableError: the blocks of one were lost.
            RequestError: another pool or rank holds one.
        """
        origins: dict[int, Origin] = {}
        known_tokens, tails = [], []
        for index, sequence in enumerate(sequences):
            known = 0
            if sequence.single_block_id is not None:
                holder, known = self._held.get(sequence.seq_id, (None, 0))
                if holder is not sequence:
                    raise self._not_here(sequence)
            if not known:
                origin = sequence.namespace, sequence.retention, sequence.counted
                origins[index] = Origin(*origin)
            known_tokens.append(known)
            tails.append(sequence.tokens_from(known))
        return SequenceUpdates(
            seq_ids=[sequence.seq_id for sequence in sequences],
            num_known_tokens=known_tokens,
            num_new_tokens=[len(tail) for tail in tails],
            token_ids=np.concatenate(tails),
            num_computed_tokens=[sequence.kv_state.num_computed_tokens for sequence in sequences],
            num_known_blocks=[sequence.kv_state.num_blocks for sequence in sequences],
            origins=origins,
        )

    def apply(self, answer: Answer, call: Call, sequences: SequenceOf[Sequence]) -> None:
        """Bring sequences to what the rank holds after a call."""
        updates, states = call.updates, answer.states
        if updates is None or states is None:
            return
        forgets = call.operation in {"release", "undo"}
        stop = 0
        for index, sequence in enumerate(sequences):
            start, stop = stop, stop + states.num_new_blocks[index]
            # A failed call may have come to some of the sequences, but admitted none.
            if answer.error is not None and not self._holds(sequence):
                continue
            if not states.single_block_ids[index]:
                if self._holds(sequence):
                    del self._held[sequence.seq_id]
                    sequence.forget()
                elif forgets:
                    sequence.forget()
                continue
            known = states.num_blocks[index] - (stop - start)
            self._apply_one(sequence, states, index, known, states.block_ids[start:stop])
            num_sent = updates.num_known_tokens[index] + updates.num_new_tokens[index]
            self._held[sequence.seq_id] = (sequence, num_sent)

    def _apply_one(
        self, sequence: Sequence, states: SequenceStates, index: int, known: int, new: BlockIds
    ) -> None:
        if sequence.single_block_id is None:
            sequence.counted = True
            sequence.dp_rank = self._dp_rank
            sequence.kv_state = KVCacheState(
                self._block_size, num_computed_tokens=states.num_computed_tokens[index]
            )
        sequence.single_block_id = states.single_block_ids[index]
        state = sequence.kv_state
        state.num_shared_blocks = states.num_shared_blocks[index]
        if len(new) or known < state.num_blocks:
            block_ids = np.concatenate((state.block_ids[:known], new))
            block_ids.flags.writeable = False
            state.block_ids = block_ids

    def _holds(self, sequence: Sequence) -> bool:
        return self._held.get(sequence.seq_id, (None, 0))[0] is sequence

    def _not_here(self, sequence: Sequence) -> RaykvError:
        if self._gone.get(id(sequence)) is sequence:
            return RankUnavailableError(f"{sequence!r} was lost with rank {self._dp_rank}")
        return RequestError(
            f"{sequence!r} belongs to another pool or rank: deallocate it there first"
        )
