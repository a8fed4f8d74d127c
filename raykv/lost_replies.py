"""Replies of ranks that may be lost: what the pool makes of them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Generic, TypeVar

from raykv.core.sequence import Sequence
from raykv.errors import RankUnavailableError
from raykv.rank_handle import Reply, results

T = TypeVar("T")


def answers_of_all(replies: SequenceOf[Reply[T]], if_lost: T, *, fails_over: bool) -> list[T]:
    """What all ranks say.

    Args:
        replies: one per rank.
        if_lost: what stands for the answer of a lost rank.
        fails_over: False makes a lost rank an error.

    Raises:
        RankUnavailableError: a rank is lost, and losses are reported, or all are.
    """
    found = [_OrLost(reply) for reply in replies]
    values = results(found)
    lost = [one.error for one in found if one.error is not None]
    if lost and (not fails_over or len(lost) == len(found)):
        raise lost[0]
    return [if_lost if value is None else value for value in values]


@dataclass(slots=True)
class _OrLost(Generic[T]):
    reply: Reply[T]
    error: RankUnavailableError | None = None

    def result(self) -> T | None:
        try:
            return self.reply.result()
        except RankUnavailableError as error:
            self.error = error
            return None


@dataclass(frozen=True, slots=True)
class ReleasedOrLost:
    """A release that also succeeds on a lost rank, where there is nothing left to release.

    Attributes:
        reply: the rank's.
        sequences: what was to be released.
        on_lost: called with them in place of the rank.
    """

    reply: Reply[None]
    sequences: list[Sequence]
    on_lost: Callable[[SequenceOf[Sequence]], object]

    def result(self) -> None:
        """Wait for it."""
        try:
            self.reply.result()
        except RankUnavailableError:
            self.on_lost(self.sequences)
