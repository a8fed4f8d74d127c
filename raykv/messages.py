"""What a driver and a rank say to each other; plain data that pickles small.

A driver sends deltas (tokens the rank has not seen) and gets deltas back (blocks it has not seen).
Each call carries who calls, a call number and the rank's epoch, so that a call repeated after a
lost reply is answered from memory instead of applied twice, and a call that outlived a restart of
the rank is refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raykv.core.kv_cache_manager import RankStats
from raykv.core.namespace import Namespace
from raykv.core.retention import Retention
from raykv.core.tokens import BlockIds
from raykv.engine.params import EngineLimits, TokenDelta

Operation: TypeAlias = Literal[
    "allocate", "allocate_shared", "cache", "release", "undo", "fork", "explain", "take_swaps",
    "ack_swaps", "reset_prefix_cache",
    "check_integrity", "refresh", "submit", "abort",
    "prepare_weights", "apply_weights", "cancel_weights", "weights_status", "retire",
    "sleep", "wake_up",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """A sequence as its driver sees it, less what the rank knows already.

    Attributes:
        seq_id: the driver's name for it.
        num_known_tokens: tokens that the rank has; ``token_ids`` follow them.
        token_ids: int32 [n], the tokens after those.
        num_computed_tokens: leading tokens whose KV is computed.
        num_known_blocks: blocks that the driver's copy has.
        namespace: with whom its KV may be shared.
        retention: how dearly its cached blocks are kept.
        counted: whether hit statistics know it from an earlier admission.
    """

    seq_id: Hashable
    num_known_tokens: int
    token_ids: NDArray[np.int32]
    num_computed_tokens: int
    num_known_blocks: int
    namespace: Namespace
    retention: Retention
    counted: bool


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence as the rank holds it, less what the driver knows already.

    Attributes:
        seq_id: the driver's name for it.
        single_block_id: its row, None if it holds nothing.
        num_blocks: blocks that it holds.
        block_ids: int32 [n], the last n of them.
        num_shared_blocks: leading blocks that came from the prefix cache.
        num_computed_tokens: leading tokens whose KV is computed.
    """

    seq_id: Hashable
    single_block_id: int | None
    num_blocks: int
    block_ids: BlockIds
    num_shared_blocks: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Call:
    """One batched call of a driver to a rank.

    Attributes:
        driver_id: who calls.
        number: counts the driver's calls to this rank.
        epoch: the rank's epoch as the driver knows it.
        operation: what to do.
        updates: the sequences it is about.
        argument: what else the operation needs; keywords, for those of Lifecycle.
    """

    driver_id: str
    number: int
    epoch: int
    operation: Operation
    updates: tuple[SequenceUpdate, ...] = ()
    argument: Any = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank answers to a call.

    Attributes:
        number: the call's number.
        epoch: the rank's epoch.
        value: the operation's result.
        error: what it raised instead.
        states: the sequences of the call afterwards.
        stats: the rank's counters afterwards.
    """

    number: int
    epoch: int
    value: Any
    error: Exception | None
    states: tuple[SequenceState, ...]
    stats: RankStats


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a rank says about itself once it is ready.

    Attributes:
        dp_rank: its number.
        epoch: changes with each start.
        block_size: tokens per block.
        pid: its process.
        node: the host that it runs on.
        device: where its KV buffers lie; None if it keeps books only.
        limits: what its engine serves; None without an engine.
        stats: its counters.
    """

    dp_rank: int
    epoch: int
    block_size: int
    pid: int
    node: str
    device: str | None
    limits: EngineLimits | None
    stats: RankStats


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a rank's engine produced for a driver since it last asked.

    Attributes:
        deltas: in the order they were produced.
        stats: the rank's counters after them.
    """

    deltas: list[TokenDelta]
    stats: RankStats
