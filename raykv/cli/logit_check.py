"""Whether a prompt gives the same logits from cached blocks, and whether we would notice if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from raykv.engine.batch import ModelRunner, StepBatch
from raykv.engine.params import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from raykv.engine.engine import Engine

MAX_LOGIT_DIFF = 1e-4
MIN_CORRUPTED_DIFF = 1e-3


@dataclass(frozen=True, slots=True)
class LogitCheck:
    """Largest differences between a cold prefill's last logits and those of later ones.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_shared_tokens: those that the warm prefill took from the cache.
        max_diff: cold against warm, which must be rounding.
        corrupted_diff: cold against warm after one cached block was overwritten with noise, which
            must show.
        lost_state_diff: cold against warm after all checkpoints of recurrent state were zeroed,
            which must show; None for models that have none.
    """

    num_prompt_tokens: int
    num_shared_tokens: int
    max_diff: float
    corrupted_diff: float
    lost_state_diff: float | None = None

    @property
    def is_equal(self) -> bool:
        """Whether the cache changes nothing."""
        return self.num_shared_tokens > 0 and self.max_diff <= MAX_LOGIT_DIFF

    @property
    def can_tell(self) -> bool:
        """Whether the comparison notices a bad block: the negative control."""
        return self.corrupted_diff > MIN_CORRUPTED_DIFF

    @classmethod
    def worst(cls, checks: Sequence[Self]) -> Self:
        """Several checks as one: the largest difference that is rounding, the smallest that is not.

        Args:
            checks: at least one.
        """
        lost = [check.lost_state_diff for check in checks if check.lost_state_diff is not None]
        return cls(
            sum(check.num_prompt_tokens for check in checks),
            sum(check.num_shared_tokens for check in checks),
            max(check.max_diff for check in checks),
            min(check.corrupted_diff for check in checks),
            min(lost, default=None),
        )


class _Recorder:
    """A model runner that keeps the last logits that went through it."""

    def __init__(self, model: ModelRunner) -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.kv_spec = model.kv_spec
        self.state_spec = model.state_spec
        self.last: NDArray[np.float32] = np.empty((0, 0), np.float32)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._model.copy_blocks(sources, targets)

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._model.copy_states(sources, targets)

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        self.last = self._model.forward(batch)
        return self.last


def check_logits(engine: Engine, prompt: Sequence[int], seed: int = 0) -> LogitCheck:
    """Prefill a prompt with an empty cache, from the cache, and from caches with one bad part.

    Leaves the engine's cache empty.

    Args:
        engine: in process, idle, its KV on the CPU in float32; its model is put back at the end.
        prompt: token ids, more than one block.
        seed: of the noise.
    """
    tokens = np.array(prompt, np.int32)
    manager, buffers = engine.kv.block_manager, engine.kv.buffers
    assert buffers is not None, "a rank with an engine has buffers"
    model, recorder = engine.model, _Recorder(engine.model)
    engine.model = recorder
    try:
        engine.kv.reset_prefix_cache()
        cold, _ = _prefill(engine, recorder, tokens)
        warm, num_shared = _prefill(engine, recorder, tokens)
        with manager.allocate_shared(tokens[:-1]) as shared:
            # One that was reused, which is not all that is cached; none, if nothing is cached.
            middle = shared.ids[num_shared // manager.block_size // 2 :][:1].copy()
        noise = np.random.default_rng(seed).standard_normal(buffers.storage.shape[1:])
        buffers.storage[middle] = noise
        corrupted, _ = _prefill(engine, recorder, tokens)
        lost_state_diff = None
        if engine.kv.states is not None:
            lost_state_diff = _diff(cold, _without_states(engine, recorder, tokens))
    finally:
        engine.model = model
        engine.kv.reset_prefix_cache()
    return LogitCheck(
        len(tokens), num_shared, _diff(cold, warm), _diff(cold, corrupted), lost_state_diff
    )


def _without_states(
    engine: Engine, recorder: _Recorder, tokens: NDArray[np.int32]
) -> NDArray[np.float32]:
    """The logits of a prompt that goes on from a checkpoint of nothing but zeros."""
    buffers = engine.kv.state_buffers
    assert buffers is not None, "a model with recurrent state has memory for it"
    engine.kv.reset_prefix_cache()
    _prefill(engine, recorder, tokens)
    slots = np.arange(1, buffers.num_slots)
    buffers.copy(np.zeros_like(slots), slots)  # from the padding slot, which is zeros
    return _prefill(engine, recorder, tokens)[0]


def _prefill(
    engine: Engine, recorder: _Recorder, tokens: NDArray[np.int32]
) -> tuple[NDArray[np.float32], int]:
    """Produce one token; the logits it was chosen from, and how many tokens were cached."""
    engine.submit([GenerationRequest("check", tokens, SamplingParams(max_tokens=1))])
    while True:
        for _, delta in engine.step():
            if delta.error is not None:
                raise delta.error
            if delta.output is not None:
                return recorder.last[-1], delta.output.num_cached_tokens


def _diff(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.abs(one - other).max())
