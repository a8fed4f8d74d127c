"""What one token keeps in each layer, and where it lies within a block.

A block is a flat run of elements: layer after layer, within a layer tensor after tensor, and each
tensor as ``[block_size, *shape]``. Layers may differ, so the spec is per layer.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, get_args

from raykv.errors import ConfigError
from raykv.memory.shapes import check_layer, check_positive, check_tensor

KVDtype = Literal["float32", "float16", "bfloat16"]

ITEMSIZES: dict[KVDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


def storage_dtype(dtype: KVDtype) -> str:
    """NumPy name of stored elements: ``uint16`` bit patterns stand in for bfloat16.

    NumPy and CuPy know no bfloat16; copying needs only the bits.
    """
    return "uint16" if dtype == "bfloat16" else dtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one token keeps in a layer under one name.

    Args:
        name: The tensor's name within its layer, such as ``"k"``.
        shape: Elements of one token, such as ``(num_kv_heads, head_dim)``; at least one dimension.

    Raises:
        ConfigError: The name is empty, or the shape is no tuple of positive whole numbers.
    """

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_tensor(self.name, self.shape, example=("k", "(num_kv_heads, head_dim)"))

    @property
    def token_elements(self) -> int:
        """Elements that one token keeps."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The tensors that one token keeps in one layer, in the order in which they lie in a block.

    An empty tuple stands for a layer that keeps nothing per token, such as linear attention, so
    that layer numbers stay those of the model.

    Raises:
        ConfigError: Two tensors share a name.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        check_layer(self.tensors)

    @classmethod
    def attention(cls, num_kv_heads: int, head_dim: int) -> "LayerSpec":
        """Return the spec of a layer of full, grouped or windowed attention.

        Args:
            num_kv_heads: Heads of keys and values that this rank keeps.
            head_dim: Elements of one head.

        Returns:
            Tensors ``"k"`` and ``"v"``, each ``(num_kv_heads, head_dim)``.

        Raises:
            ConfigError: A size is not a positive whole number.
        """
        check_positive(num_kv_heads, "num_kv_heads")
        check_positive(head_dim, "head_dim")
        shape = (num_kv_heads, head_dim)
        return cls((TensorSpec("k", shape), TensorSpec("v", shape)))

    @classmethod
    def mla(cls, kv_lora_rank: int, rope_dim: int) -> "LayerSpec":
        """Return the spec of a layer of multi-head latent attention.

        Args:
            kv_lora_rank: Elements of the compressed keys and values.
            rope_dim: Elements of the rotated key that all heads share.

        Returns:
            Tensors ``"latent"`` ``(kv_lora_rank,)`` and ``"rope"`` ``(rope_dim,)``.

        Raises:
            ConfigError: A size is not a positive whole number.
        """
        check_positive(kv_lora_rank, "kv_lora_rank")
        check_positive(rope_dim, "rope_dim")
        return cls((TensorSpec("latent", (kv_lora_rank,)), TensorSpec("rope", (rope_dim,))))

    @property
    def token_elements(self) -> int:
        """Elements that one token keeps in this layer."""
        return sum(tensor.token_elements for tensor in self.tensors)


@dataclass(frozen=True)
class KVSpec:
    """The layout of a KV block; hashable and picklable, so it crosses Ray and keys caches.

    Args:
        layers: One spec per model layer.
        block_size: Tokens in a block.
        dtype: Element type of every tensor.

    Raises:
        ConfigError: No layer keeps anything, the block size is not a positive whole number, or
            the dtype is none of the three.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int
    dtype: KVDtype

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple):
            raise ConfigError(f"layers is {self.layers!r}, not a tuple: wrap it in tuple(...)")
        check_positive(self.block_size, "block_size")
        if self.dtype not in get_args(KVDtype):
            raise ConfigError(
                f"dtype is {self.dtype!r}: choose one of {', '.join(get_args(KVDtype))}"
            )
        if not any(layer.tensors for layer in self.layers):
            raise ConfigError(
                f"none of the {len(self.layers)} layers keeps a tensor, so there is no KV to hold:"
                " give at least one layer with tensors"
            )

    @classmethod
    def uniform(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: KVDtype
    ) -> "KVSpec":
        """Return the spec of a model whose layers are all equal attention layers.

        Raises:
            ConfigError: A size is not a positive whole number, or the dtype is unknown.
        """
        check_positive(num_layers, "num_layers")
        return cls((LayerSpec.attention(num_kv_heads, head_dim),) * num_layers, block_size, dtype)

    @property
    def num_layers(self) -> int:
        """Number of layers, including those that keep nothing."""
        return len(self.layers)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZES[self.dtype]

    @property
    def storage_dtype(self) -> str:
        """NumPy name of the stored elements; see ``storage_dtype``."""
        return storage_dtype(self.dtype)

    @cached_property
    def token_elements(self) -> int:
        """Elements that one token keeps over all layers."""
        return sum(layer.token_elements for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token keeps over all layers."""
        return self.token_elements * self.itemsize

    @property
    def block_elements(self) -> int:
        """Elements of one block over all layers."""
        return self.token_elements * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_elements * self.itemsize

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """First element within a block of each tensor: ``offsets[layer][index of tensor]``."""
        table: list[tuple[int, ...]] = []
        position = 0
        for layer in self.layers:
            row: list[int] = []
            for tensor in layer.tensors:
                row.append(position)
                position += tensor.token_elements * self.block_size
            table.append(tuple(row))
        return tuple(table)

    def locate(self, layer: int, name: str) -> tuple[int, TensorSpec]:
        """Find one tensor of one layer.

        Returns:
            Its first element within a block, and its spec.

        Raises:
            ValueError: There is no such layer, or it has no tensor of that name.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        for offset, tensor in zip(self.offsets[layer], self.layers[layer].tensors, strict=True):
            if tensor.name == name:
                return offset, tensor
        names = [tensor.name for tensor in self.layers[layer].tensors]
        raise ValueError(f"layer {layer} has no tensor {name!r}, only {names}")
