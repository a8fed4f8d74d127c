"""Taking memory: what is there is looked up before anything is allocated."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raykv.errors import ConfigError
from raykv.memory.cgroup import cgroup_room_bytes
from raykv.memory.xp import Device, array_module

_MEMINFO = Path("/proc/meminfo")
_GIB = 1 << 30
_PAGE_BYTES = 4096


def allocate_zeros(
    arrays: Sequence[tuple[tuple[int, int], str]], device: Device, *, what: str, remedy: str
) -> list[Any]:
    """Allocate arrays of zeros on a device: all of them, or none.

    On the CPU the check is against the memory available now; pages that are reserved but not
    touched yet, in this process or others, do not count.

    Args:
        arrays: The shape and the NumPy dtype name of each.
        device: Where they shall lie.
        what: What needs the memory, numbers included, for messages; a plural.
        remedy: What to do when there is too little, for messages.

    Returns:
        The arrays, contiguous, on a page's boundary.

    Raises:
        ConfigError: They do not fit.
    """
    xp = array_module(device)
    needed = sum(rows * row * np.dtype(dtype).itemsize for (rows, row), dtype in arrays)
    need = f"{what} need {needed / _GIB:.2f} GiB on {device}"
    if device == "cuda":
        # What CuPy keeps from a closed pool is free to us, though the driver counts it as used.
        xp.get_default_memory_pool().free_all_blocks()
        available: int | None = xp.cuda.runtime.memGetInfo()[0]
    else:
        available = available_bytes()
    if available is not None and needed > available:
        raise ConfigError(f"{need}, but {available / _GIB:.2f} GiB are available: {remedy}")
    try:
        if device == "cpu":
            return [_aligned_zeros(shape, dtype) for shape, dtype in arrays]
        return [xp.zeros(shape, dtype=dtype) for shape, dtype in arrays]
    except MemoryError as error:  # CuPy's out-of-memory error derives from it
        raise ConfigError(f"{need}, but allocation failed: {error}: {remedy}") from None


def give_back_unused(device: Device) -> None:
    """Let the system have what the device's allocator keeps of freed arrays."""
    if device == "cuda":
        array_module(device).get_default_memory_pool().free_all_blocks()


def available_bytes() -> int | None:
    """Memory that a new allocation can use without swapping and within a container's limit.

    None where Linux says neither.
    """
    rooms = [room for room in (_machine_room_bytes(), cgroup_room_bytes()) if room is not None]
    return min(rooms, default=None)


def _aligned_zeros(shape: tuple[int, int], dtype: str) -> Any:
    """An array on a page's boundary. NumPy itself starts large ones 16 bytes behind one.

    On an AMD EPYC, memory copies from page to page + 16 ran at a quarter of the speed of others,
    for blocks of up to 360 KiB: loads from the host slab were such copies.
    """
    num_bytes = shape[0] * shape[1] * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + _PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % _PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _machine_room_bytes() -> int | None:
    try:
        text = _MEMINFO.read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
