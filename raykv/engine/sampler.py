"""Choosing the next token from logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .params import SamplingParams


def sample(
    logits: NDArray[np.float32], params: SamplingParams, seed: int, sample_index: int, position: int
) -> int:
    """The next token, from logits float32 [vocab_size].

    The random number depends on nothing but seed, sample index and position, so batching,
    preemption and moving to another rank leave the output as it was.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest token alone
        weights = np.exp(scaled / params.temperature)
    tokens = _nucleus(weights, params.top_p) if params.top_p < 1 else None
    # In order of ids, not of likelihood: rounding that swaps two near ties moves no draw.
    cumulative = np.cumsum(weights if tokens is None else weights[tokens])
    # Philox counts: the position selects the draw, no earlier draws are needed.
    random = np.random.Philox(key=(seed, sample_index), counter=position).random_raw()
    point = (int(random) >> 11) * 2.0**-53 * cumulative[-1]
    index = min(int(np.searchsorted(cumulative, point, "right")), len(cumulative) - 1)
    return index if tokens is None else int(tokens[index])


def log_probs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-softmax over float32 [vocab_size], at temperature 1."""
    scaled = logits.astype(np.float64) - float(logits.max())
    return np.asarray(scaled - np.log(np.exp(scaled).sum()))


def top(values: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` largest values with their indices, largest first; of ties the lower index."""
    count = min(count, len(values))
    largest = np.flatnonzero(values >= np.partition(values, -count)[-count])
    order = largest[np.argsort(-values[largest], kind="stable")][:count]
    return tuple((int(index), float(values[index])) for index in order)


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Ids of the fewest likeliest tokens that have ``top_p`` of the weight; ties by lower id."""
    total = weights.sum()
    # The tokens left out here have less than 1 - top_p together, so none of them can belong.
    likely = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    likely = likely[np.argsort(-weights[likely], kind="stable")]
    keep = int(np.searchsorted(np.cumsum(weights[likely]), top_p * total)) + 1
    return np.sort(likely[:keep])
