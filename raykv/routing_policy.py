"""Routing policies: which rank takes a sequence. Pure objects; the Router keeps the books."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raykv.core.kv_cache_manager import Room
from raykv.errors import ConfigError


@dataclass(slots=True)
class RankView:
    """One rank as a policy sees it, which only reads it.

    Attributes:
        rank: its number.
        room: what it has to give, by its own counters.
        num_promised_blocks: blocks that it will give to what was sent to it, and that do not show
            in ``room`` yet.
        num_work_tokens: work that waits there. For a generation the tokens that this driver sent
            there and that are still to be computed or produced; for a scheduler of your own the
            tokens whose blocks are in use.
        num_hit_tokens: leading tokens of the sequence that it is believed to have in its prefix
            cache; 0 for policies that do not want them.
    """

    rank: int
    room: Room
    num_promised_blocks: int = 0
    num_work_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def num_available_blocks(self) -> int:
        """Free and evictable blocks, less the promised ones."""
        return self.room.num_available_blocks - self.num_promised_blocks


class Wanted(NamedTuple):
    """What one sequence wants.

    Attributes:
        num_tokens: tokens to have room for; those to be generated are among them.
        block_size: tokens per block.
        can_wait: whether the rank queues it if it does not fit, as an engine does, or refuses it.
    """

    num_tokens: int
    block_size: int
    can_wait: bool

    @property
    def num_blocks(self) -> int:
        """Blocks that the tokens fill."""
        return -(-self.num_tokens // self.block_size)


class RoutingPolicy(ABC):
    """Chooses ranks. Chosen by name, or as ``module:Class``, made without arguments.

    Attributes:
        wants_hits: whether to find out ``RankView.num_hit_tokens``, which hashes every prompt.
    """

    wants_hits = False

    @abstractmethod
    def choose(self, ranks: Sequence[RankView], wanted: Wanted) -> int:
        """The ``rank`` of one of the views.

        Args:
            ranks: at least one, in ascending order. Lost ranks, and those without a free single
                block, are left out unless there are no others.
            wanted: what the sequence wants.
        """


class AvailableBlocksPolicy(RoutingPolicy):
    """Most free and evictable blocks; the lowest number wins a tie."""

    def choose(self, ranks: Sequence[RankView], wanted: Wanted) -> int:  # noqa: ARG002
        """See RoutingPolicy."""
        best, most = ranks[0].rank, ranks[0].num_available_blocks
        for view in ranks[1:]:
            num_blocks = view.num_available_blocks
            if num_blocks > most:
                best, most = view.rank, num_blocks
        return best


class FreeBlocksPolicy(RoutingPolicy):
    """Most free blocks: the seed's rule (section 5.3), which sees idle cache as taken."""

    def choose(self, ranks: Sequence[RankView], wanted: Wanted) -> int:  # noqa: ARG002
        """See RoutingPolicy."""
        return max(ranks, key=_free).rank


class CacheAwarePolicy(RoutingPolicy):
    """Where most of the prompt is cached, less half of the work that waits there.

    score = hit tokens - (work tokens - least work tokens of any rank) / 2: an imbalance is worth
    it up to twice the tokens that the hit saves. So equal prompts stay together, while a group
    that shares a prefix takes another rank once its first one is that far behind. The most
    available blocks win a tie, and then the lowest number.

    What cannot wait goes where it fits, if it fits anywhere: a hit on a full rank is no use.
    """

    wants_hits = True

    def choose(self, ranks: Sequence[RankView], wanted: Wanted) -> int:
        """See RoutingPolicy."""
        if not wanted.can_wait:
            ranks = [view for view in ranks if _fits(view, wanted)] or ranks
        least = min(view.num_work_tokens for view in ranks)

        def worth(view: RankView) -> tuple[int, int]:
            # Twice the score, which stays whole.
            score = 2 * view.num_hit_tokens - (view.num_work_tokens - least)
            return score, view.num_available_blocks

        return max(ranks, key=worth).rank


_BUILT_IN: dict[str, type[RoutingPolicy]] = {
    "available_blocks": AvailableBlocksPolicy,
    "free_blocks": FreeBlocksPolicy,
    "cache_aware": CacheAwarePolicy,
}


def make_policy(name: str) -> RoutingPolicy:
    """The policy that a name, or ``module:Class``, stands for.

    Raises:
        ConfigError: there is no such policy.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(_BUILT_IN)
        raise ConfigError(f"routing.policy is {name!r}, but known are {known}, or module:Class")
    try:
        policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"routing.policy {name!r} cannot be loaded: {error}") from None
    if not isinstance(policy, RoutingPolicy):
        raise ConfigError(f"routing.policy {name!r} is no raykv.routing_policy.RoutingPolicy")
    return policy


def _free(view: RankView) -> int:
    return view.room.num_free_blocks - view.num_promised_blocks


def _fits(view: RankView, wanted: Wanted) -> bool:
    """Whether the blocks would do, if all that hits is in use by others, as it may be."""
    num_shared = view.num_hit_tokens // wanted.block_size
    return view.num_available_blocks >= wanted.num_blocks - num_shared
