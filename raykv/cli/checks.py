"""What the demo verifies, from what it found."""

from __future__ import annotations

from dataclasses import dataclass

from .first_token import FirstToken
from .logit_check import MAX_LOGIT_DIFF, MIN_CORRUPTED_DIFF, LogitCheck
from .play import Phase
from .results import Check
from .verify import TIE_LOGITS, Verdict


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything the checks look at.

    Attributes:
        cached: the conversations with the prefix cache on.
        plain: the same prompts with it off.
        first_tokens: times to the first token, cold and warm.
        no_cache: answers of ``cached`` held against those of ``plain``.
        generated: a sample of them held against transformers' generate().
        logits: cold, warm and corrupted prefill of one prompt.
    """

    cached: Phase
    plain: Phase
    first_tokens: tuple[FirstToken, ...]
    no_cache: Verdict
    generated: Verdict
    logits: LogitCheck

    @property
    def num_leaked_blocks(self) -> int:
        """Blocks that either run still held after its last answer."""
        return self.cached.num_leaked_blocks + self.plain.num_leaked_blocks


def checks_of(evidence: Evidence) -> tuple[Check, ...]:
    """All checks, in the order they are shown."""
    logits, samples = evidence.logits, evidence.first_tokens
    num_valid = sum(item.is_valid for item in samples)
    leaked = evidence.num_leaked_blocks
    return (
        _agreement("answers equal the run without prefix cache", evidence.no_cache),
        _agreement("answers equal transformers' generate()", evidence.generated),
        Check(
            "warm and cold prefill give the same logits",
            logits.is_equal,
            f"largest difference {logits.max_diff:.1e}, at most {MAX_LOGIT_DIFF:.0e}; "
            f"{logits.num_shared_tokens} of {logits.num_prompt_tokens} tokens came from the cache",
        ),
        Check(
            "an overwritten cached block is noticed",
            logits.can_tell,
            f"difference {logits.corrupted_diff:.1e}, more than {MIN_CORRUPTED_DIFF:.0e}",
        ),
        *_state_checks(logits),
        Check(
            "first tokens were cold, then warm",
            num_valid == len(samples),
            f"{num_valid} of {len(samples)} prompts hit nothing at first and then their prefix",
        ),
        Check(
            "no block is held after the last answer",
            leaked == 0,
            f"{leaked} used or pending over all ranks of both runs, live state slots included; "
            "their books balance",
        ),
        *_host_checks(evidence.cached),
    )


def _host_checks(cached: Phase) -> tuple[Check, ...]:
    """For pools with host memory: whether all that was on its way has arrived."""
    if not cached.hosts:
        return ()
    held = cached.num_leaked_host_blocks
    detail = f"{held} blocks and loads are on their way or set aside; the host's books balance"
    return (Check("nothing is held for the host after the last answer", held == 0, detail),)


def _state_checks(logits: LogitCheck) -> tuple[Check, ...]:
    """For models with recurrent state: whether a wrong one would be noticed."""
    diff = logits.lost_state_diff
    if diff is None:
        return ()
    detail = f"difference {diff:.1e}, more than {MIN_CORRUPTED_DIFF:.0e}"
    return (Check("a state that was zeroed is noticed", diff > MIN_CORRUPTED_DIFF, detail),)


def _agreement(name: str, verdict: Verdict) -> Check:
    detail = f"{verdict.num_pairs} compared"
    if verdict.num_near_ties:
        detail += f", {verdict.num_near_ties} part where two logits lie within {TIE_LOGITS:.0e}"
    if verdict.differences:
        detail += f", {len(verdict.differences)} differ; first: {verdict.differences[0]}"
    return Check(name, verdict.is_equal, detail)
