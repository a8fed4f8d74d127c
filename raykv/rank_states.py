"""Recurrent state of one rank: live slots, when checkpoints are taken, and what resumes from them.

Carries out the seed's section 7 on the rank. A sequence that reuses KV must also resume from the
recurrent state at that very boundary, so a hit ends at a block boundary that has a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from raykv.config import LinearStateConfig
from raykv.core.block_manager import BlockManagerImpl
from raykv.core.blocks import Blocks
from raykv.core.explain import MissReport
from raykv.core.linear_state import LinearStatePrefixCache
from raykv.core.manager import AdmitRequest
from raykv.core.sequence import Sequence, next_checkpoint
from raykv.core.sequence_prefixes import SequencePrefixes
from raykv.core.single import SingleBlockManager
from raykv.core.state_copies import Save, StateCopies
from raykv.errors import IntegrityError
from raykv.memory.state_buffers import StateBuffers
from raykv.resume_points import AT_START, Resume, ResumePoints
from raykv.state_plan import StatePlan


class RankStates:
    """Gives sequences their state slots, and takes checkpoints of them.

    Args:
        config: slots, stride and rules.
        manager: the rank's KV blocks, which name prefixes, too.
        singles: hands out rows of the block table, where live states lie if not in slots.
        buffers: the memory of the slots; None when only books are kept.

    Attributes:
        config: the same.
        cache: the slots' books.
        buffers: their memory.
        num_resumed_total: sequences that began from a checkpoint; counted by the rank, each once
            however often it is preempted.
    """

    def __init__(
        self,
        config: LinearStateConfig,
        manager: BlockManagerImpl,
        singles: SingleBlockManager,
        buffers: StateBuffers | None,
    ) -> None:
        self.config = config
        self.cache = LinearStatePrefixCache(config.num_slots)
        self.buffers = buffers
        self.num_resumed_total = 0
        self._manager = manager
        self._singles = singles
        self._block_size = manager.block_size
        self._points = ResumePoints(config, manager, self.cache)
        self._copies = StateCopies(self.cache)
        self._plans: dict[int, StatePlan] = {}  # by single block id

    # -- from admission to release --------------------------------------------------------------

    @property
    def num_obtainable_slots(self) -> int:
        """Live slots that can be had: free ones, and those of checkpoints that nobody reads.

        And those that running sequences keep for what they end with, if they are needed.
        """
        num_slots = self._num_idle_slots
        if (
            num_slots > 2 * self._singles.num_free_blocks
        ):  # each lives in one and reads one, at most
            return num_slots
        return num_slots + len(self._spare())

    def resume(self, requests: SequenceOf[AdmitRequest]) -> list[Resume] | None:
        """Where new sequences can go on from; a look only, so a refusal refreshes nothing.

        Args:
            requests: what each of them asks of the block manager.

        Returns:
            None if there are fewer slots than sequences.
        """
        return self._points.find(requests, self.num_obtainable_slots)

    def admit(self, sequences: SequenceOf[Sequence], resumes: SequenceOf[Resume]) -> None:
        """Give sequences that just got their rows live slots, as ``resume`` has found room for."""
        for sequence, one in zip(sequences, resumes, strict=True):
            self._plan(sequence, one)
        pins = [None if one.name is None else self.cache.match(one.name) for one in resumes]
        live = self._acquire(len(sequences))
        slots = live.detach().tolist()
        for sequence, one, pin, slot in zip(sequences, resumes, pins, slots, strict=True):
            self._refresh(sequence, one.num_tokens)
            sequence.linear_state_slot = slot
            sequence.kv_state.checkpoint_stops = self._points.stops(sequence.num_tokens, one)
            if pin is not None:
                self._owe(sequence, int(pin.index[0]), pin)

    def can_restart(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether ``restart`` may be called: it holds a row, and has computed nothing here yet.

        Nor is a copy into its state under way: who fetched it may be about to compute from there.
        """
        row, state = sequence.single_block_id, sequence.kv_state
        plan = None if row is None else self._plans.get(row)
        return (
            plan is not None
            and plan.num_inherited_tokens == state.num_computed_tokens
            and state.num_computed_tokens < num_tokens < sequence.num_tokens
            and num_tokens <= state.num_blocks * self._block_size
            and num_tokens % self._block_size == 0
            and not self._copies.is_under_way(sequence.driver_id, self._address(sequence))
        )

    def restart(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let a sequence go on from a deeper checkpoint, whose KV lies in its blocks by now.

        Its live slot is owed a copy of that one, instead of any that is due to it.

        Returns:
            Whether it does; else nothing changed, as there is no checkpoint or it is too late.
        """
        if not self.can_restart(sequence, num_tokens):
            return False
        plan, num_blocks = self._plan_of(sequence), num_tokens // self._block_size
        name, prefix = plan.prefixes.name(num_tokens), plan.prefixes.checked(num_tokens)
        pin = self.cache.match(name, prefix=prefix)
        if pin is None:
            return False
        num_kv_blocks = max(num_blocks, plan.resume.num_kv_blocks)
        plan.resume = Resume(num_blocks, num_kv_blocks, name, num_tokens)
        if num_blocks == num_kv_blocks:
            plan.miss = None
        plan.num_inherited_tokens = sequence.kv_state.num_computed_tokens = num_tokens
        self._refresh(sequence, num_tokens)
        self._owe(sequence, int(pin.index[0]), pin)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give a child, which just got its row, a copy of its parent's state.

        A live slot must be obtainable.
        """
        child.linear_state_slot = int(self._acquire(1).detach()[0])
        self._plan(child, AT_START)
        if child.kv_state.num_computed_tokens:
            self._owe(child, self._address(parent), self._pin(parent))

    def release(self, sequence: Sequence, *, publish: bool) -> None:
        """Take a sequence's slot back; what it ends with becomes a checkpoint if it publishes.

        Where the state stands at a boundary, its slot itself becomes the checkpoint, and nothing
        is copied (the final promotion).
        """
        row, plan = sequence.single_block_id, self._plan_of(sequence)
        assert row is not None, "it holds a row"
        self._copies.release(sequence, self._address(sequence))
        publish = publish and self.config.at_generation_end and self._manager.enable_prefix_cache
        if publish and self._stands_at_boundary(sequence, plan) and self.promotes:
            num_tokens = sequence.kv_state.num_computed_tokens
            name, prefix = plan.prefixes.name(num_tokens), plan.prefixes.checked(num_tokens)
            self.cache.promote(sequence, name, final=True, prefix=prefix)
        elif publish and plan.rolling is not None and plan.rolling.num_tokens:
            save, plan.rolling = plan.rolling, None
            save.name = plan.prefixes.name(save.num_tokens)
            save.prefix = plan.prefixes.checked(save.num_tokens)
            if save.is_copied:
                self._copies.commit(save)
        if plan.rolling is not None:
            plan.rolling.give_up()
        self._refresh(sequence, sequence.kv_state.num_computed_tokens)
        del self._plans[row]
        self.cache.release_live_slot(sequence)

    # -- checkpoints ----------------------------------------------------------------------------

    def next_checkpoint(self, sequence: Sequence) -> int | None:
        """The next token position of its prompt at which a checkpoint is due; None for no more.

        Whoever computes must stop there, so that the state can be saved just then.
        """
        if not self._manager.enable_prefix_cache:
            return None
        stride = self.config.stride_tokens if self.config.at_stride else None
        return next_checkpoint(sequence.kv_state, stride)

    def checkpoint(self, sequences: Iterable[Sequence]) -> None:
        """Reserve checkpoints for sequences that just computed up to a boundary, where one is due.

        Their copies are due then, and with their acknowledgement they can be found. Without a slot
        to be had the checkpoint is skipped, and counted.
        """
        if not self._manager.enable_prefix_cache:
            return
        for sequence in sequences:
            state, row = sequence.kv_state, sequence.single_block_id
            num_tokens = state.num_computed_tokens
            if row is None or num_tokens % self._block_size:
                continue
            plan = self._plans[row]
            if num_tokens <= plan.num_inherited_tokens:
                continue
            is_stride = self.config.at_stride and num_tokens % self.config.stride_tokens == 0
            if num_tokens > state.num_admitted_tokens and self._keeps_ends:
                is_stride = False  # what is generated has its end kept, and is seldom gone back to
            is_stop = num_tokens in state.checkpoint_stops
            if is_stride or is_stop:
                # Contiguous hits need those at strides.
                is_speculative = not is_stop and self.config.match == "deepest"
                self._save(sequence, plan, num_tokens, is_speculative=is_speculative)
            elif self._keeps_ends and num_tokens >= state.num_admitted_tokens:
                self._roll(sequence, plan, num_tokens)

    def take_copies(self, driver_id: str) -> list[tuple[int, int]]:
        """Copies of state that are due now, as (source, target) addresses of ``buffers``."""
        return self._copies.take(driver_id)

    def take_saves(self, driver_id: str) -> list[tuple[int, int]]:
        """Those of them that make checkpoints."""
        return self._copies.take_saves(driver_id)

    def acknowledge_copies(self, driver_id: str) -> None:
        """Those that were handed out are done."""
        self._copies.acknowledge(driver_id)

    def fail_copies(self, driver_id: str) -> None:
        """Those that were handed out were not done."""
        self._copies.fail(driver_id)

    def forget_driver(self, driver_id: str) -> None:
        """Nobody will do this driver's copies."""
        self._copies.forget(driver_id)

    # -- looks ----------------------------------------------------------------------------------

    def explain(self, sequence: Sequence) -> MissReport | None:
        """Why it reused less than the KV that was cached; None if it reused all of it."""
        plan = self._plan_of(sequence)
        if plan.miss is None:
            return None
        hit, end = (count * self._block_size for count in plan.resume[:2])
        return MissReport(plan.miss, hit, end)

    @property
    def is_copying(self) -> bool:
        """Whether copies are due or under way."""
        return not self._copies.is_idle

    def counters(self) -> dict[str, int]:
        """What RankStats says of it."""
        checkpoint_bytes = 0 if self.buffers is None else self.buffers.checkpoint_bytes
        return {
            "num_free_state_slots": self.cache.num_free_slots,
            "num_live_state_slots": self.cache.num_live_slots,
            "num_checkpoints": self.cache.num_checkpoints,
            "state_hits_total": self.num_resumed_total,
            "state_checkpoints_total": self.cache.num_committed_total,
            "state_skipped_total": self.cache.num_skipped_total,
            "state_bytes": self.cache.num_checkpoints * checkpoint_bytes,
        }

    def live_index(self, sequence: Sequence) -> int:
        """The row of the buffers' views that holds its state."""
        address = self._address(sequence)
        return address if self.buffers is None else address - self.buffers.live_base

    def check_integrity(self, held: Iterable[Sequence]) -> None:
        """Each sequence with a row has a live slot of its own, and the slots' books balance.

        Args:
            held: the sequences with rows.

        Raises:
            IntegrityError: something disagrees.
        """
        self.cache.check_integrity()
        slots = {one.single_block_id: one.linear_state_slot or 0 for one in held}
        num_live = self.cache.num_live_slots
        if slots.keys() != self._plans.keys() or not len(slots) == num_live == len(
            {slot for slot in slots.values() if self.cache.slots.num_uses(slot) == 1}
        ):
            raise IntegrityError(
                f"{len(slots)} sequences hold rows and {len(self._plans)} have state, but "
                f"{num_live} slots are live, and these are the sequences': {slots}"
            )

    # -- details --------------------------------------------------------------------------------

    @property
    def promotes(self) -> bool:
        """Whether a live slot can become a checkpoint: live states lie as checkpoints do."""
        return self.buffers is None or self.buffers.checkpoint_dtype == "float32"

    @property
    def _num_idle_slots(self) -> int:
        return self.cache.num_free_slots + self.cache.num_reclaimable

    def _spare(self) -> list[Save]:
        """States at the last boundaries of sequences that go on, where no copy is under way."""
        rolling = [plan.rolling for plan in self._plans.values() if plan.rolling is not None]
        return [save for save in rolling if save.num_tokens and save.is_copied]

    def _acquire(self, num_slots: int) -> Blocks:
        """Take live slots, which the caller has counted; running comes before what may be kept."""
        missing = num_slots - self._num_idle_slots
        if missing > 0:
            for save in self._spare()[-missing:]:  # the youngest: they end last, and roll again
                save.give_up()
                self.cache.num_skipped_total += 1
        live = self.cache.acquire_live_slots(num_slots)
        assert live is not None, "the caller has counted the slots"
        return live

    def _plan(self, sequence: Sequence, resume: Resume) -> None:
        assert sequence.single_block_id is not None, "it holds a row"
        computed = sequence.kv_state.num_computed_tokens
        prefixes = SequencePrefixes(sequence, self._manager.hasher)
        plan = self._plans[sequence.single_block_id] = StatePlan(resume, computed, prefixes)
        if resume.num_blocks < resume.num_kv_blocks:
            plan.miss = self._points.why_not_all(prefixes, resume)

    def _refresh(self, sequence: Sequence, num_tokens: int) -> None:
        """Where hits need a run of checkpoints, its deeper ones go first and its start goes last.

        Each would be the most recent one as it is taken, so the start, without which the others
        are of no use, would be the first to go.
        """
        slots = self.cache.slots
        for name in self._points.rests_on(self._plan_of(sequence).prefixes, num_tokens):
            known = slots.committed.get(name)
            if known is not None:
                slots.refresh(known)

    def _save(
        self, sequence: Sequence, plan: StatePlan, num_tokens: int, *, is_speculative: bool
    ) -> None:
        self._refresh(sequence, num_tokens)  # the first ones must not make room for this one
        name, prefix = plan.prefixes.name(num_tokens), plan.prefixes.checked(num_tokens)
        reservation = self.cache.reserve_checkpoint(
            name, prefix=prefix, is_speculative=is_speculative
        )
        if reservation is not None and not reservation.existing:
            save = Save(sequence, num_tokens, reservation, name, prefix)
            self._copies.add_save(save, self._address(sequence), self._pin(sequence))

    def _roll(self, sequence: Sequence, plan: StatePlan, num_tokens: int) -> None:
        """Keep the state at this boundary instead of the one before."""
        if plan.rolling is not None and plan.rolling.num_tokens == num_tokens:
            return
        if plan.rolling is None or not plan.rolling.num_tokens:
            reservation = self.cache.reserve_checkpoint(None)
            if reservation is None:
                return
            plan.rolling = Save(sequence, num_tokens, reservation)
        plan.rolling.num_tokens = num_tokens
        self._copies.add_save(plan.rolling, self._address(sequence), self._pin(sequence))

    @property
    def _keeps_ends(self) -> bool:
        """Whether the ends of what is generated are kept: contiguous hits could not use them."""
        return self.config.at_generation_end and self.config.match == "deepest"

    def _stands_at_boundary(self, sequence: Sequence, plan: StatePlan) -> bool:
        """Whether its state is that of a boundary that a hit could end at."""
        computed = sequence.kv_state.num_computed_tokens
        is_deepest = self.config.match == "deepest"
        step = self._block_size if is_deepest else self.config.stride_tokens
        return computed > plan.num_inherited_tokens and computed % step == 0

    def _owe(self, sequence: Sequence, source: int, pin: Blocks) -> None:
        """A live slot is to be filled before its sequence computes."""
        target = self._address(sequence)
        self._copies.add(sequence.driver_id, source, target, pin, self._pin(sequence))

    def _pin(self, sequence: Sequence) -> Blocks:
        """Keeps what its live state lies in from being handed out again."""
        slot, row = sequence.linear_state_slot, sequence.single_block_id
        assert slot is not None, "it holds a live slot"
        assert row is not None, "it holds a row"
        if self.promotes:
            return self.cache.slots.pin_one(slot)
        return self._singles.pin_one(row)

    def _address(self, sequence: Sequence) -> int:
        slot, row = sequence.linear_state_slot, sequence.single_block_id
        assert slot is not None, "it holds a live slot"
        assert row is not None, "it holds a row"
        return slot if self.buffers is None else self.buffers.live_address(slot, row)

    def _plan_of(self, sequence: Sequence) -> StatePlan:
        assert sequence.single_block_id is not None, "it holds a row"
        return self._plans[sequence.single_block_id]
