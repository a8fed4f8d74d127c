"""The workloads of raykv/bench/managers.py, for a manager that is not ours.

Each function here has its namesake there: same sizes, same rotation, same random prompts; only the
calls are the peer's. A ``Side`` hides how a peer is called, and each workload gets a fresh one.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from raykv.bench.timing import measure

BLOCK_SIZE = 16
NUM_BLOCKS = 65_536
SHORT, LONG = 8_192, 131_072  # tokens
_VOCAB_SIZE = 50_000

Call = Callable[[Any], Any]


class Side(ABC):
    """A peer's manager of NUM_BLOCKS blocks, prefix cache on.

    A prompt is whatever the peer's own scheduler holds for one; an admission is whatever it must
    keep until the prompt is finished.

    Attributes:
        includes: what a user should know of what is timed, by topic.
        split_of: what ``part`` measures, in words; empty where there is nothing to tell apart.
    """

    includes: ClassVar[dict[str, str]]
    split_of: ClassVar[str] = ""

    @abstractmethod
    def prompt(self, tokens: list[int]) -> Any:
        """Tokens in the form that the peer's scheduler keeps them in."""

    @abstractmethod
    def admit(self, prompt: Any) -> Any:
        """Look the prompt up and take the blocks that are missing."""

    @abstractmethod
    def num_cached(self, admitted: Any) -> int:
        """How many of the prompt's tokens were found in the cache."""

    @abstractmethod
    def drop(self, admitted: Any) -> None:
        """Give back an admission, leaving nothing of it in the cache that was not there before."""

    @abstractmethod
    def finish(self, admitted: Any) -> None:
        """Publish what the peer has not published before, and give back."""

    @abstractmethod
    def hold_rest(self) -> None:
        """Take every block that is free, so that the next one must be evicted; check that."""

    @abstractmethod
    def decoder(self, lengths: list[int]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """Sequences of these lengths; how to prepare, and how to take, one more token for each."""

    def part(self, prompt: Any) -> object:
        """The part of ``admit`` that ``split_of`` names, or what could stand in its place."""
        raise NotImplementedError


class Bench:
    """One workload's peer and prompts, and what times them."""

    def __init__(self, make: Callable[[], Side], label: str, num_runs: int) -> None:
        self.side = make()
        self._rng = np.random.default_rng(0)
        self._label, self._num_runs = label, num_runs

    def tokens(self, num_tokens: int) -> list[int]:
        """A new prompt's ids."""
        return self._rng.integers(0, _VOCAB_SIZE, num_tokens, dtype=np.int32).tolist()

    def prompt(self, num_tokens: int) -> Any:
        """A new prompt in the peer's form."""
        return self.side.prompt(self.tokens(num_tokens))

    def live(self, tokens: list[int]) -> Any:
        """Admit and finish; returns the prompt, which is cached now."""
        prompt = self.side.prompt(tokens)
        self.side.finish(self.side.admit(prompt))
        return prompt

    def publish(self, num_prompts: int, num_tokens: int) -> list[Any]:
        """Leave prompts in the prefix cache."""
        return [self.live(self.tokens(num_tokens)) for _ in range(num_prompts)]

    def expect_cached(self, prompt: Any, num_tokens: int) -> None:
        """Refuse to time what is not the workload: a hit of the wrong length."""
        admitted = self.side.admit(prompt)
        found = self.side.num_cached(admitted)
        self.side.drop(admitted)
        assert num_tokens - BLOCK_SIZE <= found <= num_tokens, (found, num_tokens)

    def time(
        self,
        operation: Call,
        prepare: Callable[[], Any],
        after: Call = lambda _: None,
        part: Call | None = None,
        max_runs: int = 10_000,
    ) -> dict[str, Any]:
        """The row, and beside it the median of one part of it where the peer has one to tell."""
        num_runs = min(self._num_runs, max_runs)
        row = measure(
            self._label, "peer", operation, prepare=prepare, after=after, num_runs=num_runs
        ).as_json()
        if part is not None and self.side.split_of:
            split = measure(self._label, "part", part, prepare=prepare, num_runs=num_runs)
            row["part_us"] = split.median_us
        return row


def admit_new(bench: Bench) -> dict[str, Any]:
    """A prompt that nobody has sent before."""
    side = bench.side
    bench.publish(48, SHORT)
    bench.expect_cached(bench.prompt(SHORT), 0)
    return bench.time(side.admit, lambda: bench.prompt(SHORT), side.drop, side.part, max_runs=70)


def admit_new_list(bench: Bench) -> dict[str, Any]:
    """The same from a Python list of ints, in whatever form the peer wants prompts."""
    side = bench.side
    return bench.time(
        lambda tokens: side.admit(side.prompt(tokens)),
        lambda: bench.tokens(SHORT),
        side.drop,
        max_runs=110,
    )


def admit_cached(bench: Bench) -> dict[str, Any]:
    """One of 48 prompts that are in the cache, in turn."""
    side = bench.side
    prompts = itertools.cycle(bench.publish(48, SHORT))
    bench.expect_cached(next(prompts), SHORT)
    return bench.time(side.admit, lambda: next(prompts), side.drop, side.part)


def decode_step(bench: Bench) -> dict[str, Any]:
    """One more token for each of 256 sequences, a sixteenth of which need a block."""
    prepare, step = bench.side.decoder([index * 3 % 512 + 1 for index in range(1, 257)])
    return bench.time(step, prepare)


def finish(bench: Bench) -> dict[str, Any]:
    """Publish 512 computed blocks and give them back."""
    side = bench.side
    return bench.time(side.finish, lambda: side.admit(bench.prompt(SHORT)), max_runs=110)


def admit_and_finish(bench: Bench) -> dict[str, Any]:
    """A new prompt's whole life."""
    side = bench.side
    return bench.time(
        lambda prompt: side.finish(side.admit(prompt)), lambda: bench.prompt(SHORT), max_runs=110
    )


def admit_evicting(bench: Bench) -> dict[str, Any]:
    """A new prompt whose 512 blocks must all be evicted first."""
    side = bench.side
    bench.publish(NUM_BLOCKS // (SHORT // BLOCK_SIZE) - 1, SHORT)
    side.hold_rest()
    return bench.time(side.admit, lambda: bench.prompt(SHORT), side.finish)


def admit_new_long(bench: Bench) -> dict[str, Any]:
    """A new prompt of 8,192 blocks."""
    side = bench.side
    return bench.time(side.admit, lambda: bench.prompt(LONG), side.drop, side.part)


def admit_cached_long(bench: Bench) -> dict[str, Any]:
    """A cached prompt of 8,192 blocks, one of six in turn."""
    side = bench.side
    prompts = itertools.cycle(bench.publish(6, LONG))
    bench.expect_cached(next(prompts), LONG)
    return bench.time(side.admit, lambda: next(prompts), side.drop, side.part)


def admit_conversation(bench: Bench) -> dict[str, Any]:
    """A cached prompt of 16 turns, at each of which another prompt went its own way."""
    side = bench.side

    def converse(num_turns: int) -> Any:
        tokens = bench.tokens(SHORT)
        for turn in range(1, num_turns + 1):
            stop = SHORT * turn // num_turns
            bench.live(tokens[:stop])
            bench.live(tokens[:stop] + bench.tokens(BLOCK_SIZE))
        return side.prompt(tokens)

    prompts = itertools.cycle([converse(16) for _ in range(48)])
    bench.expect_cached(next(prompts), SHORT)
    return bench.time(side.admit, lambda: next(prompts), side.drop, side.part)


WORKLOADS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        admit_new, admit_new_list, admit_cached, decode_step, finish, admit_and_finish,
        admit_evicting, admit_new_long, admit_cached_long, admit_conversation,
    )
}  # fmt: skip
