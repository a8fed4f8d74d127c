"""What a scheduler allocates KV for: sequences and requests (the seed's sections 6 and 9.5)."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .namespace import DEFAULT, Namespace, require_namespace
from .retention import DEFAULT_RETENTION, Retention
from .tokens import BlockIds, TokenIds, as_tokens

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from numpy.typing import NDArray

_next_id = itertools.count()
_NO_IDS = np.empty(0, np.int32)


class SequenceOwner(Protocol):
    """Whoever holds a sequence's blocks."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child share what the parent has computed."""

    def deallocate_without_cache(self, sequences: Sequence) -> None:
        """Take everything back."""


@dataclass(slots=True)
class KVCacheState:
    """A sequence's blocks in one tier: the closest thing to a block table (the seed's 9.5).

    Attributes:
        block_size: tokens per block; 0 before the first allocation.
        block_ids: int32 [n], logical block index to physical block id.
        num_shared_blocks: leading blocks that came from the prefix cache.
        num_computed_tokens: leading tokens whose KV is computed. ``allocate`` sets it to the hit;
            whoever computes advances it after computing. Only computed tokens are published.
        num_admitted_tokens: tokens that it had when it was admitted.
        admission: counts the rank's admissions.
        checkpoint_stops: ascending token positions of the prompt at which a checkpoint of the
            recurrent state is due, beside those of the stride; see LinearStateConfig.
        num_loaded_tokens: where a load from the host has ended; 0 without one.
        composite_block_ids: per sub-manager int32 [n], -1 where a window slid out.
    """

    block_size: int = 0
    block_ids: BlockIds = field(default_factory=lambda: _NO_IDS)
    num_shared_blocks: int = 0
    num_computed_tokens: int = 0
    num_admitted_tokens: int = 0
    admission: int = 0
    checkpoint_stops: tuple[int, ...] = ()
    num_loaded_tokens: int = 0
    composite_block_ids: list[BlockIds] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Blocks in the table."""
        return len(self.block_ids)


def next_checkpoint(state: KVCacheState, stride_tokens: int | None) -> int | None:
    """The token position of a prompt where a checkpoint of recurrent state is due next, or None.

    Args:
        state: the sequence's.
        stride_tokens: tokens between checkpoints; None for none but its ``checkpoint_stops``.
    """
    after = [stop for stop in state.checkpoint_stops if stop > state.num_computed_tokens]
    if stride_tokens is not None:
        after.append((state.num_computed_tokens // stride_tokens + 1) * stride_tokens)
    stop = min(after, default=state.num_admitted_tokens + 1)
    return stop if stop <= state.num_admitted_tokens else None


class Sequence:
    """One growing row of tokens and the KV resources it holds.

    Args:
        token_ids: the prompt, copied.
        seq_id: unique among the live sequences of a driver; drawn if None.
        namespace: with whom its KV may be shared.
        max_new_tokens: tokens it may grow by, None for no limit of its own.
        retention: how dearly its cached blocks are kept.

    Attributes:
        owner: who holds its blocks; set by allocation, forgotten by reset.
        driver_id: of a rank's copy, the driver whose sequence it is.
        dp_rank: the rank that holds its blocks; None before the first allocation and after reset.
        single_block_id: its row in the rank's block table, 1..num_single_blocks-1.
        linear_state_slot: its live slot of recurrent state.
        kv_state: its blocks on the device.
        host_kv_state: while KV of it is on its way from the host, ``num_computed_tokens`` is where
            that ends, as far as it is known.
        is_loading: whether KV of it is on its way from the host: it must not compute meanwhile.
        num_prompt_tokens: tokens it was made with.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_num_tokens",
        "counted",
        "dp_rank",
        "driver_id",
        "host_kv_state",
        "is_loading",
        "kv_state",
        "linear_state_slot",
        "max_new_tokens",
        "namespace",
        "num_prompt_tokens",
        "owner",
        "retention",
        "seq_id",
        "single_block_id",
    )  # fmt: skip

    def __init__(
        self,
        token_ids: TokenIds,
        *,
        seq_id: Hashable = None,
        namespace: Namespace = DEFAULT,
        max_new_tokens: int | None = None,
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        self._buffer = np.array(as_tokens(token_ids))
        self._num_tokens = self.num_prompt_tokens = len(self._buffer)
        self.seq_id: Hashable = next(_next_id) if seq_id is None else seq_id
        self.namespace = require_namespace(namespace)
        self.max_new_tokens = max_new_tokens
        self.retention = retention
        self.driver_id = ""
        self.counted = False  # whether hit statistics know it: admissions after preemption do not
        self.forget()

    def reset(self) -> None:
        """Give back blocks, slots and rank without publishing anything; keep the tokens."""
        if self.owner is not None and self.single_block_id is not None:
            self.owner.deallocate_without_cache(self)
        self.forget()

    def forget(self) -> None:
        """Note that blocks, slots and rank are gone: for whoever took them back."""
        self.dp_rank: int | None = None
        self.single_block_id: int | None = None
        self.linear_state_slot: int | None = None
        self.owner: SequenceOwner | None = None
        self.kv_state = KVCacheState()
        self.host_kv_state = KVCacheState()
        self.is_loading = False

    @property
    def num_tokens(self) -> int:
        """Prompt and appended tokens."""
        return self._num_tokens

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 [num_tokens], a read-only view."""
        view = self._buffer[: self._num_tokens]
        view.flags.writeable = False
        return view

    def tokens_from(self, start: int) -> NDArray[np.int32]:
        """int32, the tokens from position ``start`` on; not to be written to."""
        return self._buffer[start : self._num_tokens]

    def append(self, token_id: int) -> None:
        """Add one token."""
        if self._num_tokens == len(self._buffer):
            self._grow(1)
        self._buffer[self._num_tokens] = operator.index(token_id)
        self._num_tokens += 1

    def extend(self, token_ids: TokenIds | Iterable[int]) -> None:
        """Add tokens."""
        tokens = as_tokens(token_ids if isinstance(token_ids, np.ndarray) else list(token_ids))
        if self._num_tokens + len(tokens) > len(self._buffer):
            self._grow(len(tokens))
        self._buffer[self._num_tokens : self._num_tokens + len(tokens)] = tokens
        self._num_tokens += len(tokens)

    def fork(self) -> Sequence:
        """A second sequence with the same tokens that shares the computed KV blocks.

        It gets a single block of its own. Where the last computed block is partly filled, whoever
        writes to it first, while both use it, gets a copy on its next ``allocate`` (copy on write;
        see ``get_swap_block_transfer_infos``). A fork that finds no free single block holds nothing
        and is allocated like any new sequence.
        """
        child = Sequence(
            self.token_ids,
            namespace=self.namespace,
            max_new_tokens=self.max_new_tokens,
            retention=self.retention,
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        if self.owner is not None:
            self.owner.fork(self, child)
        return child

    def slot_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Slots of tokens [start, stop): ``block_ids[i // size] * size + i % size``, int64.

        Args:
            start: first token position.
            stop: end position; None for as far as blocks and tokens reach.

        Raises:
            ValueError: the range is not covered by allocated blocks.
        """
        state = self.kv_state
        covered = state.num_blocks * state.block_size
        stop = min(covered, self._num_tokens) if stop is None else stop
        if not 0 <= start <= stop <= covered:
            raise ValueError(
                f"slots [{start}, {stop}) were asked for, but blocks cover [0, {covered}): "
                "allocate first"
            )
        if start == stop:
            return np.empty(0, np.int64)
        positions = np.arange(start, stop, dtype=np.int64)
        index, offset = np.divmod(positions, state.block_size)
        return state.block_ids[index].astype(np.int64) * state.block_size + offset

    def _grow(self, num_tokens: int) -> None:
        capacity = max(self._num_tokens + num_tokens, 2 * len(self._buffer), 16)
        buffer = np.empty(capacity, np.int32)
        buffer[: self._num_tokens] = self._buffer[: self._num_tokens]
        self._buffer = buffer

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.seq_id!r}: {self._num_tokens} tokens, "
            f"{self.kv_state.num_blocks} blocks on rank {self.dp_rank}>"
        )


@dataclass(slots=True)
class Request:
    """Sequences that were asked for together."""

    sequences: list[Sequence]
