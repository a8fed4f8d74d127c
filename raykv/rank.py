"""All block state of one dp_rank: managers, block tables, KV buffers (the seed's section 5)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, NoReturn

import numpy as np

from raykv.config import PoolConfig
from raykv.core.copy_on_write import SwapList
from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import (
    KVCacheManager,
    PoolStats,
    RankStats,
    Room,
    Sequences,
    flatten,
    token_targets,
)
from raykv.core.manager import AdmitRequest
from raykv.core.sequence import KVCacheState, Sequence
from raykv.core.single import SingleBlockManager
from raykv.core.tokens import NO_INDEX, BlockIds, Index
from raykv.errors import IntegrityError, RequestError
from raykv.memory.spec import KVSpec
from raykv.rank_build import make_block_manager, make_buffers, make_tables


class _Growth(NamedTuple):
    """Blocks that running sequences need.

    Attributes:
        rows: int64 [n], rows of the block table that grow.
        counts: int64 [n], by how many blocks.
        copies: sequences that must not write to a block they share, with its index in their table.
    """

    rows: Index
    counts: Index
    copies: list[tuple[Sequence, int]]

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return int(self.counts.sum()) + len(self.copies) if len(self.counts) else len(self.copies)


_NO_GROWTH = _Growth(NO_INDEX, NO_INDEX, [])


class RankKV(KVCacheManager):
    """The authority on one rank's blocks. One thread owns it; it never blocks.

    A running sequence's uses are kept as a row of the block table, not as a handle, so that a
    decode step grows all rows at once.

    Args:
        config: the pool's configuration.
        dp_rank: the rank's number.
        spec: shape of the KV buffers; None takes it from ``config.memory``, and keeps books only
            where that gives none.
        clock: seconds, for retention priorities that end.

    Attributes:
        block_manager: hands out KV blocks.
        single_block_manager: hands out rows of the block table, one per sequence.
        linear_state: None; linear-state caching is off.
        buffers: the K/V memory, None when only books are kept.
        tables: the block tables, row by single block id.
        weights_version: of the weights that compute KV now.
        is_asleep: whether the K/V memory was given back; nothing can be allocated meanwhile.
    """

    def __init__(
        self,
        config: PoolConfig,
        dp_rank: int = 0,
        spec: KVSpec | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.dp_rank = dp_rank
        self.block_size = config.block_size
        self.block_manager = make_block_manager(config)
        self.single_block_manager = SingleBlockManager(config.num_single_blocks)
        self.linear_state = None
        self.buffers = make_buffers(config, spec)
        self._max_tokens = config.max_tokens_per_sequence
        self.tables = make_tables(config)
        self._swaps: dict[str, SwapList] = {}  # by the driver whose sequences owe the copies
        self._has_forks = False
        self.weights_version = 0
        self.is_asleep = False
        # Rows whose sequences held blocks at a reset, or began under earlier weights. A copy on
        # write would give them a fresh block with old content, so the manager's marks on blocks do
        # not tell; and what follows on old KV is no new KV either.
        self._stale_rows: set[int] = set()
        self._clock = clock
        self._sequences: list[Sequence | None] = [None] * config.num_single_blocks  # by row
        self._num_attached = 0
        self._num_admissions = self._num_queried = self._num_hit = 0

    # -- allocation -----------------------------------------------------------------------------

    def allocate(self, sequences: Sequences, num_tokens: int | Iterable[int] | None = None) -> bool:
        """See KVCacheManager (the seed's section 5.2)."""
        members = flatten(sequences)
        return self.allocate_all(members, token_targets(members, num_tokens))

    def allocate_all(self, members: list[Sequence], targets: list[int]) -> bool:
        """Allocate for distinct sequences; ``targets[i]`` is what ``members[i]`` must hold."""
        if self.is_asleep:
            self._refuse_asleep()
        new, running, wanted = [], [], []
        requests = []
        for sequence, target in zip(members, targets, strict=True):
            need = self._num_blocks(sequence, target)
            if self._is_new(sequence):
                new.append(sequence)
                shareable = _shareable(sequence, self.block_size)
                requests.append(AdmitRequest(need, shareable, sequence.namespace))
            else:
                running.append(sequence)
                wanted.append(need)
        growth = self._growth(running, wanted) if running else _NO_GROWTH
        if growth.num_blocks:  # all running sequences grow as one request: one slice of blocks
            requests.append(AdmitRequest(growth.num_blocks))
        singles = self.single_block_manager.allocate(len(new))
        if singles is None:
            return False
        self.block_manager.set_time(self._clock())
        try:
            admitted = self.block_manager.admit(requests) if requests else []
        except BaseException:
            singles.release()
            raise
        if admitted is None:
            singles.release()
            return False
        for sequence, row, grant in zip(new, singles.detach().tolist(), admitted, strict=False):
            self._attach(sequence, row, grant.block_ids, grant.num_shared)
        if growth.num_blocks:
            self._grow(growth, admitted[-1].block_ids)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """See KVCacheManager."""
        if self._is_new(parent):
            return
        single = self.single_block_manager.allocate(1)
        if single is None:
            return
        state = parent.kv_state
        num_blocks = -(-state.num_computed_tokens // self.block_size)
        with self.block_manager.adopt(state.block_ids[:num_blocks]) as blocks:
            shared = blocks.share()
            blocks.detach()
        child.counted = True
        row, num_full = int(single.detach()[0]), state.num_computed_tokens // self.block_size
        self._attach(child, row, shared.detach(), num_full)
        if parent.single_block_id in self._stale_rows:
            self._stale_rows.add(row)
        child.kv_state.num_computed_tokens = state.num_computed_tokens
        self._has_forks = True

    def get_swap_block_transfer_infos(self) -> list[list[tuple[int, int]]]:
        """See KVCacheManager."""
        return [self.take_swaps("")]

    def ack_swaps(self, driver_id: str = "") -> None:
        """See KVCacheManager; those of one driver."""
        if driver_id in self._swaps:
            self._swaps[driver_id].acknowledge()

    def take_swaps(self, driver_id: str) -> list[tuple[int, int]]:
        """The copies that one driver's sequences owe; see get_swap_block_transfer_infos."""
        return self._swaps[driver_id].take() if driver_id in self._swaps else []

    def forget_driver(self, driver_id: str) -> None:
        """Nobody will copy for this driver's sequences any more, which are gone."""
        self.take_swaps(driver_id)
        self.ack_swaps(driver_id)
        self._swaps.pop(driver_id, None)

    def explain(self, sequence: Sequence) -> MissReport:
        """See KVCacheManager."""
        if self._is_new(sequence):
            raise RequestError(f"{sequence!r} holds no blocks: explain it while it is allocated")
        state = sequence.kv_state
        return self.block_manager.explain(
            sequence.token_ids[: state.num_admitted_tokens],
            state.num_shared_blocks,
            namespace=sequence.namespace,
            others=[
                other
                for other in self._sequences
                if other is not None and other.kv_state.admission < state.admission
            ],
        )

    def allocate_shared(self, sequence: Sequence) -> None:
        """See KVCacheManager; a sequence that holds blocks already keeps just those."""
        if not self._is_new(sequence):
            return
        if self.is_asleep:
            self._refuse_asleep()
        single = self.single_block_manager.allocate(1)
        if single is None:
            return
        try:
            shared = self.block_manager.allocate_shared(
                _shareable(sequence, self.block_size), namespace=sequence.namespace
            )
        except BaseException:
            single.release()
            raise
        num_shared = len(shared)
        self._attach(sequence, int(single.detach()[0]), shared.detach(), num_shared)

    def cache(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """See KVCacheManager."""
        if self._is_new(sequence):
            return
        state = sequence.kv_state
        if not 0 <= state.num_computed_tokens <= sequence.num_tokens:
            raise RequestError(
                f"{sequence!r} claims {state.num_computed_tokens} computed tokens: set "
                "num_computed_tokens to what was computed"
            )
        limit = min(state.num_computed_tokens, state.num_blocks * self.block_size)
        stop = limit if num_tokens is None else min(limit, num_tokens)
        if stop < self.block_size or sequence.single_block_id in self._stale_rows:
            return
        self.block_manager.set_time(self._clock())
        blocks = self.block_manager.adopt(state.block_ids)
        try:
            self.block_manager.cache(
                sequence.token_ids[:stop],
                blocks,
                num_existing_shared=state.num_shared_blocks,
                namespace=sequence.namespace,
                retention=sequence.retention,
            )
        finally:
            blocks.detach()

    def deallocate(self, sequences: Sequences) -> None:
        """See KVCacheManager."""
        for sequence in flatten(sequences):
            try:
                self.cache(sequence)
            finally:
                self._release(sequence)

    def deallocate_without_cache(self, sequences: Sequences) -> None:
        """See KVCacheManager."""
        for sequence in flatten(sequences):
            self._release(sequence)

    def shrink(self, sequence: Sequence, num_blocks: int) -> None:
        """Take back the blocks behind the first ``num_blocks``: how a growth is undone.

        Tokens whose KV lay in them count as computed no more.
        """
        if self._is_new(sequence) or sequence.kv_state.num_blocks <= num_blocks:
            return
        row = sequence.single_block_id
        assert row is not None, "a sequence with blocks has a row"
        self.block_manager.adopt(self.tables.truncate(row, num_blocks)).release()
        state = sequence.kv_state
        state.block_ids = self.tables.ids(row)
        state.num_shared_blocks = min(state.num_shared_blocks, num_blocks)
        state.num_computed_tokens = min(state.num_computed_tokens, num_blocks * self.block_size)

    # -- weights versions and sleep -------------------------------------------------------------

    def begin_version(self, version: int) -> None:
        """KV that is computed from now on is that of these weights.

        Sequences that hold a row now publish what they have computed, under their namespace, and
        nothing any more until they are admitted anew: what they compute later depends on KV of
        earlier weights. Forks of them neither.
        """
        for row, held in enumerate(self._sequences):
            if held is not None:
                with contextlib.suppress(ValueError):  # a wrong claim costs its sequence a hit
                    self.cache(held)
                self._stale_rows.add(row)
        self.weights_version = version

    def is_outdated(self, sequence: Sequence) -> bool:
        """Whether a sequence holds, or depends on, KV of earlier weights, and publishes nothing."""
        return sequence.single_block_id in self._stale_rows

    def sleep(self) -> None:
        """Forget all cached prefixes and give the K/V memory back; idempotent.

        Raises:
            RequestError: somebody holds blocks; nothing changed.
        """
        if self.is_asleep:
            return
        self.check_unused()
        manager = self.block_manager
        num_held = manager.num_total_blocks - manager.num_available_blocks
        if num_held:
            raise RequestError(
                f"rank {self.dp_rank} cannot sleep while handles or copies hold {num_held} blocks: "
                "release them, or acknowledge the copies with ack_swaps()"
            )
        manager.reset_prefix_cache()
        if self.buffers is not None:
            self.buffers.release()
        self.is_asleep = True

    def wake_up(self) -> None:
        """Take K/V memory again; idempotent.

        Raises:
            ConfigError: it does not fit any more; the rank goes on sleeping.
        """
        if self.buffers is not None:
            self.buffers.restore()
        self.is_asleep = False

    def check_unused(self, besides: Collection[Sequence] = ()) -> None:
        """Raise RequestError if sequences hold rows or blocks, ``besides`` some of them."""
        held = [s for s in self._sequences if s is not None and s not in besides]
        if held:
            num_blocks = sum(sequence.kv_state.num_blocks for sequence in held)
            raise RequestError(
                f"rank {self.dp_rank} cannot sleep while {len(held)} sequences of your scheduler "
                f"hold {num_blocks} blocks: deallocate them first"
            )

    # -- counters -------------------------------------------------------------------------------

    def num_free_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [self.block_manager.num_free_blocks]

    def num_used_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [self.block_manager.num_used_blocks]

    def num_available_blocks(self) -> list[int]:
        """See KVCacheManager."""
        return [self.block_manager.num_available_blocks]

    def num_blocks_in_prefix_cache(self) -> list[int]:
        """See KVCacheManager."""
        return [self.block_manager.num_blocks_in_prefix_cache]

    def kv_cache_utilization(self) -> float:
        """See KVCacheManager."""
        return self.block_manager.kv_cache_utilization

    def reset_prefix_cache(self) -> list[int]:
        """See KVCacheManager."""
        self._stale_rows.update(
            row for row, held in enumerate(self._sequences) if held and held.kv_state.num_blocks
        )
        return [self.block_manager.reset_prefix_cache()]

    @property
    def room(self) -> Room:
        """What routing looks at; cheaper than all counters."""
        manager = self.block_manager
        num_free = manager.num_free_blocks
        singles = self.single_block_manager.num_free_blocks
        return Room(num_free + manager.num_evictable_blocks, num_free, singles)

    def rank_stats(self) -> RankStats:
        """This rank's counters."""
        manager = self.block_manager
        return RankStats(
            num_total_blocks=manager.num_total_blocks,
            num_free_blocks=manager.num_free_blocks,
            num_used_blocks=manager.num_used_blocks,
            num_evictable_blocks=manager.num_evictable_blocks,
            num_blocks_in_prefix_cache=manager.num_blocks_in_prefix_cache,
            num_free_single_blocks=self.single_block_manager.num_free_blocks,
            num_admissions_total=self._num_admissions,
            prefix_cache_queries_total=self._num_queried,
            prefix_cache_hits_total=self._num_hit,
            num_evicted_blocks_total=manager.num_evicted_blocks,
        )

    def stats(self) -> PoolStats:
        """See KVCacheManager."""
        return PoolStats((self.rank_stats(),))

    def check_integrity(self) -> None:
        """Check both managers, the tables, and that rows, sequences and uses agree."""
        self.block_manager.check_integrity()
        self.single_block_manager.check_integrity()
        self.tables.check_integrity()
        rows = [row for row, sequence in enumerate(self._sequences) if sequence is not None]
        if not self._stale_rows <= set(rows):
            raise IntegrityError("a row without sequence is marked as stale")
        if self.single_block_manager.num_used_blocks != len(rows):
            raise IntegrityError(f"{len(rows)} sequences hold rows, but the books differ")
        for row in rows:
            sequence = self._sequence(row)
            if sequence.single_block_id != row or not np.array_equal(
                sequence.kv_state.block_ids, self.tables.ids(row)
            ):
                raise IntegrityError(f"row {row} and {sequence!r} disagree")
        if self.tables.num_blocks.sum() != self.tables.num_blocks[rows].sum():
            raise IntegrityError("a row without sequence has blocks")
        ids, times = np.unique(self.tables.table[rows], return_counts=True)
        ids, times = ids[ids > 0], times[ids > 0]
        held = self.block_manager.adopt(ids)
        too_few = len(ids) > self.block_manager.num_used_blocks or (held.ref_counts < times).any()
        held.detach()
        if too_few:
            raise IntegrityError("a row lists a block that its sequence does not use")

    # -- details --------------------------------------------------------------------------------

    def _refuse_asleep(self) -> NoReturn:
        raise RequestError(f"rank {self.dp_rank} sleeps: call wake_up() first")

    def _attach(self, sequence: Sequence, row: int, ids: Index, num_shared: int) -> None:
        self.tables.append(row, ids)
        self._sequences[row] = sequence
        sequence.dp_rank, sequence.single_block_id = self.dp_rank, row
        if sequence.owner is None:
            sequence.owner = self
        self._num_attached += 1
        sequence.kv_state = KVCacheState(
            block_size=self.block_size,
            block_ids=self.tables.ids(row),
            num_shared_blocks=num_shared,
            num_computed_tokens=num_shared * self.block_size,
            num_admitted_tokens=sequence.num_tokens,
            admission=self._num_attached,
        )
        if not sequence.counted:
            sequence.counted = True
            self._num_admissions += 1
            self._num_queried += sequence.num_tokens
            self._num_hit += num_shared * self.block_size

    def _release(self, sequence: Sequence) -> None:
        if not self._is_new(sequence):
            row = sequence.single_block_id
            assert row is not None, "a sequence with blocks has a row"
            self.block_manager.adopt(self.tables.truncate(row, 0)).release()
            self.single_block_manager.adopt(np.array([row], np.int32)).release()
            self._sequences[row] = None
            self._stale_rows.discard(row)
            if not self.single_block_manager.num_used_blocks:
                self._has_forks = False
        sequence.forget()

    def _due_copies(self, running: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """Running sequences that are about to write to a block which others use too.

        Each with the block's index in its table: the block of its first uncomputed token. The last
        of several writers keeps the block.
        """
        due = []
        uses: dict[int, int] = {}
        for sequence in running:
            state = sequence.kv_state
            index = state.num_computed_tokens // self.block_size
            if index < state.num_blocks:
                block_id = int(state.block_ids[index])
                if block_id not in uses:
                    one = state.block_ids[index : index + 1]
                    uses[block_id] = int(self.block_manager.use_counts(one)[0])
                if uses[block_id] > 1:
                    due.append((sequence, index))
                    uses[block_id] -= 1
        return due

    def _copy_on_write(self, sequence: Sequence, index: int, target: int) -> None:
        """Give a sequence its own copy of one block, to be filled before it writes."""
        row, state = sequence.single_block_id, sequence.kv_state
        source = int(state.block_ids[index])
        if sequence.driver_id not in self._swaps:
            self._swaps[sequence.driver_id] = SwapList(self.block_manager)
        self._swaps[sequence.driver_id].add(source, target)
        self.block_manager.adopt([source]).release()
        self.tables.table[row, index] = target
        assert row is not None, "a sequence with blocks has a row"
        state.block_ids = self.tables.ids(row)
        state.num_shared_blocks = min(state.num_shared_blocks, index)

    def _growth(self, running: list[Sequence], wanted: list[int]) -> _Growth:
        """What running sequences need to hold ``wanted`` blocks, and to write to their last one."""
        rows = np.array([sequence.single_block_id for sequence in running], np.int64)
        counts = np.array(wanted, np.int64) - self.tables.num_blocks[rows]
        grows = (counts > 0).nonzero()[0]
        copies = self._due_copies(running) if self._has_forks else []
        return _Growth(rows[grows], counts[grows], copies)

    def _grow(self, growth: _Growth, ids: Index) -> None:
        num_more = len(ids) - len(growth.copies)
        self.tables.append_many(growth.rows, growth.counts, ids[:num_more])
        for row in growth.rows.tolist():
            self._sequence(row).kv_state.block_ids = self.tables.ids(row)
        for (sequence, index), target in zip(growth.copies, ids[num_more:].tolist(), strict=True):
            self._copy_on_write(sequence, index, target)

    def _is_new(self, sequence: Sequence) -> bool:
        row = sequence.single_block_id
        if row is None:
            return True
        is_ours = sequence.dp_rank == self.dp_rank and row < len(self._sequences)
        if not is_ours or self._sequences[row] is not sequence:
            raise RequestError(
                f"{sequence!r} belongs to another pool or rank: deallocate it there first"
            )
        return False

    def _sequence(self, row: int) -> Sequence:
        sequence = self._sequences[row]
        assert sequence is not None, f"row {row} has no sequence"
        return sequence

    def _num_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        limit = self._max_tokens
        if not 0 < num_tokens <= limit:
            total = self.block_manager.num_total_blocks
            raise RequestError(
                f"sequence {sequence.seq_id!r} asks for {num_tokens} tokens, but it can have 1 to "
                f"{limit} here ({total} blocks of {self.block_size} tokens, max_model_len "
                f"{self.config.max_model_len}): shorten it, or raise num_blocks or max_model_len"
            )
        return -(-num_tokens // self.block_size)


def _shareable(sequence: Sequence, block_size: int) -> BlockIds:
    """Tokens whose blocks may be shared: one token at least is left to compute (vLLM 11186)."""
    num_blocks = (sequence.num_tokens - 1) // block_size
    return sequence.token_ids[: num_blocks * block_size]
