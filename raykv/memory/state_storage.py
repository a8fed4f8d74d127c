"""How checkpoints of states are stored: as they are, or their float32 tensors in fewer bits.

Compressing loses precision, so it is asked for, never taken for granted. What it never does is turn
a broken state into a sound one: what holds an infinity or NaN comes back broken.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from raykv.errors import ConfigError
from raykv.memory.state_spec import StateSpec, aligned

CheckpointDtype = Literal["float32", "bfloat16", "int8"]

# Elements that the CPU converts at a time: the passes over them find them in its cache. Of 2**13 to
# 2**18, the last was the fastest: about twice the first.
_CPU_ELEMENTS = 1 << 18
# Scales lie between these: what is divided by them stays finite, and so do 127 of them.
_SMALLEST_SCALE = float(np.finfo(np.float32).smallest_normal)
_LARGEST_SCALE = float(np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0)))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Compressible tensors that lie without gap and have equally long last axes, as one matrix.

    Attributes:
        num_rows: Rows of all these tensors.
        row: Elements of a row.
        live: First byte within a live state.
        stored: First byte within a stored one.
        scales: First byte of the rows' scales within a stored one; int8 only.
    """

    num_rows: int
    row: int
    live: int
    stored: int
    scales: int


class CheckpointFormat:
    """Turns live states into what a checkpoint stores, and back.

    Both are rows of bytes, one per state. What is not compressible is carried as it is.

    Attributes:
        dtype: What compressible tensors are stored as.
        live_bytes: Bytes of a live state.
        stored_bytes: Bytes of a stored one, alignment included.

    Args:
        spec: The layout of a live state.
        dtype: ``"float32"`` keeps every bit. ``"bfloat16"`` rounds to the nearest, ties to even;
            infinities and NaNs stay such. ``"int8"`` keeps a row along the last axis as whole
            numbers of one float32 scale, the row's largest magnitude by 127, and so is off by at
            most half the scale; a row that holds an infinity or NaN comes back as NaNs.
        xp: The array module of the states.

    Raises:
        ConfigError: The dtype is none of the three.
    """

    def __init__(self, spec: StateSpec, dtype: CheckpointDtype, xp: Any) -> None:
        if dtype not in get_args(CheckpointDtype):
            choices = ", ".join(get_args(CheckpointDtype))
            raise ConfigError(f"checkpoint_dtype is {dtype!r}: choose one of {choices}")
        self.dtype: CheckpointDtype = dtype
        self.live_bytes = spec.slot_bytes
        self._xp = xp
        # What is carried as it is begins at these bytes, in a live state and in a stored one.
        self._rest = self._stored_rest = 0
        self._stretches: list[_Stretch] = []
        if dtype != "float32":
            compressible = [tensor for _, tensor in spec.tensors if tensor.compressible]
            shapes = [(tensor.elements, tensor.shape[-1]) for tensor in compressible]
            self._rest = sum(aligned(tensor.nbytes) for tensor in compressible)
            self._stretches, self._stored_rest = _lay_out(shapes, dtype)
        self.stored_bytes = self._stored_rest + self.live_bytes - self._rest

    def compress(self, live: Any, stored: Any) -> None:
        """Store live states.

        Args:
            live: Contiguous uint8 array ``[n, live_bytes]``; read.
            stored: Contiguous uint8 array ``[n, stored_bytes]`` that lies elsewhere; written, but
                for the gaps of the alignment.
        """
        for values, numbers, scales in self._pieces(live, stored):
            if scales is None:
                _round_to_bfloat16(self._xp, values, numbers)
            else:
                _round_to_int8(self._xp, values, numbers, scales)
        stored[:, self._stored_rest :] = live[:, self._rest :]

    def decompress(self, stored: Any, live: Any) -> None:
        """Make live states of stored ones; the arguments are those of ``compress``."""
        for values, numbers, scales in self._pieces(live, stored):
            if scales is None:
                bits = values.view(np.uint32)
                bits[...] = numbers
                bits <<= 16
            else:
                self._xp.multiply(numbers, scales, out=values)
        live[:, self._rest :] = stored[:, self._stored_rest :]

    def _pieces(self, live: Any, stored: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yield views of what belongs together: values, their compressed form, scales if any.

        float32 ``[n, rows, row]``, uint16 or int8 of the same shape, float32 ``[n, rows, 1]``.
        """
        on_cpu = self._xp is np
        as_bfloat16 = self.dtype == "bfloat16"
        for part in self._stretches:
            shape = (len(live), part.num_rows, part.row)
            values = _matrix(live, "float32", part.live, shape)
            numbers = _matrix(stored, "uint16" if as_bfloat16 else "int8", part.stored, shape)
            scales = None
            if not as_bfloat16:
                scales = _matrix(stored, "float32", part.scales, (*shape[:2], 1))
            step = max(1, _CPU_ELEMENTS // part.row) if on_cpu else part.num_rows
            for start in range(0, part.num_rows, step):
                rows = np.s_[:, start : start + step]
                yield values[rows], numbers[rows], None if scales is None else scales[rows]


def _lay_out(shapes: list[tuple[int, int]], dtype: CheckpointDtype) -> tuple[list[_Stretch], int]:
    """Lay out the compressed part of a stored state, and say where it ends.

    Args:
        shapes: Elements of each compressible tensor and of its last axis, in the order in which
            they lie in a live state.
        dtype: ``"bfloat16"`` or ``"int8"``.
    """
    merged: list[tuple[int, int, int]] = []  # elements, row, first byte
    live = 0
    for elements, row in shapes:
        if merged and merged[-1][1] == row and merged[-1][0] * 4 + merged[-1][2] == live:
            merged[-1] = (merged[-1][0] + elements, row, merged[-1][2])
        else:
            merged.append((elements, row, live))
        live = aligned(live + 4 * elements)
    stretches: list[_Stretch] = []
    stored = 0
    for elements, row, first in merged:
        num_rows = elements // row
        scales = aligned(stored + elements * (2 if dtype == "bfloat16" else 1))
        stretches.append(_Stretch(num_rows, row, first, stored, scales))
        stored = scales if dtype == "bfloat16" else aligned(scales + 4 * num_rows)
    return stretches, stored


def _matrix(states: Any, dtype: str, first_byte: int, shape: tuple[int, int, int]) -> Any:
    """View part of each state as a matrix of another dtype, without copying."""
    itemsize = np.dtype(dtype).itemsize
    first = first_byte // itemsize
    # The view comes before the slice: only then are the states contiguous, as CuPy's views want.
    return states.view(dtype)[:, first : first + shape[1] * shape[2]].reshape(shape)


def _round_to_bfloat16(xp: Any, values: Any, numbers: Any) -> None:
    """Round float32 to the nearest bfloat16, ties to even; the bits go to ``numbers``."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    broken = xp.isnan(values)
    if xp is not np or broken.any():  # on CUDA, asking would wait for the device
        # Rounding may carry a NaN over into an infinity or a zero: it is cut off and stays quiet.
        rounded = xp.where(broken, bits >> 16 | 0x40, rounded)
    numbers[...] = rounded


def _round_to_int8(xp: Any, values: Any, numbers: Any, scales: Any) -> None:
    """Round float32 rows to multiples of one scale each.

    A row of magnitudes too small for a normal scale gets the smallest normal one, so that nothing
    is divided by 0 and the error stays below half the scale. A row that holds an infinity or NaN
    gets the scale NaN, and so comes back as NaNs.
    """
    largest = xp.abs(values).max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinities by 0 and NaNs as whole numbers: see above
        scale = xp.minimum(xp.maximum(largest / 127, _SMALLEST_SCALE), _LARGEST_SCALE)
        scales[...] = scale + largest * 0
        numbers[...] = xp.rint(values / scales)
