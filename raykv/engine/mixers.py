"""The linear layers of a transformers model: which they are, and what makes them run packed."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.engine.linear_attention import LinearStates, LinearStep
from raykv.engine.mixer_states import MixerStates
from raykv.errors import NotSupportedError

LINEAR = "linear_attention"
"""What a config's ``layer_types`` call such a layer."""

# What transformers calls the cache argument of a layer: today, and before.
_CACHE_NAMES = ("cache", "cache_params", "past_key_values")


def linear_layers(config: Any) -> tuple[int, ...]:
    """The numbers of the layers that keep a state, as the config lists them; mostly none."""
    kinds = getattr(config, "layer_types", None) or ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def wrap_mixers(model: Any, layers: Iterable[int]) -> None:
    """Have the linear layers of a model compute packed batches, where a step comes as their cache.

    The wrapped ones go on as before with any other cache.

    Args:
        model: to be changed in place.
        layers: numbers of its linear layers.

    Raises:
        NotSupportedError: it cannot be told which module is a layer's.
    """
    modules = list(model.modules())
    for layer in layers:
        of_layer = [module for module in modules if getattr(module, "layer_idx", None) == layer]
        takers = [module for module in of_layer if _cache_name(module) is not None]
        # A decoder layer that knows its number holds the one that is meant.
        inner = [
            module
            for module in takers
            if not any(other in takers for other in module.modules() if other is not module)
        ]
        if len(inner) != 1:
            raise NotSupportedError(
                f"layer {layer} keeps a state, but {len(inner)} of its modules take a cache"
            )
        _wrap(inner[0], layer)


def check_states_count(states: LinearStates, run: Callable[[int, int], NDArray[Any]]) -> None:
    """See that a model goes on from the states that it left, whatever the number of new tokens.

    There are layers that read their state for one new token, and begin anew for several.

    Args:
        states: where a sequence of a few tokens keeps its states, in row 1.
        run: computes tokens [start, start + count) of it; returns the last one's logits.

    Raises:
        NotSupportedError: some state makes no difference.
    """
    names = {name for tensors in states.layers.values() for name in tensors}
    for count, what in ((1, "one new token"), (2, "several new tokens")):
        for name in sorted(names):
            run(0, 2)
            right = run(2, count)
            run(0, 2)
            for tensors in states.layers.values():
                if name in tensors:
                    tensors[name][1] = 0
            if np.array_equal(run(2, count), right):
                raise NotSupportedError(
                    f"its linear layers do not read their {name} state where {what} follow"
                )


def _cache_name(module: Any) -> str | None:
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), None)


def _wrap(mixer: Any, layer: int) -> None:
    original = mixer.forward
    cache_name = _cache_name(mixer)
    assert cache_name is not None, "whoever wraps has looked"

    @functools.wraps(original)
    def forward(hidden_states: Any, **kwargs: Any) -> Any:
        packed = kwargs.get(cache_name)
        step: LinearStep | None = getattr(packed, "linear", None)
        if step is None:
            return original(hidden_states, **kwargs)
        if kwargs.get("attention_mask") is not None:
            raise NotSupportedError(f"linear layer {layer} gets a mask, which raykv makes none of")
        # Made anew per call: layers take things out of it, and pass the rest on to kernels, which
        # the step is no business of.
        rest = {name: value for name, value in kwargs.items() if value is not packed}

        def call(new: Any, cache: MixerStates) -> Any:
            return original(new, **{**rest, cache_name: cache})

        return step.run(layer, call, hidden_states)

    mixer.forward = forward
