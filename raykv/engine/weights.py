"""New weights on their way to a rank: as plain arrays, or as the place where they lie."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from raykv.errors import RequestError
from raykv.memory.buffers import KVBuffers
from raykv.memory.state_buffers import StateBuffers

UpdateMode: TypeAlias = Literal["wait", "abort", "keep"]
SleepTag: TypeAlias = Literal["weights", "kv_cache"]

SLEEP_TAGS: tuple[SleepTag, ...] = get_args(SleepTag)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor without torch.

    Attributes:
        data: the elements; bfloat16, which NumPy does not know, as uint16 bit patterns.
        is_bfloat16: whether they are that.
    """

    data: NDArray[Any]
    is_bfloat16: bool = False


Weights: TypeAlias = str | dict[str, PackedTensor] | None
"""Where new weights lie, or they themselves by parameter name; None changes only the version."""


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """How far a rank is with its weights.

    Attributes:
        version: the version that it serves.
        pending: the version of an update under way.
        is_staged: whether that update has been read and checked, so that nothing can fail any more.
        error: why the last update, or waking up, failed.
        asleep: what is asleep.
    """

    version: int
    pending: int | None = None
    is_staged: bool = False
    error: Exception | None = None
    asleep: tuple[SleepTag, ...] = ()


class StagedWeights(Protocol):
    """Weights that were read and checked, ready to be used."""

    def apply(self) -> None:
        """Use them from now on; between two steps, and quick."""
        ...


@runtime_checkable
class ReloadableRunner(Protocol):
    """A ModelRunner whose weights can be changed, dropped and read again, and its KV memory too.

    ``stage`` and ``reload`` may run on another thread than ``forward``, at the same time.
    """

    def stage(self, weights: str | dict[str, PackedTensor]) -> StagedWeights:
        """Read and check new weights without using them.

        Raises:
            RequestError: they cannot be read, or do not fit the model.
        """
        ...

    @property
    def can_reload(self) -> bool:
        """Whether dropped weights can be read again from where they came from."""
        ...

    def reload(self) -> StagedWeights:
        """Read the weights again that are, or were, in use."""
        ...

    def drop(self) -> None:
        """Free the weights; nothing runs until staged ones are applied."""
        ...

    def bind(self, buffers: KVBuffers, states: StateBuffers | None = None) -> None:
        """Use this memory of KV, and of states if the model has any, from now on."""
        ...

    def unbind(self) -> None:
        """Let go of both."""
        ...


def pack(weights: object) -> Weights:
    """What a caller passed as weights, as it travels to the ranks.

    Raises:
        RequestError: it is no path and no mapping of names to arrays of floating-point numbers.
    """
    if weights is None:
        return None
    if isinstance(weights, str | Path):
        path = Path(weights)
        # Ranks may work in another directory, and have another home.
        return str(path if str(path).startswith("~") else path.absolute())
    if not isinstance(weights, Mapping):
        raise RequestError(
            f"weights is a {type(weights).__name__}: pass a folder, a safetensors file, or a "
            "mapping of parameter names to arrays"
        )
    return {str(name): _packed(str(name), value) for name, value in weights.items()}


def checked_version(version: object) -> int:
    """A version as a plain int.

    Raises:
        RequestError: it is no whole number of 0 or more.
    """
    try:
        number = operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise RequestError(f"weights version {version!r} is no whole number of 0 or more")
    return number


def checked_tags(tags: Iterable[str] | str | None) -> tuple[SleepTag, ...]:
    """The tags that are to wake up; None stands for all.

    Raises:
        RequestError: a tag is unknown.
    """
    if tags is None:
        return SLEEP_TAGS
    asked = {tags} if isinstance(tags, str) else set(tags)
    unknown = asked - set(SLEEP_TAGS)
    if unknown:
        raise RequestError(f"tags {sorted(map(repr, unknown))} are unknown: use {SLEEP_TAGS}")
    return tuple(tag for tag in SLEEP_TAGS if tag in asked)


def _packed(name: str, value: Any) -> PackedTensor:
    if hasattr(value, "detach"):  # a torch tensor; its module is loaded, and not imported here
        value = value.detach().cpu().contiguous()
        if str(value.dtype) == "torch.bfloat16":
            return PackedTensor(value.view(_torch_int16(value)).numpy().view(np.uint16), True)
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype.name == "bfloat16":  # ml_dtypes'
        return PackedTensor(value.view(np.uint16), True)
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        kind = getattr(value, "dtype", type(value).__name__)
        raise RequestError(
            f"weights[{name!r}] is of {kind}: pass arrays or tensors of floating-point numbers"
        )
    return PackedTensor(value)


def _torch_int16(tensor: Any) -> Any:
    import torch  # noqa: PLC0415 - an extra; whoever has a tensor has it

    assert isinstance(tensor, torch.Tensor)
    return torch.int16
