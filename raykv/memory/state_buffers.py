"""The memory of one rank for states of linear attention: live ones and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.errors import ConfigError
from raykv.memory.ids import Ids, checked_ids, checked_targets
from raykv.memory.room import allocate_zeros, give_back_unused
from raykv.memory.rows import copy_rows, read_rows, rows_per_piece, write_rows
from raykv.memory.state_spec import StateSpec
from raykv.memory.state_storage import CheckpointDtype, CheckpointFormat
from raykv.memory.xp import (
    Device,
    DeviceChoice,
    array_module,
    as_torch,
    record_event,
    resolve_device,
)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Pairs of a batch that lie in the same two arrays, so that one way of copying does for all.

    Attributes:
        source: Array ``[n, bytes]``.
        source_rows: Rows to read.
        target: Array ``[n, bytes]``, maybe the same.
        target_rows: Rows to overwrite, as many.
        convert: Called with states of the source and memory for those of the target; None if the
            bits are the same.
    """

    source: Any
    source_rows: NDArray[np.int64]
    target: Any
    target_rows: NDArray[np.int64]
    convert: Callable[[Any, Any], None] | None

    def piece(self, rows: slice) -> _Transfer:
        """Some of the pairs."""
        return replace(self, source_rows=self.source_rows[rows], target_rows=self.target_rows[rows])


