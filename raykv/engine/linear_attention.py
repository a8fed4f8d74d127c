"""Layers that keep a state per sequence instead of keys and values per token: linear attention.

Such a layer (Gated DeltaNet of Qwen3-Next and Qwen3.5, and whatever speaks to a transformers cache
in the same words) reads a convolution state and a recurrent state, and leaves new ones. It knows
nothing of packed batches: tokens of two sequences in one row would flow into one state, and so
would padding. So its ``forward`` is wrapped: each sequence with several new tokens goes through
alone, unpadded, and all sequences with one new token go through as one batch.

The original forward sees a :class:`MixerStates` as its cache. What it read and left there is copied
from and to the live states in the rank's StateBuffers. Should a forward pass fail halfway, some
layers' states are ahead of others': the sequences of that step must be computed anew.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raykv.engine.batch import StepBatch
from raykv.engine.mixer_states import MixerStates
from raykv.errors import NotSupportedError
from raykv.memory.state_buffers import StateBuffers
from raykv.memory.state_spec import StateSpec, StateTensor


class LinearStates:
    """The live states of a rank's buffers, as torch tensors that share their memory.

    Attributes:
        layers: per linear layer, per name, ``[rows, *shape]``.
    """

    def __init__(self, buffers: StateBuffers) -> None:
        self.layers: dict[int, dict[str, Any]] = {
            layer: {tensor.name: buffers.torch_view(layer, tensor.name) for tensor in tensors}
            for layer, tensors in enumerate(buffers.spec.layers)
            if tensors
        }


@dataclass(frozen=True, slots=True)
class _Part:
    """Sequences of a batch that go through a layer in one call.

    Attributes:
        tokens: which rows of the packed batch: a slice of one sequence, or int64 [S], one each.
        rows: which rows of the states: a slice of one row, or int64 [S].
        is_new: whether they begin here, so that nothing may be read.
    """

    tokens: Any
    rows: Any
    is_new: bool

    def cut(self, hidden: Any) -> Any:
        """Their part of ``[1, T, width]``: ``[1, tokens, width]`` or ``[S, 1, width]``."""
        if isinstance(self.tokens, slice):
            return hidden[:, self.tokens]
        return hidden[0].index_select(0, self.tokens).unsqueeze(1)

    def paste(self, output: Any, result: Any) -> None:
        """Put what ``cut`` became into its place in ``[1, T, width]``."""
        if isinstance(self.tokens, slice):
            output[:, self.tokens] = result
        else:
            output[0].index_copy_(0, self.tokens, result[:, 0])

    def read(self, states: Mapping[str, Any]) -> dict[str, Any] | None:
        """Their states; of several sequences copies, of one the memory itself."""
        if self.is_new:
            return None
        return {name: state[self.rows] for name, state in states.items()}

    def write(self, states: Mapping[str, Any], name: str, value: Any) -> None:
        """Set one of their states."""
        states[name][self.rows] = value


class LinearStep:
    """All that the linear layers need of one forward pass; index tensors are built once, here.

    Args:
        batch: what is computed; with ``state_slots`` unless nothing is to be stored.
        device: of the model.
        states: where the states lie; None only records them, for the first pass of a model.

    Attributes:
        recorded: per layer and name the states that were left, where ``states`` is None.
    """

    def __init__(self, batch: StepBatch, device: Any, states: LinearStates | None) -> None:
        self.recorded: dict[int, dict[str, Any]] = {}
        self._states = states
        self._num_tokens = len(batch.token_ids)
        self._parts = list(_parts(batch, device))

    def run(self, layer: int, mixer: Callable[[Any, MixerStates], Any], hidden: Any) -> Any:
        """Send all tokens through one layer, each sequence from its own state.

        Args:
            layer: number of the layer.
            mixer: the layer, called with hidden states ``[S, T, width]`` and their cache.
            hidden: ``[1, T, width]``, packed.

        Returns:
            ``[1, T, width]``.

        Raises:
            NotSupportedError: the layer does not return one tensor of that shape, or keeps nothing.
        """
        if hidden.shape[:2] != (1, self._num_tokens):
            raise NotSupportedError(
                f"linear layer {layer} gets a batch of {tuple(hidden.shape[:2])} tokens, where "
                f"(1, {self._num_tokens}) are packed"
            )
        states = {} if self._states is None else self._states.layers[layer]
        output = torch.empty_like(hidden)
        for part in self._parts:
            new = part.cut(hidden)
            past = part.read(states)
            cache = MixerStates(past)
            result = mixer(new, cache)
            if not torch.is_tensor(result) or result.shape != new.shape:
                shape = tuple(getattr(result, "shape", ()))
                raise NotSupportedError(
                    f"linear layer {layer} returns a {type(result).__name__} {shape} for hidden "
                    f"states {tuple(new.shape)}"
                )
            part.paste(output, result)
            self._keep(layer, part, past, cache)
        return output

    def spec(self, num_layers: int) -> StateSpec:
        """The layout of what was recorded.

        Args:
            num_layers: of the model.

        Raises:
            NotSupportedError: a state has an element type that no buffer keeps.
        """
        return StateSpec(
            tuple(_tensors(layer, self.recorded.get(layer, {})) for layer in range(num_layers))
        )

    def _keep(
        self, layer: int, part: _Part, past: Mapping[str, Any] | None, cache: MixerStates
    ) -> None:
        if self._states is None:
            if not cache.left:
                raise NotSupportedError(f"linear layer {layer} leaves no state in its cache")
            self.recorded[layer] = cache.left
            return
        states = self._states.layers[layer]
        # A layer may have changed what it read in place and left nothing else, so that goes back,
        # too; of one sequence it was the memory itself.
        if past is not None and not isinstance(part.rows, slice):
            for name, value in past.items():
                if name not in cache.left:
                    part.write(states, name, value)
        for name, value in cache.left.items():
            part.write(states, name, value)


def _parts(batch: StepBatch, device: Any) -> Iterator[_Part]:
    starts = np.concatenate(([0], np.cumsum(batch.query_lens, dtype=np.int64)))
    rows = batch.state_slots
    rows = np.zeros(len(batch.query_lens), np.int64) if rows is None else rows
    is_new = batch.context_lens == batch.query_lens
    # One new token and a past: together. A new sequence of one token has no past to be batched by.
    is_decode = (batch.query_lens == 1) & ~is_new
    for index in np.flatnonzero(~is_decode).tolist():
        row = int(rows[index])
        tokens = slice(int(starts[index]), int(starts[index + 1]))
        yield _Part(tokens, slice(row, row + 1), bool(is_new[index]))
    decodes = np.flatnonzero(is_decode)
    if len(decodes) == 1:
        row, token = int(rows[decodes[0]]), int(starts[decodes[0]])
        yield _Part(slice(token, token + 1), slice(row, row + 1), is_new=False)
    elif len(decodes):
        yield _Part(
            _put(starts[decodes], device), _put(rows[decodes].astype(np.int64), device), False
        )


def _put(array: NDArray[np.int64], device: Any) -> Any:
    return torch.from_numpy(array).to(device)


def _tensors(layer: int, states: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    tensors = []
    for name, state in states.items():
        dtype = str(state.dtype).removeprefix("torch.")
        if dtype not in {"float32", "float16", "bfloat16"}:
            raise NotSupportedError(f"state {name!r} of layer {layer} is of {dtype}")
        # A convolution state is a few inputs as they are; the recurrent one is large and a sum of
        # many, so that is the one worth storing in fewer bits.
        is_sum = name.startswith("recurrent") and dtype == "float32"
        tensors.append(StateTensor(name, tuple(state.shape[1:]), dtype, compressible=is_sum))  # type: ignore[arg-type]  # checked
    return tuple(tensors)
