"""All block state of one dp_rank: managers, block tables, KV buffers (the seed's section 5)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable

from raykv.config import PoolConfig
from raykv.core.copy_on_write import CopyOnWrite
from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import Sequences, flatten, token_targets
from raykv.core.linear_state import LinearStatePrefixCache
from raykv.core.manager import AdmitRequest
from raykv.core.row_growth import NO_GROWTH, Growth, RowGrowth
from raykv.core.rows import Rows
from raykv.core.sequence import Sequence
from raykv.core.single import SingleBlockManager
from raykv.core.tokens import BlockIds, Index
from raykv.errors import RequestError
from raykv.memory.spec import KVSpec
from raykv.memory.state_spec import StateSpec
from raykv.rank_build import make_block_manager, make_buffers, make_states, make_tables
from raykv.rank_counters import RankCounters
from raykv.rank_sleep import RankSleep
from raykv.rank_tiering import RankTiering
from raykv.rank_transfers import RankTransfers
from raykv.resume_points import ANYWHERE, Resume, resumable


class RankKV(RankCounters, RankTiering, RankTransfers):
    """The authority on one rank's blocks. One thread owns it; it never blocks.

    A running sequence's uses are kept as a row of the block table, not as a handle, so that a
    decode step grows all rows at once.

    Args:
        config: the pool's configuration.
        dp_rank: the rank's number.
        spec: shape of the KV buffers; None takes it from ``config.memory``, and keeps books only
            where that gives none.
        state_spec: shape of the recurrent state; None keeps books of it only.
        clock: seconds, for retention priorities that end.

    Attributes:
        block_manager: hands out KV blocks.
        single_block_manager: hands out rows of the block table, one per sequence.
        states: recurrent state, its slots and checkpoints; None where sequences have none.
        buffers: the K/V memory, None when only books are kept.
        tables: the block tables, row by single block id.
        weights_version: of the weights that compute KV now.
    """

    def __init__(
        self,
        config: PoolConfig,
        dp_rank: int = 0,
        spec: KVSpec | None = None,
        state_spec: StateSpec | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.dp_rank = dp_rank
        self.block_size = config.block_size
        self.block_manager = make_block_manager(config)
        self.single_block_manager = SingleBlockManager(config.num_single_blocks)
        self.buffers = make_buffers(config, spec)
        self.states = make_states(
            config, self.block_manager, self.single_block_manager, self.buffers, state_spec
        )
        self._max_tokens = config.max_tokens_per_sequence
        self.tables = make_tables(config)
        self.weights_version = 0
        self._rows = Rows(dp_rank, self.block_size, self.tables, self.single_block_manager)
        self._sleep = RankSleep(dp_rank, self.block_manager, self._rows, self.buffers, self.states)
        self._copies = CopyOnWrite(self.block_manager, self.tables)
        self._growth = RowGrowth(self.tables, self._copies)
        self._clock = clock
        self._host_hits = {}

    @property
    def linear_state(self) -> LinearStatePrefixCache | None:
        """The slots of recurrent state and their checkpoints; None where sequences have none."""
        return None if self.states is None else self.states.cache

    # -- allocation -----------------------------------------------------------------------------

    def allocate(self, sequences: Sequences, num_tokens: int | Iterable[int] | None = None) -> bool:
        """See KVCacheManager (the seed's section 5.2)."""
        members = flatten(sequences)
        return self.allocate_all(members, token_targets(members, num_tokens))

    def allocate_all(self, members: list[Sequence], targets: list[int]) -> bool:
        """Allocate for distinct sequences; ``targets[i]`` is what ``members[i]`` must hold."""
        if self._allocate_all(members, targets):
            return True
        # Offloads pin their sources: those that have not started make room.
        is_freed = self.tier is not None and self.tier.cancel_unstarted_offloads()
        return bool(is_freed) and self._allocate_all(members, targets)

    def _allocate_all(self, members: list[Sequence], targets: list[int]) -> bool:
        if self._sleep.is_asleep:
            self._sleep.refuse()
        new, running, wanted = [], [], []
        requests, find = [], self._rows.find
        for sequence, target in zip(members, targets, strict=True):
            need = self._num_blocks(sequence, target)
            if find(sequence) is None:
                new.append(sequence)
                shareable = _shareable(sequence, self.block_size)
                requests.append(AdmitRequest(need, shareable, sequence.namespace))
            else:
                running.append(sequence)
                wanted.append(need)
        resumes = self._resume(requests)
        if resumes is None:
            return False
        requests = [resumable(*pair) for pair in zip(requests, resumes, strict=True)]
        growth = self._growth.plan(running, wanted) if running else NO_GROWTH
        return self._admit(new, requests, resumes, growth)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """See KVCacheManager."""
        parent_row = self._rows.find(parent)
        if parent_row is None:
            return
        single = self.single_block_manager.allocate(1)
        if single is None or (self.states is not None and not self.states.num_obtainable_slots):
            return
        state = parent.kv_state
        num_blocks = -(-state.num_computed_tokens // self.block_size)
        with self.block_manager.adopt(state.block_ids[:num_blocks]) as blocks:
            shared = blocks.share()
            blocks.detach()
        child.counted = True
        row, num_full = int(single.detach()[0]), state.num_computed_tokens // self.block_size
        self._attach(child, row, shared.detach(), num_full)
        if parent_row in self._rows.stale:
            self._rows.stale.add(row)
        child.kv_state.num_computed_tokens = state.num_computed_tokens
        self._copies.has_forks = True
        if self.states is not None:
            self.states.fork(parent, child)

    def explain(self, sequence: Sequence) -> MissReport:
        """See KVCacheManager."""
        row = self._rows.find(sequence)
        if row is None:
            raise RequestError(f"{sequence!r} holds no blocks: explain it while it is allocated")
        report = None if self.states is None else self.states.explain(sequence)
        if report is None:
            state = sequence.kv_state
            report = self.block_manager.explain(
                sequence.token_ids[: state.num_admitted_tokens],
                state.num_shared_blocks + self.num_host_blocks(row),
                namespace=sequence.namespace,
                others=self._rows.admitted_before(sequence),
            )
        return self.host_report(report, sequence, row)

    def allocate_shared(self, sequence: Sequence) -> None:
        """See KVCacheManager; a sequence that holds blocks already keeps just those."""
        if self._rows.find(sequence) is not None:
            return
        if self._sleep.is_asleep:
            self._sleep.refuse()
        tokens = _shareable(sequence, self.block_size)
        num_blocks = self.block_manager.num_matching_blocks(tokens, namespace=sequence.namespace)
        request = AdmitRequest(num_blocks, tokens, sequence.namespace)
        resumes = self._resume([request])
        if resumes is not None:
            request = resumable(request, resumes[0])
            if self.states is not None:
                request = request._replace(num_blocks=resumes[0].num_blocks)
            self._admit([sequence], [request], resumes, NO_GROWTH)

    def cache(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """See KVCacheManager. Where a checkpoint of its state is due, its copy is due now."""
        row = self._rows.find(sequence)
        if row is not None:
            self._publish(sequence, row, num_tokens)
            self.checkpoint([sequence])

    def checkpoint(self, sequences: Iterable[Sequence]) -> None:
        """Take the checkpoints of recurrent state that are due; see RankStates.checkpoint."""
        if self.states is not None:
            self.states.checkpoint([s for s in sequences if not self.is_outdated(s)])

    def next_checkpoint(self, sequence: Sequence) -> int | None:
        """Where its prefill has to stop next for a checkpoint; see RankStates.next_checkpoint."""
        if self.states is None or self.is_outdated(sequence):
            return None
        return self.states.next_checkpoint(sequence)

    def _publish(self, sequence: Sequence, row: int, num_tokens: int | None = None) -> None:
        state = sequence.kv_state
        if not 0 <= state.num_computed_tokens <= sequence.num_tokens:
            raise RequestError(
                f"{sequence!r} claims {state.num_computed_tokens} computed tokens: set "
                "num_computed_tokens to what was computed"
            )
        limit = min(state.num_computed_tokens, state.num_blocks * self.block_size)
        stop = limit if num_tokens is None else min(limit, num_tokens)
        if stop < self.block_size or row in self._rows.stale:
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
                row = self._rows.find(sequence)
                if row is not None:
                    self._publish(sequence, row)
            except BaseException:
                self._release(sequence, publish=False)
                raise
            self._release(sequence, publish=True)

    def deallocate_without_cache(self, sequences: Sequences) -> None:
        """See KVCacheManager."""
        for sequence in flatten(sequences):
            self._release(sequence, publish=False)

    def shrink(self, sequence: Sequence, num_blocks: int) -> None:
        """Take back the blocks behind the first ``num_blocks``: how a growth is undone.

        Tokens whose KV lay in them count as computed no more.
        """
        row = self._rows.find(sequence)
        if row is None or sequence.kv_state.num_blocks <= num_blocks:
            return
        self.block_manager.adopt(self.tables.truncate(row, num_blocks)).release()
        state = sequence.kv_state
        state.block_ids = self.tables.ids(row)
        state.num_shared_blocks = min(state.num_shared_blocks, num_blocks)
        state.num_computed_tokens = min(state.num_computed_tokens, num_blocks * self.block_size)
        state.num_loaded_tokens = min(state.num_loaded_tokens, num_blocks * self.block_size)

    # -- weights versions and sleep -------------------------------------------------------------

    def begin_version(self, version: int) -> None:
        """KV that is computed from now on is that of these weights.

        Sequences that hold a row now publish what they have computed, under their namespace, and
        nothing any more until they are admitted anew: what they compute later depends on KV of
        earlier weights. Forks of them neither.
        """
        for row, held in self._rows.held():
            with contextlib.suppress(ValueError):  # a wrong claim costs its sequence a hit
                self._publish(held, row)
            self._rows.stale.add(row)
        self.weights_version = version

    def is_outdated(self, sequence: Sequence) -> bool:
        """Whether a sequence holds, or depends on, KV of earlier weights, and publishes nothing."""
        return sequence.single_block_id in self._rows.stale

    @property
    def is_asleep(self) -> bool:
        """Whether the K/V memory was given back; nothing can be allocated meanwhile."""
        return self._sleep.is_asleep

    def sleep(self) -> None:
        """Forget all cached prefixes and give the K/V memory back; see RankSleep."""
        if self.tier is not None:
            self.tier.quiesce()
        self._sleep.sleep()

    def wake_up(self) -> None:
        """Take K/V memory again; see RankSleep."""
        self._sleep.wake_up()

    def check_unused(self, besides: Collection[Sequence] = ()) -> None:
        """Raise if sequences hold rows or blocks, ``besides`` some of them; see RankSleep."""
        self._sleep.check_unused(besides)

    def reset_prefix_cache(self) -> list[int]:
        """See KVCacheManager."""
        self._rows.mark_holders_stale()
        if self.states is not None:
            self.states.cache.clear()
        return [self.block_manager.reset_prefix_cache()]

    def check_integrity(self) -> None:
        """Check both managers, the tables, and that rows, sequences and uses agree."""
        self.block_manager.check_integrity()
        self.single_block_manager.check_integrity()
        self.tables.check_integrity()
        self._rows.check_integrity(self.block_manager)
        if self.states is not None:
            self.states.check_integrity([held for _, held in self._rows.held()])

    # -- details --------------------------------------------------------------------------------

    def _resume(self, requests: list[AdmitRequest]) -> list[Resume] | None:
        """Where new sequences can go on from; None if there is no slot for their state."""
        if self.states is None:
            return [ANYWHERE] * len(requests)
        return self.states.resume(requests)

    def _admit(
        self,
        new: list[Sequence],
        requests: list[AdmitRequest],
        resumes: list[Resume],
        growth: Growth,
    ) -> bool:
        """Give new sequences rows and blocks, and running ones theirs, all or nothing."""
        if growth.num_blocks:  # all running sequences grow as one request: one slice of blocks
            requests = [*requests, AdmitRequest(growth.num_blocks)]
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
        if self.states is not None and new:
            self.states.admit(new, resumes)
        if growth.num_blocks:
            self._growth.apply(growth, admitted[-1].block_ids)
        if new:
            self._tell_tier(new)
        return True

    def _attach(self, sequence: Sequence, row: int, ids: Index, num_shared: int) -> None:
        self._rows.attach(sequence, row, ids, num_shared)
        if sequence.owner is None:
            sequence.owner = self
        if not sequence.counted:
            sequence.counted = True
            self._num_admissions += 1
            self._num_queried += sequence.num_tokens
            self._num_hit += num_shared * self.block_size
            if self.states is not None and num_shared:
                self.states.num_resumed_total += 1

    def _release(self, sequence: Sequence, *, publish: bool) -> None:
        row = self._rows.find(sequence)
        if row is not None:
            is_sound = publish and row not in self._rows.stale
            if self.states is not None:
                self.states.release(sequence, publish=is_sound)
            self._leave_tier(sequence, row, offloads=is_sound)
            self.block_manager.adopt(self.tables.truncate(row, 0)).release()
            self._rows.detach(row)
            if self._rows.is_empty:
                self._copies.has_forks = False
        sequence.forget()

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
