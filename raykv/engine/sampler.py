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
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order])
    if params.top_p < 1:
        keep = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:keep]
    # Philox counts: the position selects the draw, no earlier draws are needed.
    random = np.random.Philox(key=(seed, sample_index), counter=position).random_raw()
    point = (int(random) >> 11) * 2.0**-53 * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, point, "right")), len(cumulative) - 1)])


def log_probs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-softmax over float32 [vocab_size], at temperature 1."""
    scaled = logits.astype(np.float64) - float(logits.max())
    return np.asarray(scaled - np.log(np.exp(scaled).sum()))


def top(values: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` largest values with their indices, largest first."""
    order = np.argsort(-values, kind="stable")[:count]
    return tuple((int(index), float(values[index])) for index in order)
