"""Checks of sizes, names and shapes that every memory layout shares."""

from collections.abc import Sequence
from typing import Protocol

from raykv.errors import ConfigError


class Named(Protocol):
    """A tensor of a layer, as far as its name."""

    @property
    def name(self) -> str:
        """Its name within the layer."""


def check_positive(value: object, what: str) -> None:
    """Refuse a size that is not a positive whole number.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{what} is {value!r}, but sizes are whole numbers of at least 1: fix it")


def check_tensor(name: str, shape: object, *, example: tuple[str, str]) -> None:
    """Refuse a tensor without a name or with an impossible shape.

    Args:
        name: The tensor's name.
        shape: Its shape.
        example: A name and a shape that would do, for messages.

    Raises:
        ConfigError: The name is empty, or the shape is no tuple of positive whole numbers.
    """
    good_name, good_shape = example
    if not name:
        raise ConfigError(f"a tensor of shape {shape} has no name: name it, e.g. {good_name!r}")
    if not isinstance(shape, tuple) or not shape:
        raise ConfigError(
            f"tensor {name!r} has shape {shape!r}, which is not a tuple with at least"
            f" one dimension: give it as e.g. {good_shape}"
        )
    for axis, size in enumerate(shape):
        check_positive(size, f"dimension {axis} of tensor {name!r} in {shape!r}")


def check_layer(tensors: Sequence[Named], what: str = "tensors") -> None:
    """Refuse a layer whose tensors are no tuple or share a name.

    Args:
        tensors: The layer's tensors.
        what: Name of the argument, for messages.

    Raises:
        ConfigError: They are, or do.
    """
    if not isinstance(tensors, tuple):
        raise ConfigError(f"{what} is {tensors!r}, not a tuple: wrap it in tuple(...)")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise ConfigError(
            f"a layer's {len(names)} tensors are named {names}, but names must differ:"
            " rename the repeated one"
        )
