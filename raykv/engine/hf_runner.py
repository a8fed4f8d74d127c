"""Runs a Hugging Face causal language model whose keys and values live in a rank's KVBuffers."""

import inspect
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import torch
    import transformers
    from safetensors import SafetensorError
except ImportError as error:
    raise ImportError(
        f"running a model needs {error.name}, not installed here; run: pip install 'raykv[model]'"
    ) from error

from raykv.engine.batch import StepBatch
from raykv.engine.hf_weights import ModelWeights, Reader, Staged, give_back_device_memory
from raykv.engine.model_store import quiet_transformers
from raykv.engine.paged_attention import (
    IMPLEMENTATION,
    STEP_KWARG,
    PagedKV,
    PagedStep,
    paged_attention,
)
from raykv.engine.weights import PackedTensor
from raykv.errors import ConfigError, NotSupportedError
from raykv.memory.buffers import KVBuffers
from raykv.memory.copies import copy_blocks
from raykv.memory.spec import KVDtype, KVSpec
from raykv.memory.xp import Device

# One entry for the whole process: the function keeps no state, each call brings its own.
transformers.AttentionInterface.register(IMPLEMENTATION, paged_attention)


_loading = threading.Lock()


class HFModelRunner:
    """A :class:`~raykv.engine.batch.ModelRunner` over transformers.

    Make one, create buffers for its ``kv_spec``, ``bind`` them, then call ``forward`` per step.
    Batches are packed without padding as one row of T tokens; attention is raykv's own and reads
    the blocks. One thread at a time. On the CPU set ``torch.set_num_threads`` yourself; one thread
    per rank is usually best.

    Args:
        model: a causal language model in its final dtype, on its final device. The runner takes
            it over: its attention is switched, and it no longer runs on its own.
        block_size: tokens per KV block.
        reader: reads the weights again by name, after they were dropped.

    Raises:
        NotSupportedError: the model has layers that causal attention over blocks cannot express.

    Attributes:
        vocab_size, max_model_len: of the model.
        eos_token_ids: tokens that end a text, as its generation config says.
        kv_spec: the layout that the buffers must have.
        profile: add seconds to ``timings`` while true (on CUDA this makes every part wait).
        timings: ``gather`` (index work and K/V gathers), ``attention``, ``write`` and ``forward``,
            which is the total with the rest of the model.
    """

    def __init__(self, model: Any, block_size: int, reader: Reader | None = None) -> None:
        config = model.config
        check_supported(config)
        self.vocab_size: int = config.vocab_size
        self.max_model_len: int = config.max_position_embeddings
        eos = model.generation_config.eos_token_id
        self.eos_token_ids: tuple[int, ...] = (
            () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        )
        num_heads = config.num_attention_heads
        self.kv_spec = KVSpec.uniform(
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or num_heads,
            getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            block_size,
            str(model.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # checked there
        )
        self.profile = False
        self.timings = dict.fromkeys(("gather", "attention", "write", "forward"), 0.0)
        self._buffers: KVBuffers | None = None
        self._kv: PagedKV | None = None
        self._model = model.eval()
        self._weights = ModelWeights(model, reader)
        self._device: Device = "cuda" if model.device.type == "cuda" else "cpu"
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.2x, and warns about the old name.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._slices_logits = "logits_to_keep" in parameters
        model.set_attn_implementation(IMPLEMENTATION)
        self._probe()

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        block_size: int,
        dtype: KVDtype = "float32",
        device: Device = "cpu",
    ) -> "HFModelRunner":
        """Load a model folder or hub id, such as ``model_store.resolve_model`` returned.

        Raises:
            ConfigError: files are missing or damaged.
            NotSupportedError: raykv cannot run this kind of model; found before weights are read.
        """

        def reread() -> Mapping[str, Any]:
            tensors: Mapping[str, Any] = load_model(model, dtype=dtype).state_dict()
            return tensors

        return cls(load_model(model, dtype=dtype, device=device), block_size, reread)

    def bind(self, buffers: KVBuffers) -> None:
        """Use these buffers from now on; zeroes their padding block.

        Raises:
            ConfigError: the buffers were made for another spec or device.
        """
        if buffers.spec != self.kv_spec:
            raise ConfigError(
                f"the buffers' layout ({buffers.spec}) is not the model's ({self.kv_spec}); "
                "create them from runner.kv_spec"
            )
        if buffers.device != self._device:
            raise ConfigError(
                f"the buffers lie on {buffers.device}, the model on {self._device}; "
                "give both the same device"
            )
        self._buffers = buffers
        self._kv = PagedKV(buffers)

    def unbind(self) -> None:
        """Let go of the buffers, and of scratch memory."""
        self._buffers = self._kv = None
        give_back_device_memory()

    def stage(self, weights: str | dict[str, PackedTensor]) -> Staged:
        """See ReloadableRunner."""
        return self._weights.stage(weights)

    @property
    def can_reload(self) -> bool:
        """See ReloadableRunner."""
        return self._weights.reader is not None

    def reload(self) -> Staged:
        """See ReloadableRunner."""
        return self._weights.reload()

    def drop(self) -> None:
        """See ReloadableRunner."""
        self._weights.drop()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner."""
        assert self._buffers is not None, "bind(buffers) comes first"
        copy_blocks(self._buffers, sources, targets)

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        """Write the new tokens' K/V into their slots; return logits, float32 [L, vocab_size]."""
        assert self._kv is not None, "bind(buffers) comes first"
        return self._run(self._kv, batch)[0]

    def _run(self, kv: PagedKV, batch: StepBatch) -> tuple[NDArray[np.float32], PagedStep]:
        began = time.perf_counter()
        with torch.inference_mode():
            step = PagedStep(kv, batch, self.timings if self.profile else None)
            rows = torch.from_numpy(batch.logit_rows.astype(np.int64)).to(kv.device)
            extra = {"logits_to_keep": rows} if self._slices_logits else {}
            logits = self._model(
                input_ids=torch.from_numpy(batch.token_ids[None].astype(np.int64)).to(kv.device),
                position_ids=torch.from_numpy(batch.positions[None].astype(np.int64)).to(kv.device),
                use_cache=True,
                **{self._cache_name: step, STEP_KWARG: step},
                **extra,
            ).logits[0]
            if not self._slices_logits:
                logits = logits[rows]
            result: NDArray[np.float32] = logits.float().cpu().numpy()
        if self.profile:
            self.timings["forward"] += time.perf_counter() - began
        return result, step

    def _probe(self) -> None:
        """Run one token through scratch buffers, so that a misfit shows at load, not in service."""
        kv = PagedKV(KVBuffers(self.kv_spec, 2, device=self._device))
        one = np.ones(1, np.int32)
        slots = np.array([self.kv_spec.block_size], np.int64)
        batch = StepBatch(one - 1, one - 1, one, one, one[None], slots, one - 1)
        name = self._model.config.model_type
        try:
            logits, step = self._run(kv, batch)
        except NotSupportedError as error:
            raise NotSupportedError(f"model type {name!r}: {error}") from error
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise NotSupportedError(
                f"model type {name!r} does not run over a paged cache: {error!r}"
            ) from error
        layers = self.kv_spec.num_layers
        if (step.num_writes, step.num_reads) != (layers, layers):
            raise NotSupportedError(
                f"model type {name!r}: of {layers} layers {step.num_writes} wrote to the cache and "
                f"{step.num_reads} used the attention interface; all must"
            )
        if logits.shape != (1, self.vocab_size):
            raise NotSupportedError(
                f"model type {name!r} gives {logits.shape[-1]} logits for a vocabulary of "
                f"{self.vocab_size}"
            )


