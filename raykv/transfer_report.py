"""What moved between devices and hosts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from raykv.core.kv_cache_manager import Packed


@dataclass(frozen=True, slots=True)
class TransferReport(Packed):
    """What ``transfer_blocks`` started, and what was acknowledged since the call before.

    Attributes:
        num_load_blocks_started: blocks whose copies from the host were started.
        num_offload_blocks_started: blocks whose copies to the host were started.
        num_loaded_blocks: blocks that came from the host since.
        num_offloaded_blocks: blocks that were copied to the host since.
        loaded: of this driver's sequences whose loads are over, the tokens that came, by seq_id;
            they count as computed now. Also where none came.
        missed: why no more came, of those where something went wrong: a reason of MissReport.
        num_loading: sequences of this driver that wait for a load.
        num_offloading_blocks: device blocks that offloads pin.
    """

    num_load_blocks_started: int = 0
    num_offload_blocks_started: int = 0
    num_loaded_blocks: int = 0
    num_offloaded_blocks: int = 0
    loaded: dict[Hashable, int] = field(default_factory=dict)
    missed: dict[Hashable, str] = field(default_factory=dict)
    num_loading: int = 0
    num_offloading_blocks: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return not (self.num_loading or self.num_offloading_blocks)

    def after(self, earlier: TransferReport) -> TransferReport:
        """This one, with what an earlier one of the same ranks said was started and came."""
        return self._with(earlier, self.num_loading, self.num_offloading_blocks)

    def __add__(self, other: TransferReport) -> TransferReport:
        """The report of other ranks added."""
        return self._with(
            other,
            self.num_loading + other.num_loading,
            self.num_offloading_blocks + other.num_offloading_blocks,
        )

    def _with(self, other: TransferReport, num_loading: int, num_offloading: int) -> TransferReport:
        return TransferReport(
            self.num_load_blocks_started + other.num_load_blocks_started,
            self.num_offload_blocks_started + other.num_offload_blocks_started,
            self.num_loaded_blocks + other.num_loaded_blocks,
            self.num_offloaded_blocks + other.num_offloaded_blocks,
            self.loaded | other.loaded,
            self.missed | other.missed,
            num_loading,
            num_offloading,
        )
