"""Eviction policies: which released stretches of cached blocks are worth least.

A policy only gives scores; eviction_order sees to it that no parent goes before its child.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Released:
    """Stretches that lost their last holder, as a policy sees them; arrays of equal length n.

    Attributes:
        stamps: int64 [n], counts releases: larger is later.
        turnovers: float64 [n], blocks published until the release, per block of the pool: a clock
            that runs as fast as the cache is overwritten, whatever its size.
        last_scores: float64 [n], the run's score from its release before; -inf the first time.
        depths: int64 [n], blocks between the root and the run.
        priorities: int64 [n], the run's retention priority, 0 to 100.
    """

    stamps: NDArray[np.int64]
    turnovers: NDArray[np.float64]
    last_scores: NDArray[np.float64]
    depths: NDArray[np.int64]
    priorities: NDArray[np.int64]


class EvictionPolicy(ABC):
    """Says what released stretches are worth. Chosen by name, or as ``module:Class``.

    Attributes:
        heeds_priorities: whether a stretch is to be scored again when its priority ends.
    """

    heeds_priorities = False

    @abstractmethod
    def scores(self, released: Released) -> NDArray[np.float64]:
        """The worth of each stretch, float64 [n]; the least goes first, the older one of equals."""


class LrfuPolicy(EvictionPolicy):
    """Recency and frequency together: every use counts 1 and fades by half per half-life.

    The weight of a stretch after uses at times t_i is the sum of 2 ** ((t_i - t) / half_life). The
    order of two weights never changes between uses, so log2(weight) + t / half_life is a score
    that need not be updated. LRFU: Lee et al., IEEE Transactions on Computers, 2001.

    Args:
        half_life: in turnovers of the pool. Short is LRU, long is LFU.
    """

    def __init__(self, half_life: float = 1.0) -> None:
        self.half_life = half_life

    def scores(self, released: Released) -> NDArray[np.float64]:
        """See EvictionPolicy."""
        now = released.turnovers / self.half_life
        return np.asarray(np.logaddexp2(now, released.last_scores))


class PriorityPolicy(EvictionPolicy):
    """Low retention priorities go first, LRU among equals; see ``Retention``.

    The idea is TensorRT-LLM's KvCacheRetentionConfig.
    """

    heeds_priorities = True

    def scores(self, released: Released) -> NDArray[np.float64]:
        """See EvictionPolicy."""
        return np.ldexp(released.priorities.astype(np.float64), 44) + released.stamps


POLICIES: dict[str, type[EvictionPolicy]] = {"lrfu": LrfuPolicy, "priority": PriorityPolicy}