def load_model(model: str | Path, *, dtype: KVDtype = "float32", device: Device = "cpu") -> Any:
    """Load a supported causal language model through transformers, with its own attention.

    Raises:
        ConfigError: files or weights are missing or damaged.
        NotSupportedError: raykv cannot run this kind of model.
    """
    try:
        # Loading changes settings of the whole process for a while, so one at a time.
        with _loading, quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(str(model))
            check_supported(config)
            loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
                str(model),
                config=config,
                dtype=getattr(torch, dtype),
                output_loading_info=True,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"cannot load the model {str(model)!r}: {str(error).strip()}; "
            "name a complete model folder, a hub id that can be reached, or a known model"
        ) from error
    # transformers fills missing weights with random numbers and only logs it.
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise ConfigError(
            f"the model {str(model)!r} lacks {len(absent)} weights, such as {absent[0]}; "
            "its files are incomplete or of another model"
        )
    return loaded.to(device)


def check_supported(config: Any) -> None:
    """Refuse models whose layers are not plain causal attention.

    Raises:
        NotSupportedError: naming the model type and the reason.
    """
    reason = _unsupported(config)
    if reason:
        raise NotSupportedError(
            f"model type {config.model_type!r} is not supported: {reason}; raykv's engine runs "
            "decoder-only models with full causal attention, such as Llama, Qwen2, Qwen3, Mistral"
        )


def _unsupported(config: Any) -> str | None:
    get = partial(getattr, config)
    sizes = ("num_attention_heads", "num_hidden_layers", "max_position_embeddings")
    absent = [name for name in sizes if not isinstance(get(name, None), int)]
    window, longest = get("sliding_window", None), get("max_position_embeddings", 0)
    kinds = set(get("layer_types", None) or ["sliding_attention"])
    foreign = sorted(kinds - {"full_attention", "sliding_attention"})
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
        f"it has sliding-window attention over {window} of {longest} positions": windowed,
        f"its attention uses {', '.join(extras)}": extras,
        f"its rotary embedding ({rope}) changes with the length of the text": changing,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
