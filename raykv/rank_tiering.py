"""What a rank's KV has to do with its node's host tier."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from raykv.config import PoolConfig
from raykv.core.block_manager import BlockManagerImpl
from raykv.core.explain import MissReason, MissReport
from raykv.core.kv_cache_manager import KVCacheManager
from raykv.core.rows import Rows
from raykv.core.sequence import Sequence
from raykv.errors import ConfigError
from raykv.host.handle import TierHandle
from raykv.host.messages import BlockKind
from raykv.memory.buffers import KVBuffers
from raykv.rank_states import RankStates
from raykv.store import layout_name
from raykv.tiering.link import TierLink
from raykv.tiering.loads import Load, LoadEnd
from raykv.tiering.rank_tier import RankTier
from raykv.tiering.state_tiers import StateTiers
from raykv.transfer_report import TransferReport

ENGINE = "engine"  # whose sequences are the engine's; drivers have other names


class RankTiering(KVCacheManager):
    """The host tier's part of a RankKV.

    Attributes:
        tier: the rank's traffic with the tier; None without one.
        weights_name: what names the weights in a store; None where nothing does.
    """

    config: PoolConfig
    block_size: int
    block_manager: BlockManagerImpl
    buffers: KVBuffers | None
    states: RankStates | None
    tier: RankTier | None = None
    weights_name: bytes | None = None
    _rows: Rows
    _host_hits: dict[int, LoadEnd]  # by row
    _ended: dict[str, list[LoadEnd]]  # by driver, until it asks
    _reported: Counter[str]
    _num_host_hit: int = 0

    def connect_tier(
        self,
        handle: TierHandle,
        *,
        is_back: bool = False,
        wake: Callable[[], None] = lambda: None,
        prefill_rate: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Use a host tier from now on; the one that it uses already, the rank keeps.

        Args:
            handle: of the node's.
            is_back: the rank served with it before; if the tier does not answer now, the rank goes
                on without and joins later, in place of the errors below.
            wake: called from other threads when ``pump_tier`` has something to do.
            prefill_rate: tokens per second that the rank computes; 0 if that is not known.

        Raises:
            ConfigError: the configuration has no host tier, or its memory cannot be had.
            RankUnavailableError: the tier is not there.
        """
        config, buffers = self.config.host, self.buffers
        if config is None or buffers is None:
            raise ConfigError("this rank was configured without host memory: give host.num_blocks")
        if self.tier is not None and self.tier.link.handle is handle:
            return
        self.close_tier()
        spec, states = buffers.spec, self.states
        state_buffers = None if states is None else states.buffers
        checkpoint_bytes = 0 if state_buffers is None else state_buffers.checkpoint_bytes
        blocks = BlockKind(spec.block_bytes, layout_name(spec), self.weights_name, checkpoint_bytes)
        link = TierLink(handle, config, blocks, xp=buffers.xp, wake=wake)
        link.connect(is_back=is_back)
        patience_s = [0.0]
        if self.config.store is not None:
            patience_s.append(self.config.store.prefetch_timeout_s)
        if config.peers:
            patience_s.append(config.timeout_s)
        self._ended, self._reported = {}, Counter()
        self.tier = RankTier(
            self.block_manager,
            buffers,
            link,
            None
            if states is None or state_buffers is None
            else (StateTiers(states, self.block_manager), state_buffers),
            prefill_rate=prefill_rate,
            patience_s=max(patience_s),
        )

    def pump_tier(self, driver_id: str | None = None) -> list[Sequence]:
        """Move on what is under way to and from the host; waits for nothing.

        What loads have brought counts as computed and can be shared.

        Args:
            driver_id: who calls: loads of its sequences are started, then offloads of all; None
                starts nothing. Others' loads are not, for their drivers may be computing already.

        Returns:
            Sequences of this driver that wait for a late load, and without the memory to go on
            without.
        """
        if self.tier is None:
            return []
        late = [] if driver_id is None else self.tier.late(driver_id)
        stuck = [one.sequence for one in late if one.sequence is not None and not self._leave(one)]
        self.tier.pump(driver_id)
        self._take_ended()
        if self.tier.link.is_outdated:
            self.reset_prefix_cache()
            self.begin_epoch(self.tier.link.heard_epoch)
        return [sequence for sequence in stuck if sequence.is_loading]  # some came just now

    def transfer(self, driver_id: str) -> TransferReport:
        """Start what is queued, and say what ended since the call before; see TransferReport."""
        self.pump_tier(driver_id)
        if self.tier is None:
            return TransferReport()
        before, totals = self._reported, self.tier.totals
        self._reported = Counter(totals)
        ended = self._ended.pop(driver_id, [])
        size = self.block_size
        return TransferReport(
            totals["loads_started"] - before["loads_started"],
            totals["offloads_started"] - before["offloads_started"],
            totals["loaded"] - before["loaded"],
            totals["offloaded"] - before["offloaded"],
            {end.sequence.seq_id: end.num_blocks * size for end in ended},
            {end.sequence.seq_id: end.reason for end in ended if end.reason},
            self.tier.num_loading_of(driver_id),
            self.tier.num_offloading_blocks,
        )

    def begin_epoch(self, epoch: int) -> None:
        """The host tier was reset, and so was this rank: they may share from now on."""
        if self.tier is not None:
            self.tier.begin_epoch(epoch)

    def forget_ended(self, driver_id: str) -> None:
        """A driver does not ask any more."""
        if self.tier is not None:
            self._ended.pop(driver_id, None)

    def close_tier(self) -> None:
        """Leave the host tier; idempotent."""
        if self.tier is not None:
            self.tier.close()
            self._take_ended()
            self.tier = None

    def num_host_blocks(self, row: int) -> int:
        """Blocks of a row that came from the host."""
        end = self._host_hits.get(row)
        return 0 if end is None else end.num_blocks

    def host_report(self, report: MissReport, sequence: Sequence, row: int) -> MissReport:
        """Say what came from the host, and whether something there went wrong."""
        end = self._host_hits.get(row)
        if end is None:
            return report
        report = replace(report, num_host_tokens=end.num_blocks * self.block_size)
        if not end.reason:
            num_left = sequence.kv_state.num_admitted_tokens - report.num_hit_tokens
            # Whether the host has the last block too, nobody has asked.
            is_all = end.num_blocks and num_left == self.block_size
            return replace(report, reason="last_token_kept") if is_all else report
        reason: MissReason = end.reason  # type: ignore[assignment]
        num_hit, num_host = report.num_hit_tokens, report.num_host_tokens
        return MissReport(reason, num_hit, num_hit, num_host_tokens=num_host)

    @abstractmethod
    def _publish(self, sequence: Sequence, row: int, num_tokens: int | None = None) -> None:
        """Let what it computed be found."""

    @abstractmethod
    def allocate_all(self, members: list[Sequence], targets: list[int]) -> bool:
        """Allocate for distinct sequences."""

    @abstractmethod
    def shrink(self, sequence: Sequence, num_blocks: int) -> None:
        """Take back the blocks behind the first ``num_blocks``."""

    def _take_ended(self) -> None:
        assert self.tier is not None, "the caller has looked"
        for end in self.tier.take_ended():
            self._take(end)

    def _take(self, end: LoadEnd) -> None:
        sequence, row = end.sequence, end.sequence.single_block_id
        assert row is not None, "a load is forgotten with its row"
        self._host_hits[row] = end
        if sequence.driver_id != ENGINE:
            self._ended.setdefault(sequence.driver_id, []).append(end)
        if end.num_blocks:
            self._num_host_hit += end.num_blocks * self.block_size
            self._publish(sequence, row)

    def _leave(self, load: Load) -> bool:
        """Let the sequence of a late load go on without it, in other blocks where it may write.

        Returns:
            False if there are none: then it has to wait on, or to give up what it holds.
        """
        sequence = load.sequence
        assert sequence is not None, "it waits"
        assert self.tier is not None, "it has a load"
        if load.num_targets > self.block_manager.num_available_blocks:
            return False
        self.tier.give_up(load)
        if load.num_targets:
            num_blocks = sequence.kv_state.num_blocks
            self.shrink(sequence, load.first_block)  # the targets stay pinned
            num_tokens = min(num_blocks * self.block_size, self.config.max_tokens_per_sequence)
            done = self.allocate_all([sequence], [num_tokens])
            assert done, "as many as are available could not be had"
        return True

    def _tell_tier(self, new: list[Sequence]) -> None:
        """Sequences were admitted."""
        if self.tier is not None:
            for sequence in new:
                self.tier.want(sequence)
            self.tier.talk()
            self._take_ended()

    def _leave_tier(self, sequence: Sequence, row: int, *, offloads: bool) -> None:
        """A sequence is about to give its row back."""
        if self.tier is not None:
            if offloads:
                self.tier.offload(sequence)
            self.tier.forget(row)
            self._host_hits.pop(row, None)
