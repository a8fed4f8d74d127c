"""The demo's figures: one record that the table, the chart and the JSON line are made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import RankStats


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold.

    Attributes:
        name: what.
        ok: whether it does.
        detail: the figures behind it, or what went wrong.
    """

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Figures:
    """What goes into the JSON line, under these names.

    Attributes:
        model: as the user named it.
        dp_size: ranks.
        block_size: tokens per block.
        num_blocks: blocks per rank, padding included.
        conversations: conversations played at once.
        requests: prompts served with the prefix cache on.
        prompt_tokens: tokens of their prompts.
        hit_tokens: those that the prefix cache supplied.
        hit_rate: their share.
        generated_tokens: tokens of their answers.
        ttft_cold_ms: median time to the first token, empty cache, without queueing.
        ttft_warm_ms: likewise for the same prompts once more.
        ttft_prompts: prompts behind these medians.
        tokens_per_s: generated tokens per wall second with the cache.
        tokens_per_s_no_cache: likewise without, for the same prompts.
        outputs_equal: whether all compared answers agree, near ties aside.
        near_ties: answers that part where the two best logits lie within 1e-4.
        compared_no_cache: answers compared with the run without cache.
        compared_generate: answers compared with transformers' generate().
        max_logit_diff: largest difference of logits between cold and warm prefill.
        corrupted_logit_diff: likewise with one cached block overwritten: the negative control.
        leaked_blocks: blocks still held after everything was answered.
        preemptions: times that a sequence lost its memory.
        evicted_blocks: cached blocks that were taken for others, with the prefix cache on.
        state_hits: requests that went on from a checkpoint of recurrent state; 0 for models that
            have none, as the next ones.
        state_checkpoints: checkpoints that were taken.
        state_skipped: those that found no slot.
        state_bytes: bytes of the checkpoints that were kept in the end.
        lost_state_logit_diff: as corrupted_logit_diff, with the state zeroed instead; None for
            models that have none.
        device_hit_tokens: of the hit tokens, those that were still in their rank's blocks.
        host_hit_tokens: those that came back from host memory; 0 without, as all up to tier_faults.
        offloaded_blocks: blocks that were copied to the host.
        loaded_blocks: blocks that were copied back.
        offloaded_bytes: the bytes of the former.
        loaded_bytes: the bytes of the latter.
        host_blocks: blocks of all host tiers.
        host_blocks_cached: those that hold something in the end.
        leaked_host_blocks: blocks still on their way, or set aside, after everything was answered.
        tier_faults: copies that failed or came to nothing, and losses of the host.
        misses: why hits ended where they did, requests by reason.
        workload_sha256: names what was asked.
        checks_failed: names of the checks that do not hold.
        wall_s: seconds that the whole demo took.
    """

    model: str
    dp_size: int
    block_size: int
    num_blocks: int
    conversations: int
    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    generated_tokens: int
    ttft_cold_ms: float
    ttft_warm_ms: float
    ttft_prompts: int
    tokens_per_s: float
    tokens_per_s_no_cache: float
    outputs_equal: bool
    near_ties: int
    compared_no_cache: int
    compared_generate: int
    max_logit_diff: float
    corrupted_logit_diff: float
    leaked_blocks: int
    preemptions: int
    evicted_blocks: int
    state_hits: int
    state_checkpoints: int
    state_skipped: int
    state_bytes: int
    lost_state_logit_diff: float | None
    device_hit_tokens: int
    host_hit_tokens: int
    offloaded_blocks: int
    loaded_blocks: int
    offloaded_bytes: int
    loaded_bytes: int
    host_blocks: int
    host_blocks_cached: int
    leaked_host_blocks: int
    tier_faults: int
    misses: dict[str, int]
    workload_sha256: str
    checks_failed: tuple[str, ...]
    wall_s: float

    def as_json(self) -> dict[str, Any]:
        """A plain mapping; figures rounded to what they can carry."""
        digits = {"hit_rate": 4, "wall_s": 1, "tokens_per_s": 2, "tokens_per_s_no_cache": 2}
        digits |= {"ttft_cold_ms": 2, "ttft_warm_ms": 2}
        values = asdict(self)
        return {
            name: round(value, digits[name]) if name in digits else value
            for name, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the demo found.

    Attributes:
        figures: for the table and the JSON line.
        checks: what was verified.
        peak: counters per rank when it used most blocks.
        drained: counters per rank after the last answer.
        misses: why each request's hit went no further.
    """

    figures: Figures
    checks: tuple[Check, ...] = ()
    peak: tuple[RankStats, ...] = field(default=())
    drained: tuple[RankStats, ...] = field(default=())
    misses: tuple[MissReport, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)
