"""What the scheduler hands to a model runner for one step, and what it gets back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raykv.memory.spec import KVSpec
from raykv.memory.state_spec import StateSpec


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over T new tokens of S sequences, packed without padding.

    Attributes:
        token_ids: int32 [T], sequence after sequence.
        positions: int32 [T], each token's position within its own sequence.
        query_lens: int32 [S], new tokens per sequence (1 for a decode, a chunk for a prefill).
        context_lens: int32 [S], tokens whose K/V the last query token sees: cached + new.
        block_tables: int32 [S, max_blocks], row i lists sequence i's physical blocks in order.
            Entries beyond ceil(context_len / block_size) are padding (block 0).
        slot_ids: int64 [T], where each new token's K/V is written:
            ``block_id * block_size + position % block_size`` (the seed's section 9.5).
        logit_rows: int32 [L], indices into T whose next-token logits are wanted.
        state_slots: int64 [S], per sequence the row of StateBuffers' views that holds its live
            state: its address less ``live_base``; all different. A sequence whose context_len is
            its query_len starts from no state: what lies in its row is not read. None for models
            without linear layers.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slot_ids: NDArray[np.int64]
    logit_rows: NDArray[np.int32]
    state_slots: NDArray[np.int64] | None = None


class ModelRunner(Protocol):
    """Runs a causal language model whose K/V live in a rank's KVBuffers.

    Attributes:
        vocab_size, max_model_len: of the model.
        kv_spec: the layout that the KVBuffers must have.
        state_spec: the layout that the StateBuffers must have; None for models without linear
            layers.
    """

    vocab_size: int
    max_model_len: int
    kv_spec: KVSpec
    state_spec: StateSpec | None

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks before anything else is written: what forked sequences ask for."""
        ...

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy states between addresses of the StateBuffers: to checkpoints, and back from them."""
        ...

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        """Write the new tokens' K/V into their slots; return logits, float32 [L, vocab_size]."""
        ...
