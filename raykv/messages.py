"""What a driver and a rank say to each other; plain data that pickles small.

A driver sends deltas (tokens the rank has not seen) and gets deltas back (blocks it has not seen).
Each call carries who calls, in which session, a call number and the rank's epoch:

- a call that is repeated after a lost reply is answered from memory instead of applied twice; the
  rank remembers answers until a later call says that they are settled;
- a call that outlived a restart of the rank is of another epoch, and refused;
- a driver that gave a rank up, for it was silent or its answers were lost, counts its session up.
  With the first word of the new session the rank drops all that the driver held there, and refuses
  what still arrives of the old one: every call that was given up has its tombstone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raykv.core.kv_cache_manager import Packed, RankStats
from raykv.core.namespace import Namespace
from raykv.core.retention import Retention
from raykv.core.tokens import BlockIds
from raykv.engine.params import EngineLimits, TokenDelta

Operation: TypeAlias = Literal[
    "allocate", "allocate_shared", "cache", "release", "undo", "fork", "explain", "take_swaps",
    "ack_swaps", "take_state_copies", "ack_state_copies", "reset_prefix_cache", "check_integrity",
    "transfer", "begin_epoch",
    "refresh", "submit", "abort", "leave",
    "prepare_weights", "apply_weights", "cancel_weights", "weights_status", "retire",
    "sleep", "wake_up",
]  # fmt: skip


class Origin(NamedTuple):
    """What a rank has to know of a sequence once.

    Attributes:
        namespace: with whom its KV may be shared.
        retention: how dearly its cached blocks are kept.
        counted: whether hit statistics know it from an earlier admission.
    """

    namespace: Namespace
    retention: Retention
    counted: bool


@dataclass(frozen=True, slots=True)
class SequenceUpdates(Packed):
    """Sequences as their driver sees them, less what the rank knows already, in columns.

    In columns, for a decode step has hundreds of sequences, and many small objects cost more to
    pickle than all the rest of the step.

    Attributes:
        seq_ids: the driver's names for them.
        num_known_tokens: tokens that the rank has of each.
        num_new_tokens: how many of ``token_ids`` follow them.
        token_ids: int32 [sum of num_new_tokens], the tokens after those.
        num_computed_tokens: leading tokens whose KV is computed.
        num_known_blocks: blocks that the driver's copy has.
        origins: of those that the rank does not know, by position.
    """

    seq_ids: list[Hashable]
    num_known_tokens: list[int]
    num_new_tokens: list[int]
    token_ids: NDArray[np.int32]
    num_computed_tokens: list[int]
    num_known_blocks: list[int]
    origins: dict[int, Origin]

    def __len__(self) -> int:
        return len(self.seq_ids)


@dataclass(frozen=True, slots=True)
class SequenceStates(Packed):
    """Sequences as the rank holds them, less what the driver knows already, in columns.

    Attributes:
        single_block_ids: their rows; 0 for one that holds nothing.
        num_blocks: blocks that each holds.
        num_new_blocks: how many of ``block_ids`` are its last ones.
        block_ids: int32 [sum of num_new_blocks].
        num_shared_blocks: leading blocks that came from the prefix cache.
        num_computed_tokens: leading tokens whose KV is computed.
        state_slots: their live slots of recurrent state; empty where sequences have none.
        checkpoint_stops: see KVCacheState; empty likewise.
        host_tokens: of those that are loading, where that ends or -1 if that is not known yet, 0 of
            the others; None where there is no host tier.
    """

    single_block_ids: list[int]
    num_blocks: list[int]
    num_new_blocks: list[int]
    block_ids: BlockIds
    num_shared_blocks: list[int]
    num_computed_tokens: list[int]
    state_slots: list[int]
    checkpoint_stops: list[tuple[int, ...]]
    host_tokens: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Call(Packed):
    """One batched call of a driver to a rank.

    Attributes:
        driver_id: who calls.
        session: counts how often the driver has given this rank up.
        number: counts the session's calls to this rank.
        epoch: the rank's epoch as the driver knows it.
        operation: what to do.
        updates: the sequences it is about; None if it is about none.
        argument: what else the operation needs; keywords, for those of Lifecycle.
        settled: no call up to this number will be sent again.
    """

    driver_id: str
    session: int
    number: int
    epoch: int
    operation: Operation
    updates: SequenceUpdates | None = None
    argument: Any = None
    settled: int = 0


@dataclass(frozen=True, slots=True)
class Answer(Packed):
    """What a rank answers to a call.

    Attributes:
        number: the call's number.
        epoch: the rank's epoch.
        value: the operation's result.
        error: what it raised instead.
        states: the sequences of the call afterwards; None if it was about none.
        stats: the rank's counters afterwards.
    """

    number: int
    epoch: int
    value: Any
    error: Exception | None
    states: SequenceStates | None
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
        block_bytes: bytes of a block; 0 likewise.
        checkpoint_bytes: bytes of a checkpoint of recurrent state; 0 too where there are none.
        limits: what its engine serves; None without an engine.
        stats: its counters.
    """

    dp_rank: int
    epoch: int
    block_size: int
    pid: int
    node: str
    device: str | None
    block_bytes: int
    checkpoint_bytes: int
    limits: EngineLimits | None
    stats: RankStats


@dataclass(frozen=True, slots=True)
class Outputs(Packed):
    """What a rank's engine produced for a driver.

    Attributes:
        first: the number of the first delta, counted from 0 in the driver's session: what the
            driver has seen comes again until it says so.
        deltas: in the order they were produced.
        stats: the rank's counters after them.
    """

    first: int
    deltas: list[TokenDelta]
    stats: RankStats


@dataclass(frozen=True, slots=True)
class Health:
    """A rank's answer to a heartbeat.

    Attributes:
        info: what it says about itself now.
        knows_driver: False if the driver's session was dropped, such as when its lease ran out.
        idle_s: seconds since the thread that owns the rank last moved; 0 where there is none.
    """

    info: RankInfo
    knows_driver: bool
    idle_s: float
