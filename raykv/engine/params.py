"""What callers ask of the engine, and what they get back. Names are vLLM's where it has one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raykv.core.explain import MissReport
from raykv.core.namespace import DEFAULT, Namespace
from raykv.core.retention import DEFAULT_RETENTION, Retention
from raykv.core.tokens import as_tokens
from raykv.errors import RaykvError, RequestError

StopReason: TypeAlias = Literal["stop", "length", "abort"]

_MAX_FLOAT = sys.float_info.max


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt.

    Attributes:
        max_tokens: tokens to produce at most; fewer where the sequence reaches the longest length
            that the model or the pool has room for (``stop_reason`` is ``length`` then, too).
        temperature: 0 takes the likeliest token; above, the distribution is flattened by it.
        top_p: sample among the likeliest tokens that together have this probability.
        seed: makes sampling repeatable, whatever else runs; None draws one.
        stop: strings that end the output as soon as its text contains one of them.
        stop_token_ids: tokens that end the output, besides the model's own end-of-sequence ids.
        logprobs: 0 reports no log-probabilities; 1 those of the tokens chosen; k > 1 also the k
            likeliest tokens at each position.
        ignore_eos: go on after the model's end-of-sequence token.
        n: independent continuations of the prompt.

    Raises:
        RequestError: a value is out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value: object = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, list | set | frozenset):
                object.__setattr__(self, name, tuple(value))
        # Types count too: what is let through here would fail in the middle of a step.
        checks = {
            "max_tokens": (_is_int(self.max_tokens, 1), "a whole number of at least 1"),
            "temperature": (_is_number(self.temperature, 0, _MAX_FLOAT), "a finite number >= 0"),
            "top_p": (
                _is_number(self.top_p, 0, 1) and self.top_p > 0,
                "a number above 0 and at most 1",
            ),
            "seed": (
                self.seed is None or _is_int(self.seed, 0, 2**63 - 1),
                "None or a whole number between 0 and 2**63 - 1",
            ),
            "stop": (
                type(self.stop) is tuple and all(type(s) is str and s for s in self.stop),
                "non-empty strings",
            ),
            "stop_token_ids": (
                isinstance(self.stop_token_ids, tuple) and all(map(_is_int, self.stop_token_ids)),
                "a tuple of token ids",
            ),
            "logprobs": (_is_int(self.logprobs, 0), "a whole number of 0 or more"),
            "n": (_is_int(self.n, 1), "a whole number of at least 1"),
        }
        for name, (holds, rule) in checks.items():
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)!r}, but must be {rule}")


@dataclass(frozen=True, slots=True)
class Produced:
    """Tokens of an output that is not finished.

    Attributes:
        token_ids: the tokens.
        log_probs: of each of them, if asked for.
        top_log_probs: the likeliest tokens at each, if asked for.
        weights_versions: of the weights behind each.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    weights_versions: tuple[int, ...] = ()

    def with_delta(self, delta: TokenDelta) -> Produced:
        """The same and what came next."""
        return Produced(
            self.token_ids + delta.token_ids,
            self.log_probs + delta.log_probs,
            self.top_log_probs + delta.top_log_probs,
            self.weights_versions + (delta.weights_version,) * len(delta.token_ids),
        )


