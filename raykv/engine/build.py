"""Making a rank from its configuration: KV, and an engine where a model is configured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raykv.config import ModelConfig, PoolConfig
from raykv.errors import ConfigError
from raykv.host.store_build import weights_name
from raykv.memory.xp import resolve_device
from raykv.rank import RankKV

from .engine import Engine


def build_rank(config: PoolConfig, dp_rank: int) -> tuple[RankKV, Engine | None]:
    """One rank's KV and, with a model, the engine that serves it.

    Raises:
        ConfigError: the model, the device or the memory cannot be had.
    """
    model = config.model
    if model is None or config.memory is None:
        kv = RankKV(config, dp_rank)
        if config.store is not None:
            kv.weights_name = weights_name(config.store, None)
        return kv, None
    runner = _load_runner(config, model)
    if config.max_model_len is None:
        config = config.model_copy(update={"max_model_len": runner.max_model_len})
    elif config.max_model_len > runner.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but {model.path} reaches "
            f"{runner.max_model_len} tokens: lower it"
        )
    if runner.state_spec is None and config.has_linear_state:
        raise ConfigError(
            f"linear_state is configured, but no layer of {model.path} keeps a recurrent state: "
            "leave it out"
        )
    kv = RankKV(config, dp_rank, runner.kv_spec, runner.state_spec)
    assert kv.buffers is not None, "a spec makes buffers"
    runner.bind(kv.buffers, kv.state_buffers)
    if config.store is not None:
        from .model_store import resolve_model  # noqa: PLC0415 - an extra

        kv.weights_name = weights_name(config.store, Path(resolve_model(model.path)))
    tokenizer = load_tokenizer(model.path)

    def detokenize(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids))

    return kv, Engine(
        runner,
        kv,
        max_num_batched_tokens=model.max_num_batched_tokens,
        eos_token_ids=runner.eos_token_ids,
        detokenize=None if tokenizer is None else detokenize,
    )


def load_tokenizer(path: str) -> Any:
    """A model's Hugging Face tokenizer, or None if it has none.

    Raises:
        ConfigError: the model itself cannot be had.
    """
    import transformers  # noqa: PLC0415 - an extra, and seconds to import

    from .model_store import resolve_model  # noqa: PLC0415

    folder = resolve_model(path)  # its errors are ValueErrors, too, and must be seen
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        return None


def _load_runner(config: PoolConfig, model: ModelConfig) -> Any:
    assert config.memory is not None, "the configuration fills it in"
    try:
        import torch  # noqa: PLC0415 - an extra

        from .hf_runner import HFModelRunner  # noqa: PLC0415
        from .model_store import resolve_model  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"model {model.path} needs {error.name}: pip install 'raykv[model]'"
        ) from None
    torch.set_num_threads(model.num_threads)
    return HFModelRunner.load(
        resolve_model(model.path),
        block_size=config.block_size,
        dtype=config.memory.dtype,
        device=resolve_device(config.memory.device),
    )
