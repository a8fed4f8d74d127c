"""Whether two ways of computing the same answers agree, and what to make of a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TIE_LOGITS = 1e-4
"""Two logits that lie closer than this may change places with the order of a sum's terms."""

LogitsOf = Callable[[Sequence[int]], NDArray[np.float32]]
"""The next token's logits after some tokens, from a model that knows nothing of raykv."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers of two ways to one prompt.

    Attributes:
        name: for people.
        prompt: what both went on from.
        expected: one answer.
        actual: the other.
    """

    name: str
    prompt: Sequence[int]
    expected: Sequence[int]
    actual: Sequence[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found.

    Attributes:
        num_pairs: answers compared.
        num_near_ties: those that part where two logits were as good as equal.
        differences: those that part elsewhere, a line each.
    """

    num_pairs: int = 0
    num_near_ties: int = 0
    differences: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether nothing but near ties was found."""
        return not self.differences


def compare(pairs: Iterable[Pair], logits_of: LogitsOf) -> Verdict:
    """Compare greedy answers token by token.

    A first difference is accepted only where the two tokens are the two best at that place and
    their logits lie within ``TIE_LOGITS``; what follows it belongs to different texts.
    """
    num_pairs = num_near_ties = 0
    differences = []
    for pair in pairs:
        num_pairs += 1
        place = first_difference(pair.expected, pair.actual)
        if place is None:
            continue
        if place == min(len(pair.expected), len(pair.actual)):
            differences.append(
                f"{pair.name}: {len(pair.expected)} tokens expected, {len(pair.actual)} produced"
            )
            continue
        want, got = pair.expected[place], pair.actual[place]
        logits = logits_of([*pair.prompt, *pair.expected[:place]])
        if is_near_tie(logits, want, got):
            num_near_ties += 1
        else:
            gap = abs(float(logits[want]) - float(logits[got]))
            differences.append(
                f"{pair.name}: token {place} is {got}, expected {want}; "
                f"their logits lie {gap:.2g} apart"
            )
    return Verdict(num_pairs, num_near_ties, tuple(differences))


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Where two rows of tokens part; None if they are the same."""
    for place, (want, got) in enumerate(zip(expected, actual, strict=False)):
        if want != got:
            return place
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def is_near_tie(logits: NDArray[np.float32], one: int, other: int) -> bool:
    """Whether two tokens are the two best and as good as equal."""
    best = {int(token) for token in np.argsort(logits)[-2:]}
    return best == {one, other} and abs(float(logits[one]) - float(logits[other])) <= TIE_LOGITS