NOTHING = Produced()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One continuation to compute, as it travels to a rank.

    Attributes:
        request_id: unique among the requests of its driver.
        token_ids: int32 [n], the prompt.
        params: how to continue it.
        namespace: with whom its KV may be shared. Its weights version is 0 for whichever is served
            when the request is admitted, or the one that must be.
        sample_index: which of the ``params.n`` continuations it is.
        prompt_id: equal for the continuations of one prompt, which share its blocks.
        call_id: equal for all prompts of one call.
        retention: how dearly its cached blocks are kept.
        seed: of its random numbers where ``params`` has none, so that a rank that takes the request
            over goes on as the first one would have; None lets the engine draw one.
        produced: what a rank produced that was lost since.
        num_failed_over: times that its rank was lost.
    """

    request_id: str
    token_ids: NDArray[np.int32]
    params: SamplingParams
    namespace: Namespace = DEFAULT
    sample_index: int = 0
    prompt_id: str = ""
    call_id: str = ""
    retention: Retention = DEFAULT_RETENTION
    seed: int | None = None
    produced: Produced = NOTHING
    num_failed_over: int = 0


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """A finished continuation.

    Attributes:
        request_id: which request it answers.
        token_ids: the tokens produced, a final stop token included.
        text: what they say, special tokens left out; empty where the prompt came as token ids.
        log_probs: log-probability of each of them; empty unless asked for.
        stop_reason: ``stop`` (end-of-sequence, stop token or string), ``length`` or ``abort``.
        num_cached_tokens: prompt tokens that the first admission found in the prefix cache.
        num_preempted: times that its memory was taken away and recomputed.
        num_failed_over: times that its rank was lost and another one went on.
        weights_version: version of the weights that produced its last token; without any, of those
            that were to.
        weights_versions: the same of each token.
        top_log_probs: per token the likeliest tokens and their log-probabilities.
        sample_index: which of the ``n`` continuations it is.
        miss: why the first admission found no more there; None for a sample that was forked from
            another one.
        dp_rank: the rank that produced it.
        queue_s: seconds from submission to the first step that computed it.
        prefill_s: seconds from there to the first token.
        decode_s: seconds from there to the last token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    stop_reason: StopReason = "stop"
    num_cached_tokens: int = 0
    num_preempted: int = 0
    num_failed_over: int = 0
    weights_version: int = 0
    weights_versions: tuple[int, ...] = ()
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    text: str = ""
    sample_index: int = 0
    miss: MissReport | None = None
    dp_rank: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one engine step produced for one request.

    Attributes:
        request_id: which request it belongs to.
        token_ids: new tokens.
        log_probs: of each of them, if asked for.
        top_log_probs: the likeliest tokens at each, if asked for.
        output: the finished output, with the last delta.
        error: why the request failed, in place of an output.
        weights_version: version of the weights that the new tokens came from.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    output: TokenOutput | None = None
    error: RaykvError | None = None
    weights_version: int = 0

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.output is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can serve; drivers check requests against it before they travel.

    Attributes:
        vocab_size: token ids are 0..vocab_size-1.
        max_model_len: tokens that a sequence may reach, prompt and output.
        has_detokenizer: whether stop strings work.
    """

    vocab_size: int
    max_model_len: int
    has_detokenizer: bool = False

    def check(self, request: GenerationRequest) -> None:
        """Refuse what can never be served.

        Raises:
            RequestError: the prompt is empty, too long, no row of integers, or holds a token that
                does not exist; or stop strings were given and there is no tokenizer.
        """
        name = request.request_id
        try:
            tokens = as_tokens(request.token_ids)
        except ValueError as error:
            raise RequestError(f"{name}: {error}") from None
        if len(tokens) == 0:
            raise RequestError(f"{name}: the prompt is empty; send at least one token")
        if len(tokens) >= self.max_model_len:
            raise RequestError(
                f"{name}: the prompt has {len(tokens)} tokens, but prompt and output "
                f"together have room for {self.max_model_len}: shorten it, or raise num_blocks or "
                "max_model_len"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise RequestError(
                f"{name}: token id {low if low < 0 else high} is outside the vocabulary "
                f"0..{self.vocab_size - 1}; use the tokenizer of the model that is served"
            )
        if request.params.stop and not self.has_detokenizer:
            raise RequestError(
                f"{name}: stop strings need a tokenizer, and the model has none; use stop_token_ids"
            )


def _is_int(value: object, low: int = 0, high: float = float("inf")) -> bool:
    return isinstance(value, int | np.integer) and low <= int(value) <= high


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float | np.number) and low <= float(value) <= high
