"""The same model through plain transformers: what raykv's answers are held against."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class Reference:
    """A model with transformers' own attention and cache.

    Args:
        model: a causal language model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def load(cls, path: str) -> Self:
        """Load a model in float32 on the CPU.

        Raises:
            ConfigError: its files are missing or damaged.
        """
        from raykv.engine.hf_runner import load_model  # noqa: PLC0415 - torch is an extra
        from raykv.engine.model_store import resolve_model  # noqa: PLC0415

        return cls(load_model(resolve_model(path)).eval())

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The next token's logits after some tokens, float32 [vocab_size]."""
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            output = self._model(input_ids=_row(token_ids), use_cache=False, logits_to_keep=1)
        logits: NDArray[np.float32] = output.logits[0, -1].float().numpy()
        return logits

    def generate(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Let transformers go on greedily, up to its end-of-sequence token or ``max_tokens``."""
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415

        from raykv.engine.model_store import quiet_transformers  # noqa: PLC0415

        eos = self._model.generation_config.eos_token_id
        config = transformers.GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos[0] if isinstance(eos, list) else eos,
        )
        prompt = _row(token_ids)
        # The model's own settings (such as a repetition penalty) would fill what config leaves out.
        before, self._model.generation_config = self._model.generation_config, config
        try:
            with torch.inference_mode(), quiet_transformers():
                output = self._model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), generation_config=config
                )
        finally:
            self._model.generation_config = before
        return [int(token) for token in output[0, prompt.shape[1] :]]

    def decode_times(
        self,
        prompts: Sequence[Sequence[int]],
        num_warmup: int,
        num_steps: int,
        on_step: Callable[[float], None],
    ) -> tuple[list[float], list[float]]:
        """Decode greedily with a DynamicCache, all prompts as one batch.

        Args:
            prompts: of equal length, so that nothing is padded.
            num_warmup: steps before the measured ones.
            num_steps: steps that are measured.
            on_step: told about the fraction done.

        Returns:
            Seconds per step, and seconds per step in the cache's update, which concatenates.
        """
        import torch  # noqa: PLC0415

        cache = _timed_cache(self._model.config)
        steps, updates = [], []
        tokens = torch.tensor([list(row) for row in prompts])
        with torch.inference_mode():
            for step in range(1 + num_warmup + num_steps):
                before, began = cache.update_s, time.perf_counter()
                output = self._model(
                    input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                tokens = output.logits[:, -1].argmax(-1, keepdim=True)
                steps.append(time.perf_counter() - began)
                updates.append(cache.update_s - before)
                on_step(step / (num_warmup + num_steps))
        return steps[1 + num_warmup :], updates[1 + num_warmup :]


def _timed_cache(config: Any) -> Any:
    """A DynamicCache that adds up the seconds its updates take."""
    import transformers  # noqa: PLC0415

    class TimedCache(transformers.DynamicCache):  # type: ignore[misc]  # untyped
        update_s = 0.0

        def update(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = super().update(*args, **kwargs)
            self.update_s += time.perf_counter() - began
            return result

    return TimedCache(config=config)


def _row(token_ids: Sequence[int]) -> Any:
    import torch  # noqa: PLC0415

    return torch.tensor([[int(token) for token in token_ids]])
