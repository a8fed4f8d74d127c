"""From the demo's options to a pool's configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raykv.config import LinearStateConfig, PoolConfig
from raykv.errors import ConfigError, NotSupportedError

_STRIDE_TOKENS = 256  # one step's work
_NUM_CHECKPOINTS = 256


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user asked for; None where nothing was said.

    Attributes:
        model: a known name, a folder or a hub id.
        model_class: the name of a model of random weights, instead of a model.
        conversations: a file of conversations.
        config: a YAML file of a PoolConfig; options win over it.
        ranks: dp_size.
        num_blocks: blocks per rank, padding included.
        block_size: tokens per block.
        max_tokens: tokens per answer.
        eviction: the eviction policy.
        quick: whether to do little.
        host_blocks: host blocks of each tier, padding included.
    """

    model: str | None = None
    conversations: Path | None = None
    config: Path | None = None
    ranks: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    max_tokens: int | None = None
    quick: bool = False
    eviction: str | None = None
    model_class: str | None = None
    host_blocks: int | None = None


def pool_config(options: DemoOptions) -> PoolConfig:
    """The configuration of the demo's ranks: a file's settings, under the options, over defaults.

    Raises:
        ConfigError: a setting is impossible, or the file is bad.
        NotSupportedError: K/V are not float32, in which warm and cold must agree to 1e-4.
    """
    values: dict[str, Any] = {"dp_size": 2, "num_blocks": 512, "block_size": 16}
    if options.config is not None:
        values |= PoolConfig.from_yaml(options.config).model_dump(exclude_unset=True)
    chosen = {
        "dp_size": options.ranks,
        "num_blocks": options.num_blocks,
        "block_size": options.block_size,
        "eviction": options.eviction,
    }
    values |= {name: value for name, value in chosen.items() if value is not None}
    model = dict(values.get("model") or {})
    # Short steps: the first request publishes the system prompt before the others are admitted.
    model.setdefault("max_num_batched_tokens", 256)
    model.setdefault("path", "smollm2")
    path = _model_path(options)
    if path is not None:
        model["path"] = path
    if options.host_blocks is not None:
        values["host"] = dict(values.get("host") or {}) | {"num_blocks": options.host_blocks}
    memory = dict(values.get("memory") or {})
    memory.setdefault("device", "cpu")
    if memory.get("dtype", "float32") != "float32":
        raise NotSupportedError(
            f"memory.dtype is {memory['dtype']}, but the demo compares logits to 1e-4: "
            "use float32, or leave it out"
        )
    states = values.get("linear_state") or {}
    if states.get("checkpoint_dtype", "float32") != "float32":
        raise NotSupportedError(
            f"linear_state.checkpoint_dtype is {states['checkpoint_dtype']}, which rounds, but the "
            "demo compares logits to 1e-4: use float32, or leave it out"
        )
    try:
        return PoolConfig(**{**values, "model": model, "memory": memory})
    except ConfigError as error:
        raise ConfigError(_in_option_names(str(error))) from None


def without_cache(config: PoolConfig) -> PoolConfig:
    """The same configuration, but nothing is ever found again, neither here nor on the host."""
    return config.model_copy(update={"enable_prefix_cache": False, "host": None, "store": None})


def with_checkpoints(config: PoolConfig) -> PoolConfig:
    """The same configuration for a model with recurrent state: with slots, unless it has some."""
    if config.linear_state is not None:
        return config
    stride = max(1, _STRIDE_TOKENS // config.block_size) * config.block_size
    states = LinearStateConfig(
        num_slots=config.num_single_blocks + _NUM_CHECKPOINTS, match="deepest", stride_tokens=stride
    )
    return config.model_copy(update={"linear_state": states})


def _model_path(options: DemoOptions) -> str | None:
    if options.model_class is None:
        return options.model
    from raykv.engine.random_models import RANDOM_MODELS  # noqa: PLC0415 - costs time to import

    if options.model is not None:
        raise ConfigError(
            f"--model {options.model} and --model-class {options.model_class} are both given: "
            "choose one"
        )
    if options.model_class not in RANDOM_MODELS:
        raise ConfigError(
            f"--model-class {options.model_class!r} is not known: choose one of "
            f"{', '.join(RANDOM_MODELS)}"
        )
    return options.model_class


def one_rank(config: PoolConfig, num_blocks: int, **model: Any) -> PoolConfig:
    """The configuration of one rank in this process, on the CPU, for the same model and blocks.

    Args:
        config: of the demo's pool.
        num_blocks: its blocks, padding included.
        model: settings of the model that differ.
    """
    assert config.model is not None, "pool_config sets it"
    values: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": config.block_size,
        "memory": {"device": "cpu"},
        "model": config.model.model_dump() | model,
        "max_num_seqs": config.max_num_seqs,
        "linear_state": config.linear_state,
    }
    return PoolConfig(**values)


def quiet_libraries() -> None:
    """Keep libraries from writing between our lines; for this process and the ranks it starts."""
    for name, value in (
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_HUB_VERBOSITY", "error"),
        ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
    ):
        os.environ.setdefault(name, value)


def _in_option_names(message: str) -> str:
    """Call settings what the user called them."""
    for setting, option in (
        ("host.num_blocks", "--host-blocks"), ("dp_size", "--ranks"),
        ("num_blocks", "--num-blocks"), ("block_size", "--block-size"),
    ):  # fmt: skip
        message = message.replace(f"{setting}:", f"{option}:")
    return message
