"""Memory of one rank: what a token keeps (`KVSpec`), where it lies (`KVBuffers`), block copies.

What a sequence keeps in layers of linear attention (`StateSpec`) lies in `StateBuffers`.

Importing it needs NumPy alone: CuPy is imported when a CUDA device is asked for, torch when a
torch view is. Nothing here knows which block belongs to whom; that is `raykv.core`.
"""

from raykv.memory.buffers import KVBuffers
from raykv.memory.copies import copy_blocks, gather_blocks, scatter_blocks
from raykv.memory.spec import KVDtype, KVSpec, LayerSpec, TensorSpec
from raykv.memory.state_buffers import StateBuffers
from raykv.memory.state_spec import StateSpec, StateTensor
from raykv.memory.state_storage import CheckpointDtype
from raykv.memory.xp import Device, DeviceChoice, array_module, resolve_device

__all__ = [
    "CheckpointDtype",
    "Device",
    "DeviceChoice",
    "KVBuffers",
    "KVDtype",
    "KVSpec",
    "LayerSpec",
    "StateBuffers",
    "StateSpec",
    "StateTensor",
    "TensorSpec",
    "array_module",
    "copy_blocks",
    "gather_blocks",
    "resolve_device",
    "scatter_blocks",
]
