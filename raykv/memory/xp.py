"""The array module: NumPy, or CuPy where a usable GPU is there.

CuPy is imported when it is first asked for, never with this module, so that raykv works where
CuPy is not installed and where it is installed but finds no GPU.
"""

from typing import Any, Literal

import numpy as np

from raykv.errors import ConfigError

Device = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]


def resolve_device(device: DeviceChoice) -> Device:
    """Turn a wish into the device that memory will lie on; changes nothing.

    Args:
        device: ``"auto"`` takes the current CUDA device if it is usable, else the CPU.

    Returns:
        ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: ``"cuda"`` was asked for and no GPU is usable, or the wish is unknown.
    """
    if device == "cpu":
        return "cpu"
    if device not in {"auto", "cuda"}:
        raise ConfigError(f"memory.device is {device!r}: choose one of auto, cpu, cuda")
    fault = _cuda_fault()
    if fault is None:
        return "cuda"
    if device == "auto":
        return "cpu"
    raise ConfigError(
        f"memory.device is cuda, but {fault}; install the extra that fits the driver"
        " (pip install 'raykv[cuda12]' or 'raykv[cuda13]') on a machine with an NVIDIA GPU,"
        " or set memory.device: cpu"
    )


def array_module(device: Device) -> Any:
    """Return the module whose arrays live on a device.

    Args:
        device: What ``resolve_device`` answered.

    Returns:
        The module ``numpy`` or ``cupy``.

    Raises:
        ConfigError: The device is neither ``"cpu"`` nor ``"cuda"``, or CuPy cannot be imported.
    """
    if device == "cpu":
        return np
    if device != "cuda":
        raise ConfigError(f"device is {device!r}, not cpu or cuda: pass it through resolve_device")
    try:
        import cupy  # noqa: PLC0415 - only processes that use a GPU pay for it
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"CuPy cannot be imported ({error}); install 'raykv[cuda12]' or 'raykv[cuda13]',"
            " or set memory.device: cpu"
        ) from error
    return cupy


def as_torch(array: Any, dtype: str, device: Device) -> Any:
    """Return an array's memory as a torch tensor, without copying.

    Args:
        array: Of the device's array module; bfloat16 as ``uint16`` bit patterns.
        dtype: The real dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        device: Where the array lies.

    Returns:
        A tensor of the same shape and strides. It keeps the memory alive.

    Raises:
        ImportError: torch is not installed.
    """
    import torch  # noqa: PLC0415 - managing and copying memory needs no torch

    if dtype == "bfloat16":
        # Every torch and DLPack version knows int16, not every one uint16.
        array = array.view(np.int16)
    tensor = torch.from_numpy(array) if device == "cpu" else torch.from_dlpack(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def record_event(xp: Any) -> Any:
    """On CUDA, an event behind all work on the current stream so far; None on the CPU."""
    if xp is np:
        return None
    event = xp.cuda.Event(disable_timing=True)
    event.record(xp.cuda.get_current_stream())
    return event


def _cuda_fault() -> str | None:
    """Say why CUDA is unusable, or None if it works."""
    try:
        import cupy  # noqa: PLC0415 - only processes that may use a GPU pay for it

        if not cupy.cuda.is_available():
            return "CuPy finds no CUDA device or driver"
        # A driver that is too old, or a GPU held by others, shows only when memory is touched.
        cupy.zeros(1, dtype=np.uint8).get()
    except ModuleNotFoundError as error:
        return f"CuPy is not installed ({error})"
    except (ImportError, OSError, AttributeError) as error:
        return f"the installed CuPy cannot be loaded ({error})"
    except (RuntimeError, MemoryError) as error:
        # CuPy's CUDA errors derive from RuntimeError, its out-of-memory error from MemoryError.
        return f"a first allocation on the CUDA device failed ({error})"
    return None
