"""Time to the first token of the same prompts, with an empty and with a warm cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from raykv.engine.params import SamplingParams
from raykv.pool import BlockManagerPool

from .console import Update
from .play import Served


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One prompt, served twice, alone on its rank.

    Attributes:
        num_prompt_tokens: its length.
        cold_s: seconds from the first step to the first token, nothing cached.
        warm_s: likewise, right after.
        num_cold_hits: tokens that the first time found cached; 0, or the figure is no cold one.
        num_warm_hits: tokens that the second time found cached.
    """

    num_prompt_tokens: int
    cold_s: float
    warm_s: float
    num_cold_hits: int
    num_warm_hits: int

    @property
    def is_valid(self) -> bool:
        """Whether the first was cold and the second warm."""
        return self.num_cold_hits == 0 < self.num_warm_hits


def measure_first_token(
    pool: BlockManagerPool, served: Sequence[Served], update: Update
) -> list[FirstToken]:
    """Serve prompts one at a time, each with an empty cache and then once more."""
    one = SamplingParams(max_tokens=1)
    found: list[FirstToken] = []
    for item in served:
        pool.reset_prefix_cache()
        [cold] = pool.generate(item.prompt, one, dp_rank=item.output.dp_rank)
        [warm] = pool.generate(item.prompt, one, dp_rank=item.output.dp_rank)
        found.append(
            FirstToken(
                len(item.prompt),
                cold.prefill_s,
                warm.prefill_s,
                cold.num_cached_tokens,
                warm.num_cached_tokens,
            )
        )
        cold_s, warm_s = medians(found)
        update(
            len(found) / len(served),
            f"{len(found)} prompts, median {1e3 * cold_s:.0f} ms cold, {1e3 * warm_s:.0f} ms warm",
        )
    return found


def medians(found: Sequence[FirstToken]) -> tuple[float, float]:
    """Median seconds to the first token, cold and warm."""
    return median(item.cold_s for item in found), median(item.warm_s for item in found)


def longest_prompts(served: Sequence[Served], count: int) -> list[Served]:
    """The longest prompt of each of ``count`` conversations, longest first."""
    last: dict[int, Served] = {}
    for item in served:
        best = last.get(item.conversation)
        if best is None or len(item.prompt) > len(best.prompt):
            last[item.conversation] = item
    return sorted(last.values(), key=lambda item: -len(item.prompt))[:count]
