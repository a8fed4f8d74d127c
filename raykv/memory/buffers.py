"""The KV memory of one rank: one array of blocks, and views of it for attention."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.errors import ConfigError
from raykv.memory.ids import Ids, checked_ids
from raykv.memory.room import allocate_zeros, give_back_unused
from raykv.memory.spec import KVSpec
from raykv.memory.xp import (
    Device,
    DeviceChoice,
    array_module,
    as_torch,
    record_event,
    resolve_device,
)


class KVBuffers:
    """Block-major KV memory: all of a block's bytes, over all layers, lie together.

    So moving a block between tiers is one contiguous copy. For a uniform attention model the
    storage is ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]``. Block 0 is the
    padding block: attention may read it, and copies never write it.

    The memory starts as zeros. Attention reads whole blocks and gives unwritten slots the weight
    zero, but zero times an uninitialised NaN is NaN and would poison the result. On the CPU the
    kernel hands out zero pages on first touch, so zeroing costs no time here.

    On CUDA, work runs on CuPy's current stream, and a torch view is ordered after it only when
    the view is made. Whoever uses other streams later orders them with events.

    Attributes:
        spec: The layout of a block.
        num_blocks: Blocks, with the padding block.
        device: Where the memory lies.
        xp: The array module, ``numpy`` or ``cupy``.
        storage: Contiguous array ``[num_blocks, block_elements]`` of ``spec.storage_dtype``; of no
            blocks while the memory is released.

    Args:
        spec: The layout of a block.
        num_blocks: Blocks to hold; at least 2, as block 0 is padding.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: The device is not usable, the number of blocks is too small, or the memory
            does not fit. On the CPU the check is against the memory available now; pages that
            other processes have reserved without touching them do not count.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, *, device: DeviceChoice = "auto") -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks is {num_blocks}, but block 0 is padding: give at least 2"
            )
        self.spec = spec
        self.num_blocks = num_blocks
        self.device: Device = resolve_device(device)
        self.xp = array_module(self.device)
        self.storage: Any = None
        self._allocate()

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return int(self.storage.nbytes)

    @property
    def is_released(self) -> bool:
        """Whether there is no memory now; see ``release``."""
        return len(self.storage) < self.num_blocks

    def release(self) -> None:
        """Let go of the memory, what lies in it included; idempotent.

        It goes back to the system with the last view of it.
        """
        self.storage = self.xp.empty((0, self.spec.block_elements), dtype=self.spec.storage_dtype)
        give_back_unused(self.device)

    def restore(self) -> None:
        """Take memory again after ``release``; it starts as zeros. Idempotent.

        Raises:
            ConfigError: It does not fit any more.
        """
        if self.is_released:
            self._allocate()

    def record_event(self) -> Any:
        """On CUDA, an event behind all work on the current stream so far; None on the CPU."""
        return record_event(self.xp)

    def view(self, layer: int, name: str) -> Any:
        """Return one tensor of one layer over all blocks, without copying.

        Returns:
            Strided array ``[num_blocks, block_size, *shape]`` of ``spec.storage_dtype``: bfloat16
            appears as ``uint16`` bit patterns. Writes go to the storage.

        Raises:
            ValueError: There is no such layer or tensor, or the memory is released.
        """
        offset, tensor = self.spec.locate(layer, name)
        if self.is_released:
            raise ValueError("the KV memory is released: call restore() (or wake_up()) first")
        elements = tensor.token_elements * self.spec.block_size
        rows = self.storage[:, offset : offset + elements]
        return rows.reshape(self.num_blocks, self.spec.block_size, *tensor.shape)

    def torch_view(self, layer: int, name: str) -> Any:
        """Return the same memory as a torch tensor, without copying.

        Returns:
            Strided tensor ``[num_blocks, block_size, *shape]`` of the spec's real dtype, on the
            CPU or the CUDA device. It keeps the storage alive.

        Raises:
            ValueError: There is no such layer or tensor.
            ImportError: torch is not installed.
        """
        return as_torch(self.view(layer, name), self.spec.dtype, self.device)

    def read_slots(self, layer: int, name: str, slot_ids: Ids) -> NDArray[Any]:
        """Copy tokens to the host, such as those of a sequence, in the order asked for.

        Args:
            layer: Number of the layer.
            name: Name of the tensor.
            slot_ids: Slots, ``block_id * block_size + offset``, on the host; may repeat.

        Returns:
            Array ``[len(slot_ids), *shape]``; bfloat16 is widened to float32, which is exact.

        Raises:
            ValueError: There is no such layer, tensor or slot.
        """
        slots = checked_ids(slot_ids, self.num_blocks * self.spec.block_size, "slot_ids")
        blocks, offsets = np.divmod(slots, self.spec.block_size)
        tokens = self.view(layer, name)[self.xp.asarray(blocks), self.xp.asarray(offsets)]
        if self.device == "cuda":
            tokens = self.xp.asnumpy(tokens)
        if self.spec.dtype == "bfloat16":
            tokens = (tokens.astype(np.uint32) << 16).view(np.float32)
        values: NDArray[Any] = tokens
        return values

    def _allocate(self) -> None:
        (self.storage,) = allocate_zeros(
            [((self.num_blocks, self.spec.block_elements), self.spec.storage_dtype)],
            self.device,
            what=f"{self.num_blocks} blocks of {self.spec.block_bytes} bytes",
            remedy="ask for fewer blocks, use a smaller dtype, or free memory",
        )
