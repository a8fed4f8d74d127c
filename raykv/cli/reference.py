"""The same model through plain transformers: what raykv's answers are held against."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
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

        from raykv.engine.model_cache import quiet_transformers  # noqa: PLC0415

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

    def decoder(self, prompts: Sequence[Sequence[int]]) -> DynamicDecoder:
        """Greedy decoding of prompts of equal length as one batch, over a DynamicCache."""
        return DynamicDecoder(self._model, prompts)


class DynamicDecoder:
    """Decodes a batch with transformers' DynamicCache; the baseline of raykv's decode steps.

    Args:
        model: a causal language model with its own attention.
        prompts: of equal length, so that nothing is padded.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        import torch  # noqa: PLC0415

        self._model = model
        self._cache = _timed_cache(model.config)
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.2x, and warns about the old name.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._tokens = torch.tensor([list(row) for row in prompts])

    def step(self) -> tuple[float, float]:
        """Prefill at first, then decode one token each.

        Returns:
            Seconds of the step, and those of it in the cache's update, which concatenates.
        """
        import torch  # noqa: PLC0415

        before, began = self._cache.update_s, time.perf_counter()
        with torch.inference_mode():
            output = self._model(
                input_ids=self._tokens,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: self._cache},
            )
            self._tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - began, self._cache.update_s - before


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