class StateBuffers:
    """Slots of states, and live states beside them, in one space of addresses.

    Addresses in ``[0, num_slots)`` are slots. With ``checkpoint_dtype`` float32, live states lie in
    slots too, so that a live state becomes a checkpoint where it lies. With another, slots hold
    compressed checkpoints alone, and live states lie in full precision at the addresses
    ``num_slots + row``. Slot 0 and row 0 are padding: they may be read, and copies never write
    them, so that they stay zeros and copying from one clears a state.

    All bytes of an address lie together, so that a state moves between tiers as one copy. The
    memory starts as zeros. On CUDA, work runs on CuPy's current stream, as with ``KVBuffers``.

    Attributes:
        spec: The layout of a live state.
        num_slots: Slots, with the padding slot.
        num_rows: Live states that lie apart from the slots, with the padding row; 0 where they lie
            in slots.
        checkpoint_dtype: How compressible tensors of checkpoints are stored.
        device: Where the memory lies.
        xp: The array module, ``numpy`` or ``cupy``.
        live_base: Address of the first row of views: 0, or ``num_slots``.
        slots: Contiguous uint8 array ``[num_slots, checkpoint_bytes]``; of no rows while the
            memory is released.
        live: Contiguous uint8 array of the live states, ``[num_slots or num_rows, live_bytes]``;
            with float32 the same array as ``slots``.

    Args:
        spec: The layout of a live state.
        num_slots: Slots to hold; at least 2, as slot 0 is padding.
        num_rows: Live states to hold apart from the slots; at least 2, as row 0 is padding.
            Ignored with float32.
        checkpoint_dtype: ``"float32"``, ``"bfloat16"`` or ``"int8"``; see ``CheckpointFormat``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: The device is not usable, a number is too small, the dtype is unknown, or the
            memory does not fit; see ``KVBuffers``.
    """

    def __init__(
        self,
        spec: StateSpec,
        num_slots: int,
        *,
        num_rows: int = 0,
        checkpoint_dtype: CheckpointDtype = "float32",
        device: DeviceChoice = "auto",
    ) -> None:
        if num_slots < 2:
            raise ConfigError(f"num_slots is {num_slots}, but slot 0 is padding: give at least 2")
        self.device: Device = resolve_device(device)
        self.xp = array_module(self.device)
        self._format = CheckpointFormat(spec, checkpoint_dtype, self.xp)
        self._is_split = checkpoint_dtype != "float32"
        if self._is_split and num_rows < 2:
            raise ConfigError(
                f"num_rows is {num_rows}, but with checkpoint_dtype {checkpoint_dtype} live states"
                " lie in rows, and row 0 is padding: give at least 2"
            )
        self.spec = spec
        self.num_slots = num_slots
        self.num_rows = num_rows if self._is_split else 0
        self.checkpoint_dtype: CheckpointDtype = checkpoint_dtype
        self.live_base = num_slots if self._is_split else 0
        self.slots: Any = None
        self.live: Any = None
        self._allocate()

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint as stored."""
        return self._format.stored_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of one live state."""
        return self._format.live_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and live states; 0 while the memory is released."""
        return int(self.slots.nbytes) + (int(self.live.nbytes) if self._is_split else 0)

    @property
    def is_released(self) -> bool:
        """Whether there is no memory now; see ``release``."""
        return len(self.slots) < self.num_slots

    def record_event(self) -> Any:
        """See ``KVBuffers.record_event``."""
        return record_event(self.xp)

    def release(self) -> None:
        """Let go of the memory, what lies in it included; idempotent.

        It goes back to the system with the last view of it.
        """
        self.slots = self.xp.empty((0, self.checkpoint_bytes), dtype="uint8")
        self.live = (
            self.xp.empty((0, self.live_bytes), dtype="uint8") if self._is_split else self.slots
        )
        give_back_unused(self.device)

    def restore(self) -> None:
        """Take memory again after ``release``; it starts as zeros. Idempotent.

        Raises:
            ConfigError: It does not fit any more.
        """
        if self.is_released:
            self._allocate()

    def live_address(self, slot: int, row: int) -> int:
        """Address of the live state of a sequence that holds this slot and this row."""
        return self.num_slots + row if self._is_split else slot

    def view(self, layer: int, name: str) -> Any:
        """Return one tensor of one layer over all live states, without copying.

        Row ``i`` is that of address ``live_base + i``.

        Returns:
            Strided array ``[num_slots or num_rows, *shape]`` of the tensor's storage dtype:
            bfloat16 appears as ``uint16`` bit patterns. Writes go to the memory.

        Raises:
            ValueError: There is no such layer or tensor, or the memory is released.
        """
        offset, tensor = self.spec.locate(layer, name)
        self._check_not_released()
        # The view comes before the slice: only then is the array contiguous, as CuPy wants it.
        elements = self.live.view(tensor.storage_dtype)
        first = offset // elements.itemsize
        rows = elements[:, first : first + tensor.elements]
        return rows.reshape(len(self.live), *tensor.shape)

    def torch_view(self, layer: int, name: str) -> Any:
        """Return the same memory as a torch tensor of the real dtype, without copying.

        It keeps the memory alive.

        Raises:
            ValueError: There is no such layer or tensor, or the memory is released.
            ImportError: torch is not installed.
        """
        array = self.view(layer, name)
        return as_torch(array, self.spec.locate(layer, name)[1].dtype, self.device)

    def copy(self, sources: Ids, targets: Ids) -> None:
        """Copy states, that at address ``sources[i]`` to address ``targets[i]``.

        All sources are read before any target is written, whatever the order of the pairs, so
        chains and swaps do what they say. From a live state to a slot it is compressed, from a slot
        to a live state decompressed, else copied bit by bit. On CUDA the call does not wait for the
        copies.

        Args:
            sources: Addresses to read; may repeat, may be padding.
            targets: Addresses to overwrite; all different, never padding.

        Raises:
            ValueError: An address is out of range, the lengths differ, a target is padding or
                repeated, or the memory is released. Nothing was written.
            MemoryError: There is no room for scratch memory, which holds the sources that are
                targets too, and on CUDA besides a piece of at most 256 MiB or one state, as read
                and as written. Some targets may have been written.
        """
        num_addresses = self.num_slots + self.num_rows
        padding = (0, self.num_slots) if self._is_split else (0,)
        src = checked_ids(sources, num_addresses, "sources")
        dst = checked_targets(targets, num_addresses, "targets", padding=padding, unit="address")
        if src.size != dst.size:
            raise ValueError(f"{src.size} sources do not pair with {dst.size} targets")
        self._check_not_released()
        moves = src != dst
        src, dst = src[moves], dst[moves]
        # What the batch itself overwrites is read first; all else may be read at any time.
        first = np.isin(src, dst)
        early = [(each, self._staged(each)) for each in self._transfers(src[first], dst[first])]
        for each in self._transfers(src[~first], dst[~first]):
            self._copy_apart(each)
        for each, states in early:
            write_rows(self.xp, each.target, each.target_rows, states)

    # -- inside ---------------------------------------------------------------------------------

    def _transfers(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> list[_Transfer]:
        """Sort pairs of addresses by what is to be done with them."""
        from_live, to_live = (src >= self.num_slots), (dst >= self.num_slots)
        transfers = []
        for source_is_live in (False, True):
            for target_is_live in (False, True):
                chosen = (from_live == source_is_live) & (to_live == target_is_live)
                if not chosen.any():
                    continue
                convert = self._format.decompress if target_is_live else self._format.compress
                transfers.append(
                    _Transfer(
                        source=self.live if source_is_live else self.slots,
                        source_rows=src[chosen] - self.num_slots * source_is_live,
                        target=self.live if target_is_live else self.slots,
                        target_rows=dst[chosen] - self.num_slots * target_is_live,
                        convert=None if source_is_live == target_is_live else convert,
                    )
                )
        return transfers

    def _staged(self, transfer: _Transfer) -> Any:
        """What is to be written, read and converted into new memory."""
        states = read_rows(self.xp, transfer.source, transfer.source_rows)
        if transfer.convert is None:
            return states
        # Zeros, so that the gaps of the alignment stay zeros.
        converted = self.xp.zeros((len(states), transfer.target.shape[1]), dtype="uint8")
        transfer.convert(states, converted)
        return converted

    def _copy_apart(self, transfer: _Transfer) -> None:
        """Copy what reads nothing that the batch writes."""
        source, target = transfer.source, transfer.target
        if transfer.convert is None:
            copy_rows(self.xp, source, transfer.source_rows, transfer.target_rows)
        elif self.device == "cpu":
            for row, to in zip(
                transfer.source_rows.tolist(), transfer.target_rows.tolist(), strict=True
            ):
                transfer.convert(source[row : row + 1], target[to : to + 1])
        else:
            step = min(rows_per_piece(source), rows_per_piece(target))
            for start in range(0, transfer.source_rows.size, step):
                piece = transfer.piece(slice(start, start + step))
                write_rows(self.xp, target, piece.target_rows, self._staged(piece))

    def _check_not_released(self) -> None:
        if self.is_released:
            raise ValueError("the state memory is released: call restore() (or wake_up()) first")

    def _allocate(self) -> None:
        what = f"{self.num_slots} slots of {self.checkpoint_bytes} bytes"
        shapes = [((self.num_slots, self.checkpoint_bytes), "uint8")]
        if self._is_split:
            what += f" and {self.num_rows} live states of {self.live_bytes} bytes"
            shapes.append(((self.num_rows, self.live_bytes), "uint8"))
        remedy = "ask for fewer slots, use a smaller checkpoint_dtype, or free memory"
        arrays = allocate_zeros(shapes, self.device, what=what, remedy=remedy)
        self.slots, self.live = arrays[0], arrays[-1]
