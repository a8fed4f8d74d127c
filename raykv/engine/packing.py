"""From what the scheduler chose to what the model runs: one batch without padding."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from raykv.core.sequence import Sequence
from raykv.rank import RankKV

from .batch import StepBatch


def pack(kv: RankKV, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> StepBatch:
    """The next tokens of some sequences; block tables are rows of the rank's dense array.

    Args:
        kv: the rank, which holds them.
        sequences: at least one.
        num_tokens: how many tokens each computes, at least one.
    """
    counts = np.array(num_tokens, np.int32)
    starts = np.array([s.kv_state.num_computed_tokens for s in sequences], np.int32)
    rows = np.array([s.single_block_id for s in sequences])
    contexts = starts + counts
    size = kv.block_size
    tables = kv.tables.table[rows, : -(-int(contexts.max()) // size)]
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1], dtype=np.int32)
    positions += np.repeat(starts - (ends - counts), counts).astype(np.int32)
    owners = np.repeat(np.arange(len(counts)), counts)
    index, offset = np.divmod(positions, size)
    slots = tables[owners, index].astype(np.int64) * size + offset
    tokens = [s.token_ids[a:b] for s, a, b in zip(sequences, starts, contexts, strict=True)]
    totals = np.array([s.num_tokens for s in sequences])
    states = kv.states
    live = None if states is None else np.array([states.live_index(s) for s in sequences])
    return StepBatch(
        token_ids=np.concatenate(tokens),
        positions=positions,
        query_lens=counts,
        context_lens=contexts,
        block_tables=tables,
        slot_ids=slots,
        logit_rows=(ends - 1)[contexts == totals].astype(np.int32),
        state_slots=live,
    )
