"""What one call of a linear layer takes for its transformers cache."""

from collections.abc import Mapping
from typing import Any

import torch


class MixerStates:
    """The cache that one call of one layer sees: the states of the sequences in that call.

    Answers the questions that transformers' linear layers ask of their cache. State number i of a
    kind is named ``conv`` or ``recurrent``, with i appended where it is not 0.

    Args:
        past: per name what the sequences' earlier tokens left, each ``[S, *shape]``; None for
            sequences that begin here.

    Attributes:
        left: names with what the layer left, each ``[S, *shape]``.
    """

    def __init__(self, past: Mapping[str, Any] | None) -> None:
        self._past = past
        self.left: dict[str, Any] = {}

    def get_conv_state(self, _layer_idx: int, state_idx: int = 0) -> Any:
        """The last inputs of the convolution, or None; the layer may change them in place."""
        return self._get(_name("conv", state_idx))

    def get_recurrent_state(self, _layer_idx: int, state_idx: int = 0) -> Any:
        """The recurrent state, or None."""
        return self._get(_name("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Any,
        _layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Any:
        """Take the convolution's new inputs ``[S, channels, T]``; return them behind the past ones.

        As many of the last ones are kept as the kernel is wide. Where nothing went before and too
        few came, zeros stand in front, as the convolution's own padding does.
        """
        name = _name("conv", state_idx)
        past = self._get(name)
        if past is None:
            width = conv_kernel_size or conv_states.shape[-1]
            missing = max(0, width - conv_states.shape[-1])
            inputs = torch.nn.functional.pad(conv_states, (missing, 0))
        else:
            width = past.shape[-1]
            inputs = torch.cat((past, conv_states), dim=-1)
        self.left[name] = inputs[..., -width:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Any, _layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Any:
        """Take the recurrent state after the last token, ``[S, *shape]``."""
        self.left[_name("recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def has_previous_state(
        self, _layer_idx: int | None = None, _state_idx: int | None = None
    ) -> bool:
        """Whether the sequences have earlier tokens."""
        return self._past is not None

    def is_recording_past(self, _layer_idx: int) -> bool:
        """Never: nothing is cropped here."""
        return False

    def _get(self, name: str) -> Any:
        return None if self._past is None else self._past.get(name)


def _name(kind: str, state_idx: int) -> str:
    return f"{kind}{state_idx or ''}"
