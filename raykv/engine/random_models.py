"""Models of random weights by name: made on the spot, the same every time, without a network.

They say nothing sensible, but they are real in all else: transformers classes, a tokenizer of bytes
with a chat template, outputs that depend on the whole prompt. They stand in for hybrid models, of
which no small one can be had without a download.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raykv.engine.model_cache import CachedModel, OnProgress, quiet_transformers
from raykv.errors import ConfigError

# Changed whenever what is made changes, so that folders of an earlier recipe are made anew.
_RECIPE = "1"

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NUM_TOKENS = 256 + len(_SPECIAL_TOKENS)
_END_OF_TEXT, _END_OF_TURN = 256, 258

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model of random weights.

    Attributes:
        config_class: name of its config class in transformers.
        sizes: arguments of the config.
        disk_bytes: free space that making it needs.
    """

    config_class: str
    sizes: Mapping[str, Any]
    disk_bytes: int


# Every fourth layer is attention in both families, as their configs have it by default.
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 8192,
    # Rounding stays below 1e-5 in logits, and a wrong state is off by more than 0.1.
    "initializer_range": 0.04,
}

RANDOM_MODELS = {
    "qwen3_5-tiny": RandomModel("Qwen3_5TextConfig", _TINY, 10_000_000),
    "qwen3_next-tiny": RandomModel(
        "Qwen3NextConfig",
        {
            **_TINY,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        10_000_000,
    ),
    "qwen3_5-50m": RandomModel(
        "Qwen3_5TextConfig",
        {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "max_position_embeddings": 32768,
            "initializer_range": 0.02,
        },
        500_000_000,
    ),
}


def make(name: str, *, cache_dir: Path | None = None, on_progress: OnProgress) -> Path:
    """Return the folder of a model of random weights, making it when it is not there yet.

    Args:
        name: a key of :data:`RANDOM_MODELS`.
        cache_dir: where model folders live; see ``model_store.pull``.
        on_progress: told about each step.

    Raises:
        ConfigError: transformers is missing or too old for the model, or nothing can be written.
    """
    model = RANDOM_MODELS[name]

    def save(_: Path, folder: Path) -> None:
        on_progress("drawing random weights", None)
        with quiet_transformers():
            build(name).save_pretrained(folder)
            tokenizer().save_pretrained(folder)

    cached = CachedModel(
        name=name,
        folder=f"random-{name}",
        stamp={"recipe": _RECIPE},
        disk_bytes=model.disk_bytes,
        extras=("torch", "transformers"),
    )
    return cached.ensure(cache_dir, on_progress, save)


def build(name: str) -> Any:
    """Make the model of a name in memory, in float32 on the CPU; needs torch and transformers.

    Raises:
        ConfigError: transformers is too old for the model.
    """
    import torch  # noqa: PLC0415 - an extra
    import transformers  # noqa: PLC0415

    model = RANDOM_MODELS[name]
    config_class = getattr(transformers, model.config_class, None)
    if config_class is None:
        raise ConfigError(
            f"the model {name!r} needs {model.config_class}, which transformers "
            f"{transformers.__version__} does not have: install a newer one"
        )
    config = config_class(
        **model.sizes, vocab_size=_NUM_TOKENS, bos_token_id=None, eos_token_id=_END_OF_TURN
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(20)
        loaded = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter_name, parameter in loaded.named_parameters():
            if parameter_name.endswith(".A_log"):
                # By default most heads forget within a token or two, and a wrong state would hardly
                # show. These remember from some 4 to some 400 tokens.
                parameter.uniform_(-6.2, -1.6)
    loaded.generation_config.eos_token_id = [_END_OF_TURN, _END_OF_TEXT]
    return loaded


def tokenizer() -> Any:
    """Make the tokenizer of all these models: one token per byte of UTF-8, and special ones."""
    import tokenizers  # noqa: PLC0415 - comes with transformers
    import transformers  # noqa: PLC0415 - an extra

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    bytes_only.add_special_tokens(list(_SPECIAL_TOKENS))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",  # noqa: S106 - no password
        pad_token="<|endoftext|>",  # noqa: S106
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max(m.sizes["max_position_embeddings"] for m in RANDOM_MODELS.values()),
    )
