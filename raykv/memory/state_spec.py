"""What a sequence keeps in layers of linear attention, and where it lies within a state.

A state is one run of bytes: tensor after tensor, over all layers, each at a multiple of 64 bytes.
The tensors that checkpoints may compress lie before the others, so that they are converted in one
stretch; in both parts they keep the order of the layers.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import get_args

from raykv.errors import ConfigError
from raykv.memory.shapes import check_layer, check_tensor
from raykv.memory.spec import ITEMSIZES, KVDtype, storage_dtype

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load of any CPU we run on


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of ``ALIGNMENT_BYTES``."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class StateTensor:
    """What one sequence keeps in a layer under one name, whatever its length.

    Args:
        name: The tensor's name within its layer, such as ``"recurrent"``.
        shape: Elements of one sequence, such as ``(num_heads, key_dim, value_dim)``; at least one
            dimension.
        dtype: Element type of the live state.
        compressible: Whether checkpoints may keep it in fewer bits; float32 tensors only.

    Raises:
        ConfigError: The name is empty, the shape is no tuple of positive whole numbers, the dtype
            is none of the three, or a compressible tensor is not float32.
    """

    name: str
    shape: tuple[int, ...]
    dtype: KVDtype
    compressible: bool = False

    def __post_init__(self) -> None:
        example = ("recurrent", "(num_heads, key_dim, value_dim)")
        check_tensor(self.name, self.shape, example=example)
        if self.dtype not in get_args(KVDtype):
            raise ConfigError(
                f"tensor {self.name!r} has dtype {self.dtype!r}:"
                f" choose one of {', '.join(get_args(KVDtype))}"
            )
        if self.compressible and self.dtype != "float32":
            raise ConfigError(
                f"tensor {self.name!r} is {self.dtype} and compressible, but only float32 is"
                " compressed: leave compressible out"
            )

    @property
    def elements(self) -> int:
        """Elements that one sequence keeps."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that one sequence keeps."""
        return self.elements * ITEMSIZES[self.dtype]

    @property
    def storage_dtype(self) -> str:
        """NumPy name of the stored elements: ``uint16`` bit patterns stand in for bfloat16."""
        return storage_dtype(self.dtype)


@dataclass(frozen=True)
class StateSpec:
    """The layout of a live state; hashable and picklable, as ``KVSpec``.

    Args:
        layers: The tensors of each layer of the model, in any order; ``()`` for a layer that keeps
            no state, such as attention, so that layer numbers stay those of the model.

    Raises:
        ConfigError: The layers are no tuple of tuples, two tensors of a layer share a name, or no
            layer keeps anything.
    """

    layers: tuple[tuple[StateTensor, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple):
            raise ConfigError(f"layers is {self.layers!r}, not a tuple: wrap it in tuple(...)")
        for number, tensors in enumerate(self.layers):
            check_layer(tensors, f"layer {number}")
        if not any(self.layers):
            raise ConfigError(
                f"none of the {len(self.layers)} layers keeps a state, so there is none to hold:"
                " give at least one layer with tensors, or no StateSpec at all"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers, including those that keep no state."""
        return len(self.layers)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes that one live state takes in memory, the gaps of the alignment included."""
        return aligned(max(offset + tensor.nbytes for offset, tensor in self.tensors))

    @cached_property
    def tensors(self) -> tuple[tuple[int, StateTensor], ...]:
        """All tensors in the order in which they lie, each after its first byte."""
        return tuple(sorted(self._places.values(), key=lambda place: place[0]))

    def locate(self, layer: int, name: str) -> tuple[int, StateTensor]:
        """Find one tensor of one layer.

        Returns:
            Its first byte within a live state, and its spec.

        Raises:
            ValueError: There is no such layer, or it has no tensor of that name.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        try:
            return self._places[layer, name]
        except KeyError:
            names = [tensor.name for tensor in self.layers[layer]]
            raise ValueError(f"layer {layer} has no tensor {name!r}, only {names}") from None

    @cached_property
    def _places(self) -> dict[tuple[int, str], tuple[int, StateTensor]]:
        places: dict[tuple[int, str], tuple[int, StateTensor]] = {}
        position = 0
        for compressible in (True, False):
            for layer, tensors in enumerate(self.layers):
                for tensor in tensors:
                    if tensor.compressible == compressible:
                        places[layer, tensor.name] = (position, tensor)
                        position = aligned(position + tensor.nbytes)
        return places
