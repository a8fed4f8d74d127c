"""The weights of a transformers model: checked, exchanged, dropped, and read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from raykv.errors import RequestError

from .weights import PackedTensor

_MAX_NAMED = 3
_INDEX = "model.safetensors.index.json"

Reader = Callable[[], Mapping[str, Any]]
"""Reads tensors by parameter name, each owned by whoever called."""


@dataclass(frozen=True, slots=True)
class Staged:
    """New values of a model's tensors, of their dtypes and shapes, in host memory.

    Attributes:
        pairs: each tensor of the model with its new value.
        owner: whose they are.
        reader: reads them again; None if that is not possible.
    """

    pairs: list[tuple[Any, Any]]
    owner: ModelWeights
    reader: Reader | None

    def apply(self) -> None:
        """See StagedWeights."""
        with torch.no_grad():
            for tensor, value in self.pairs:
                if tensor.device.type == "cpu" or not tensor.numel():
                    tensor.data = value.to(tensor.device)
                else:  # device memory has no room for both
                    tensor.data.copy_(value)
        self.owner.reader = self.reader


class ModelWeights:
    """Parameters and persistent buffers of a model, by the names that ``save_pretrained`` writes.

    Args:
        model: whose weights they are.
        reader: reads its present weights again; None if that is not possible.
    """

    def __init__(self, model: Any, reader: Reader | None = None) -> None:
        self.reader = reader
        self._tensors: dict[str, Any] = model.state_dict(keep_vars=True)  # tied ones share a tensor
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def stage(self, weights: str | Mapping[str, PackedTensor]) -> Staged:
        """See ReloadableRunner."""
        if isinstance(weights, str):
            path = Path(weights).expanduser()
            return self._staged(lambda: self._read(path))
        values = {name: _unpacked(tensor) for name, tensor in weights.items()}
        self._check({name: tuple(value.shape) for name, value in values.items()}, "the mapping")
        return self._pair(values, None)

    def reload(self) -> Staged:
        """See ReloadableRunner."""
        assert self.reader is not None, "whoever asks has looked"
        return self._staged(self.reader)

    def drop(self) -> None:
        """See ReloadableRunner."""
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.data = tensor.new_empty(0)
        give_back_device_memory()

    def _staged(self, reader: Reader) -> Staged:
        return self._pair(reader(), reader)

    def _pair(self, values: Mapping[str, Any], reader: Reader | None) -> Staged:
        """Values of the model's own dtypes; a copy each, so that nobody else can change them."""
        for name, value in values.items():
            if value.is_floating_point() != self._tensors[name].is_floating_point():
                raise RequestError(
                    f"{name} is of {value.dtype}, but the model's is of {self._tensors[name].dtype}"
                    ": give weights that are not quantised; nothing was changed"
                )
        tensors = {id(self._tensors[name]): name for name in values}  # one name of tied ones
        pairs = [
            (self._tensors[name], values[name].to("cpu", self._tensors[name].dtype, copy=True))
            for name in tensors.values()
        ]
        return Staged(pairs, self, reader)

    def _read(self, path: Path) -> Mapping[str, Any]:
        """Read safetensors; what lies there is checked before any of it is read."""
        try:
            files = _files(path)
            self._check(dict(_shapes(files)), str(path))
            return dict(_tensors(files))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                f"cannot read weights from {path}: {error}; name a folder or a safetensors file "
                "that save_pretrained wrote and every rank can read"
            ) from error

    def _check(self, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
        unknown = [name for name in shapes if name not in self._shapes]
        given = {id(self._tensors[name]) for name in shapes if name in self._tensors}
        missing = [name for name, tensor in self._tensors.items() if id(tensor) not in given]
        misfits = [
            f"{name} {shape} instead of {self._shapes[name]}"
            for name, shape in shapes.items()
            if self._shapes.get(name, shape) != shape
        ]
        faults = {"unknown": unknown, "missing": missing, "of another shape": misfits}
        found = [
            f"{len(names)} {kind} ({', '.join(names[:_MAX_NAMED])}"
            f"{', ...' if len(names) > _MAX_NAMED else ''})"
            for kind, names in faults.items()
            if names
        ]
        if found:
            raise RequestError(
                f"the weights of {source} do not fit the model, whose parameters are "
                f"{len(self._shapes)}: {'; '.join(found)}; nothing was changed"
            )


def give_back_device_memory() -> None:
    """Let others have what torch keeps of freed CUDA memory for itself."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _files(path: Path) -> list[Path]:
    """The safetensors files of a folder, or the one file itself."""
    if not path.is_dir():
        return [path]
    if (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        return [path / name for name in sorted(set(index["weight_map"].values()))]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError("the folder holds no *.safetensors")
    return files


def _shapes(files: list[Path]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                yield name, tuple(opened.get_slice(name).get_shape())


def _tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                yield name, opened.get_tensor(name)


def _unpacked(tensor: PackedTensor) -> Any:
    """The tensor; it may share the array's memory, which is only read."""
    data = tensor.data if tensor.data.flags.writeable else tensor.data.copy()
    data = np.ascontiguousarray(data).reshape(data.shape)
    if tensor.is_bfloat16:
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)
