"""Which Hugging Face models raykv's engine can run, told from their config alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from raykv.engine.mixers import LINEAR
from raykv.errors import ConfigError, NotSupportedError


@contextmanager
def loading(model: str | Path) -> Iterator[None]:
    """Tell in one line what transformers does not like about a model's files.

    Raises:
        ConfigError: in place of its errors.
    """
    try:
        yield
    except (OSError, ValueError, TypeError, SafetensorError, StrictDataclassError) as error:
        if isinstance(error, ConfigError | NotSupportedError):
            raise
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"cannot load the model {str(model)!r}: {problem}; "
            "name a complete model folder, a hub id that can be reached, or a known model"
        ) from error


def read_config(model: str | Path) -> Any:
    """The config of a model folder or hub id.

    Raises:
        ConfigError: it is missing or damaged.
    """
    with loading(model):
        return transformers.AutoConfig.from_pretrained(str(model))


def text_config(config: Any) -> Any:
    """The config of what ``AutoModelForCausalLM`` loads: of some multimodal models the text part.

    The config itself, if the model is text only or loads whole.
    """
    text = config.get_text_config()
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if text is config or type(config) not in mapping:
        return config
    return text if mapping[type(config)].config_class is type(text) else config


def check_supported(config: Any) -> None:
    """Refuse models whose layers are neither plain causal nor linear attention.

    Raises:
        NotSupportedError: naming the model type and the reason.
    """
    reason = _unsupported(config)
    if reason:
        raise NotSupportedError(
            f"model type {config.model_type!r} is not supported: {reason}; raykv's engine runs "
            "decoder-only models with full causal and linear attention, such as Llama, Qwen3, "
            "Mistral, Qwen3-Next, Qwen3.5"
        )


def _unsupported(config: Any) -> str | None:
    get = partial(getattr, config)
    sizes = ("num_attention_heads", "num_hidden_layers", "max_position_embeddings")
    absent = [name for name in sizes if not isinstance(get(name, None), int)]
    window, longest = get("sliding_window", None), get("max_position_embeddings", 0)
    kinds = set(get("layer_types", None) or ["sliding_attention"])
    foreign = sorted(kinds - {"full_attention", "sliding_attention", LINEAR})
    windowed = "sliding_attention" in kinds and window is not None and window < longest
    extras = [name for name in ("attn_logit_softcapping", "alibi") if get(name, None)]
    rope = (get("rope_parameters", None) or {}).get("rope_type")
    # A rotation that follows the longest sequence in the batch would make KV depend on neighbours.
    changing = rope in {"dynamic", "longrope"}
    reasons = {
        "it is an encoder-decoder": get("is_encoder_decoder", False),
        "it is multimodal, and only its text part could run": config.get_text_config()
        is not config,
        f"its config has no {', '.join(absent)}": absent,
        "it uses multi-head latent attention (MLA)": get("kv_lora_rank", None),
        f"it has {', '.join(foreign)} layers": foreign,
        "none of its layers keeps keys and values": kinds == {LINEAR},
        f"it has sliding-window attention over {window} of {longest} positions": windowed,
        f"its attention uses {', '.join(extras)}": extras,
        f"its rotary embedding ({rope}) changes with the length of the text": changing,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
