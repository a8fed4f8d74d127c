"""A rank's copies of its drivers' sequences: from updates, and into states."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

import numpy as np

from raykv.core.sequence import Sequence
from raykv.core.tokens import BlockIds
from raykv.errors import RequestError
from raykv.messages import SequenceStates, SequenceUpdates

_NO_IDS = np.empty(0, np.int32)


class RankSequences:
    """The sequences of one driver's session.

    Attributes:
        by_id: those that hold something, by the driver's names.
    """

    def __init__(self, driver_id: str) -> None:
        self.by_id: dict[Hashable, Sequence] = {}
        self._driver_id = driver_id

    def update(self, updates: SequenceUpdates) -> list[Sequence]:
        """Bring the copies up to date, and make those that are new.

        Raises:
            RequestError: one is not known, or another one has its name; those before it are up to
                date.
        """
        sequences: list[Sequence] = []
        stop = 0
        try:
            for index, seq_id in enumerate(updates.seq_ids):
                start, stop = stop, stop + updates.num_new_tokens[index]
                tokens = updates.token_ids[start:stop]
                sequence = self.by_id.get(seq_id)
                if sequence is None:
                    sequence = self._make(updates, index, tokens)
                else:
                    _extend(sequence, updates.num_known_tokens[index], tokens)
                    _note(sequence, updates.num_computed_tokens[index])
                sequences.append(sequence)
        except RequestError:
            self.drop_empty(sequences)
            raise
        return sequences

    def note_computed(self, updates: SequenceUpdates) -> None:
        """Bring those up to date that are held here, whatever else the driver names."""
        stop = 0
        for index, seq_id in enumerate(updates.seq_ids):
            start, stop = stop, stop + updates.num_new_tokens[index]
            sequence, known = self.by_id.get(seq_id), updates.num_known_tokens[index]
            if sequence is not None and known:
                _extend(sequence, known, updates.token_ids[start:stop])
                _note(sequence, updates.num_computed_tokens[index])

    def drop_empty(self, sequences: SequenceOf[Sequence]) -> None:
        """Forget those that hold nothing."""
        for sequence in sequences:
            if sequence.single_block_id is None:
                del self.by_id[sequence.seq_id]

    def block_ids(self, updates: SequenceUpdates) -> list[BlockIds]:
        """The block ids of each before a call."""
        found = (self.by_id.get(seq_id) for seq_id in updates.seq_ids)
        return [_NO_IDS if one is None else one.kv_state.block_ids for one in found]

    def states(
        self,
        updates: SequenceUpdates,
        before: list[BlockIds],
        block_size: int,
        *,
        has_tier: bool = False,
    ) -> SequenceStates:
        """What the driver does not know of them after a call."""
        rows, num_blocks, num_shared, num_computed = [], [], [], []
        new: list[BlockIds] = []
        found = [self.by_id.get(seq_id) for seq_id in updates.seq_ids]
        for sequence, old, num_known in zip(found, before, updates.num_known_blocks, strict=True):
            if sequence is None:
                rows.append(0)
                num_blocks.append(0)
                num_shared.append(0)
                num_computed.append(0)
                new.append(_NO_IDS)
                continue
            state = sequence.kv_state
            ids, known = state.block_ids, num_known
            if ids is not old and not np.array_equal(ids[:known], old[:known]):
                known = state.num_computed_tokens // block_size  # copied on write from here
            rows.append(sequence.single_block_id or 0)
            num_blocks.append(len(ids))
            num_shared.append(state.num_shared_blocks)
            num_computed.append(state.num_computed_tokens)
            new.append(_NO_IDS if known == len(ids) else ids[known:])
        present = [sequence for sequence in found if sequence is not None]
        has_state = bool(present) and present[0].linear_state_slot is not None
        slots = [0 if one is None else one.linear_state_slot or 0 for one in found if has_state]
        stops = [() if one is None else one.kv_state.checkpoint_stops for one in found if has_state]
        return SequenceStates(
            single_block_ids=rows,
            num_blocks=num_blocks,
            num_new_blocks=[len(ids) for ids in new],
            block_ids=np.concatenate(new),
            num_shared_blocks=num_shared,
            num_computed_tokens=num_computed,
            state_slots=slots,
            checkpoint_stops=stops,
            host_tokens=[_host_tokens(one) for one in found] if has_tier else None,
        )

    def _make(self, updates: SequenceUpdates, index: int, tokens: BlockIds) -> Sequence:
        seq_id = updates.seq_ids[index]
        origin = updates.origins.get(index)
        if origin is None:
            raise RequestError(f"sequence {seq_id!r} is not known here: its blocks are gone")
        sequence = Sequence(
            tokens, seq_id=seq_id, namespace=origin.namespace, retention=origin.retention
        )
        sequence.counted = origin.counted
        sequence.driver_id = self._driver_id
        self.by_id[seq_id] = sequence
        return sequence


def _note(sequence: Sequence, num_computed: int) -> None:
    """Take over how much its driver has computed, who may not know what a load has brought."""
    state = sequence.kv_state
    state.num_computed_tokens = max(num_computed, state.num_loaded_tokens)


def _host_tokens(sequence: Sequence | None) -> int:
    if sequence is None or not sequence.is_loading:
        return 0
    return sequence.host_kv_state.num_computed_tokens or -1


def _extend(sequence: Sequence, num_known: int, tokens: BlockIds) -> None:
    """Add what follows the tokens that the rank is said to have; what came already is passed by."""
    if not num_known:
        raise RequestError(
            f"sequence id {sequence.seq_id!r} is in use by another sequence of this driver: "
            "deallocate that one first, or choose another id"
        )
    num_seen = sequence.num_tokens - num_known
    if num_seen < 0:
        raise RequestError(
            f"sequence {sequence.seq_id!r} has {sequence.num_tokens} tokens here, and its driver "
            f"sent what follows the first {num_known}: use a sequence in one call at a time"
        )
    if num_seen < len(tokens):
        sequence.extend(tokens[num_seen:])
