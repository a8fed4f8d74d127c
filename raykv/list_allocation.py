"""Allocating a list over several ranks: all or nothing, and no livelock between drivers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as SequenceOf
from typing import TypeAlias

from raykv.core.sequence import Sequence
from raykv.rank_handle import RankHandle, raise_first, results

Groups: TypeAlias = dict[int, tuple[list[Sequence], list[int]]]
"""Per rank the sequences of a call that go there, and the tokens that each is to hold."""

_BACKOFF_S = (0.001, 0.004)


def allocate_over_ranks(ranks: SequenceOf[RankHandle], groups: Groups) -> bool:
    """Allocate on several ranks at once; if one is short, take back what the others gave.

    Of two drivers that want the same ranks each may have got one and kept it from the other. So
    where a part was granted, the ranks are asked once more, one after the other in ascending order,
    after a moment in which another driver takes back its part, too. Whoever then gets the first
    rank that both want gets through.

    Returns:
        False if memory is short: no sequence holds anything new.
    """
    num_granted = _try(ranks, groups, in_turn=False)
    if 0 < num_granted < len(groups):
        time.sleep(random.uniform(*_BACKOFF_S))  # noqa: S311 - no secret
        num_granted = _try(ranks, groups, in_turn=True)
    return num_granted == len(groups)


def _try(ranks: SequenceOf[RankHandle], groups: Groups, *, in_turn: bool) -> int:
    """Allocate on all ranks of ``groups`` or on none.

    Args:
        ranks: the pool's.
        groups: what to allocate.
        in_turn: ask rank after rank, ascending, up to one that is short; else all at once.

    Returns:
        How many ranks granted their part; unless all did, it was taken back.
    """
    before = {
        rank: [s.kv_state.num_blocks if s.single_block_id else None for s in members]
        for rank, (members, _) in groups.items()
    }
    preset = [(s, s.dp_rank, s.owner) for members, _ in groups.values() for s in members]
    replies = ((rank, ranks[rank].allocate(*groups[rank])) for rank in sorted(groups))
    granted: list[int] = []
    errors: list[BaseException] = []
    for rank, reply in replies if in_turn else list(replies):
        try:
            if reply.result():
                granted.append(rank)
            elif in_turn:
                break
        except BaseException as error:  # noqa: BLE001 - raised below, once what was granted is back
            errors.append(error)
            if in_turn:
                break
    if len(granted) == len(groups):
        return len(granted)
    results([ranks[rank].undo(groups[rank][0], before[rank]) for rank in granted])
    for sequence, dp_rank, owner in preset:  # what was chosen outlasts the refusal
        sequence.dp_rank, sequence.owner = dp_rank, owner
    raise_first(errors)
    return len(granted)
