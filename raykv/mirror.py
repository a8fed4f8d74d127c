"""The driver's copies of the sequences that a rank holds for it."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

import numpy as np

from raykv.core.sequence import KVCacheState, Sequence
from raykv.errors import RankUnavailableError, RaykvError, RequestError
from raykv.messages import Answer, Call, Origin, SequenceStates, SequenceUpdates

_NOBODY: tuple[Sequence | None, int] = (None, 0)


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

    def held(self) -> list[Sequence]:
        """Those that the rank holds."""
        return [sequence for sequence, _ in self._held.values()]

    def lose_all(self) -> None:
        """The rank holds nothing any more; the sequences hear of it when they are used next."""
        self._gone |= {id(sequence): sequence for sequence in self.held()}
        for sequence in self.loading():
            sequence.is_loading = False
        self._held.clear()

    def take_lost(self, sequence: Sequence) -> bool:
        """Whether the sequence's blocks went with the rank; says so once."""
        if self._gone.get(id(sequence)) is not sequence:
            return False
        del self._gone[id(sequence)]
        return True

    def loading(self) -> list[Sequence]:
        """Those that wait for KV from the host."""
        return [sequence for sequence, _ in self._held.values() if sequence.is_loading]

    def updates(self, sequences: SequenceOf[Sequence]) -> SequenceUpdates:
        """What the rank has to know of sequences.

        Raises:
            RankUnavailableError: the blocks of one were lost.
            RequestError: another pool or rank holds one.
        """
        held = self._held
        origins: dict[int, Origin] = {}
        seq_ids, known_tokens, computed, num_blocks, tails = [], [], [], [], []
        for index, sequence in enumerate(sequences):
            seq_id, known = sequence.seq_id, 0
            if sequence.single_block_id is not None:
                holder, known = held.get(seq_id, _NOBODY)
                if holder is not sequence:
                    raise self._not_here(sequence)
            if not known:
                origin = sequence.namespace, sequence.retention, sequence.counted
                origins[index] = Origin(*origin)
            state = sequence.kv_state
            seq_ids.append(seq_id)
            known_tokens.append(known)
            computed.append(state.num_computed_tokens)
            num_blocks.append(len(state.block_ids))
            tails.append(sequence.tokens_from(known))
        return SequenceUpdates(
            seq_ids=seq_ids,
            num_known_tokens=known_tokens,
            num_new_tokens=[len(tail) for tail in tails],
            token_ids=np.concatenate(tails),
            num_computed_tokens=computed,
            num_known_blocks=num_blocks,
            origins=origins,
        )

    def apply(self, answer: Answer, call: Call, sequences: SequenceOf[Sequence]) -> None:
        """Bring sequences to what the rank holds after a call."""
        updates, states = call.updates, answer.states
        if updates is None or states is None:
            return
        forgets = call.operation in {"release", "undo"}
        stop = 0
        for sequence, row, num_blocks, num_new, num_shared, num_computed, known, sent in zip(
            sequences, states.single_block_ids, states.num_blocks, states.num_new_blocks,
            states.num_shared_blocks, states.num_computed_tokens,
            updates.num_known_tokens, updates.num_new_tokens, strict=True,
        ):  # fmt: skip
            start, stop = stop, stop + num_new
            # A failed call may have come to some of the sequences, but admitted none.
            if answer.error is not None and not self._holds(sequence):
                continue
            if not row:
                self._empty(sequence, forgets=forgets)
                continue
            if sequence.single_block_id is None:
                self._admit(sequence, num_computed)
            sequence.single_block_id = row
            state = sequence.kv_state
            state.num_shared_blocks = num_shared
            if num_new or num_blocks != len(state.block_ids):
                kept = state.block_ids[: num_blocks - num_new]
                block_ids = np.concatenate((kept, states.block_ids[start:stop]))
                block_ids.flags.writeable = False
                state.block_ids = block_ids
            self._held[sequence.seq_id] = sequence, known + sent
        self._note_states(sequences, states)

    def _note_states(self, sequences: SequenceOf[Sequence], states: SequenceStates) -> None:
        """Recurrent state and loads from the host; without them there is nothing to go through."""
        for sequence, slot, stops in zip(
            sequences, states.state_slots, states.checkpoint_stops, strict=False
        ):
            if slot and self._holds(sequence):
                sequence.linear_state_slot = slot
                sequence.kv_state.checkpoint_stops = stops
        for sequence, host_tokens, num_computed in zip(
            sequences, states.host_tokens or (), states.num_computed_tokens, strict=False
        ):
            if self._holds(sequence):
                self._note_load(sequence, host_tokens, num_computed)

    def _note_load(self, sequence: Sequence, host_tokens: int, num_computed: int) -> None:
        if sequence.is_loading and not host_tokens:  # it is over: what it brought is computed
            sequence.kv_state.num_computed_tokens = num_computed
        sequence.is_loading = bool(host_tokens)
        sequence.host_kv_state = KVCacheState(
            self._block_size, num_computed_tokens=max(0, host_tokens)
        )

    def _admit(self, sequence: Sequence, num_computed: int) -> None:
        sequence.counted = True
        sequence.dp_rank = self._dp_rank
        sequence.kv_state = KVCacheState(
            self._block_size,
            num_computed_tokens=num_computed,
            num_admitted_tokens=sequence.num_tokens,
        )

    def _empty(self, sequence: Sequence, *, forgets: bool) -> None:
        """The rank holds nothing of a sequence."""
        if self._holds(sequence):
            del self._held[sequence.seq_id]
            sequence.forget()
        elif forgets:
            sequence.forget()

    def _holds(self, sequence: Sequence) -> bool:
        return self._held.get(sequence.seq_id, _NOBODY)[0] is sequence

    def _not_here(self, sequence: Sequence) -> RaykvError:
        if self._gone.get(id(sequence)) is sequence:
            return RankUnavailableError(f"{sequence!r} was lost with rank {self._dp_rank}")
        return RequestError(
            f"{sequence!r} belongs to another pool or rank: deallocate it there first"
        )
