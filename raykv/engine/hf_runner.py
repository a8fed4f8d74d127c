"""Runs a Hugging Face causal language model whose keys and values live in a rank's KVBuffers."""

import inspect
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import torch
    import transformers
except ImportError as error:
    raise ImportError(
        f"running a model needs {error.name}, not installed here; run: pip install 'raykv[model]'"
    ) from error

from raykv.engine.batch import StepBatch
from raykv.engine.hf_support import check_supported, loading, read_config, text_config
from raykv.engine.hf_weights import ModelWeights, Reader, Staged, give_back_device_memory
from raykv.engine.linear_attention import LinearStates, LinearStep
from raykv.engine.mixers import check_states_count, linear_layers, wrap_mixers
from raykv.engine.model_cache import quiet_transformers
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
from raykv.memory.spec import KVDtype, KVSpec, LayerSpec
from raykv.memory.state_buffers import StateBuffers
from raykv.memory.state_spec import StateSpec
from raykv.memory.xp import Device

# One entry for the whole process: the function keeps no state, each call brings its own.
transformers.AttentionInterface.register(IMPLEMENTATION, paged_attention)


_loading = threading.Lock()


class HFModelRunner:
    """A :class:`~raykv.engine.batch.ModelRunner` over transformers.

    Make one, create buffers for its ``kv_spec`` and ``state_spec``, ``bind`` them, then call
    ``forward`` per step. Batches are packed without padding as one row of T tokens; attention is
    raykv's own and reads the blocks, and linear layers read the states. One thread at a time. On
    the CPU set ``torch.set_num_threads`` yourself; one thread per rank is usually best.

    Args:
        model: a causal language model in its final dtype, on its final device. The runner takes
            it over: its attention is switched, and it no longer runs on its own.
        block_size: tokens per KV block.
        reader: reads the weights again by name, after they were dropped.

    Raises:
        NotSupportedError: the model has layers that neither causal attention over blocks nor a
            state per sequence can express.

    Attributes:
        vocab_size, max_model_len: of the model.
        eos_token_ids: tokens that end a text, as its generation config says.
        kv_spec: the layout that the buffers must have; linear layers keep nothing there.
        state_spec: what the linear layers keep per sequence; None for models that have none.
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
        attention = LayerSpec.attention(
            getattr(config, "num_key_value_heads", None) or num_heads,
            getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        )
        self._linear = linear_layers(config)
        self.kv_spec = KVSpec(
            tuple(
                LayerSpec(()) if layer in self._linear else attention
                for layer in range(config.num_hidden_layers)
            ),
            block_size,
            str(model.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # checked there
        )
        self.state_spec: StateSpec | None = None
        self.profile = False
        self.timings = dict.fromkeys(("gather", "attention", "write", "forward"), 0.0)
        self._buffers: KVBuffers | None = None
        self._kv: PagedKV | None = None
        self._state_buffers: StateBuffers | None = None
        self._states: LinearStates | None = None
        self._model = model.eval()
        self._weights = ModelWeights(model, reader)
        self._device: Device = "cuda" if model.device.type == "cuda" else "cpu"
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.2x, and warns about the old name.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._slices_logits = "logits_to_keep" in parameters
        model.set_attn_implementation(IMPLEMENTATION)
        wrap_mixers(model, self._linear)
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

    def bind(self, buffers: KVBuffers, states: StateBuffers | None = None) -> None:
        """Use these buffers from now on; zeroes their padding block.

        Args:
            buffers: of ``kv_spec``.
            states: of ``state_spec``, where the model has one.

        Raises:
            ConfigError: the buffers were made for another spec or device, or states are missing.
        """
        if self.state_spec is not None and states is None:
            raise ConfigError(
                f"{len(self._linear)} of the model's {self.kv_spec.num_layers} layers keep a state "
                "per sequence, and there are no buffers for it; create StateBuffers from "
                "runner.state_spec"
            )
        pairs = [("kv_spec", buffers, self.kv_spec), ("state_spec", states, self.state_spec)]
        for name, given, spec in pairs:
            if given is None:
                continue
            if given.spec != spec:
                raise ConfigError(
                    f"the buffers' layout ({given.spec}) is not the model's ({spec}); create them "
                    f"from runner.{name}"
                )
            if given.device != self._device:
                raise ConfigError(
                    f"the buffers lie on {given.device}, the model on {self._device}; "
                    "give both the same device"
                )
        self._buffers, self._state_buffers = buffers, states
        self._kv = PagedKV(buffers)
        self._states = None if states is None else LinearStates(states)

    def unbind(self) -> None:
        """Let go of the buffers, and of scratch memory."""
        self._buffers = self._kv = self._state_buffers = self._states = None
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

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner."""
        assert self._state_buffers is not None, "bind(buffers, states) comes first"
        self._state_buffers.copy(sources, targets)

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        """Write the new tokens' K/V into their slots; return logits, float32 [L, vocab_size].

        Leaves the sequences' states as they are after their last new token.
        """
        assert self._kv is not None, "bind(buffers) comes first"
        linear = None
        if self._linear:
            assert batch.state_slots is not None, "the scheduler names each sequence's state"
            linear = LinearStep(batch, self._kv.device, self._states)
        return self._run(self._kv, batch, linear)[0]

    def _run(
        self, kv: PagedKV, batch: StepBatch, linear: LinearStep | None
    ) -> tuple[NDArray[np.float32], PagedStep]:
        began = time.perf_counter()
        with torch.inference_mode():
            step = PagedStep(kv, batch, self.timings if self.profile else None, linear)
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
        """Run a few tokens through scratch buffers, so a misfit shows at load, not in service.

        What linear layers keep is found here too, by looking at what they leave.
        """
        name = self._model.config.model_type
        # transformers names kernels that are not installed; on the CPU they could not run anyway.
        quiet = quiet_transformers() if self._device == "cpu" else nullcontext()
        try:
            with _loading, quiet:
                self._run_probe()
        except NotSupportedError as error:
            raise NotSupportedError(f"model type {name!r}: {error}") from error
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise NotSupportedError(
                f"model type {name!r} does not run over a paged cache: {error!r}"
            ) from error

    def _run_probe(self) -> None:
        size = self.kv_spec.block_size
        kv = PagedKV(KVBuffers(self.kv_spec, 2 + 3 // size, device=self._device))
        if not self._linear:
            self._check(*self._run(kv, _probe_batch(0, 1, size), None))
            return
        first = _probe_batch(0, 2, size)
        recording = LinearStep(first, kv.device, None)
        self._check(*self._run(kv, first, recording))
        self.state_spec = recording.spec(self.kv_spec.num_layers)
        states = LinearStates(StateBuffers(self.state_spec, 2, device=self._device))

        def run(start: int, count: int) -> NDArray[np.float32]:
            batch = _probe_batch(start, count, size)
            linear = LinearStep(batch, kv.device, states)
            logits, step = self._run(kv, batch, linear)
            self._check(logits, step)
            return logits

        check_states_count(states, run)

    def _check(self, logits: NDArray[np.float32], step: PagedStep) -> None:
        layers = self.kv_spec.num_layers - len(self._linear)
        if (step.num_writes, step.num_reads) != (layers, layers):
            raise NotSupportedError(
                f"of {layers} attention layers {step.num_writes} wrote to the cache and "
                f"{step.num_reads} used the attention interface; all must"
            )
        if logits.shape != (1, self.vocab_size):
            raise NotSupportedError(
                f"it gives {logits.shape[-1]} logits for a vocabulary of {self.vocab_size}"
            )


def _probe_batch(start: int, count: int, block_size: int) -> StepBatch:
    """One sequence's next tokens, in blocks 1, 2, ... and the state's row 1."""
    positions = np.arange(start, start + count, dtype=np.int32)
    blocks = 1 + np.arange((start + count - 1) // block_size + 1, dtype=np.int32)
    return StepBatch(
        token_ids=positions,
        positions=positions,
        query_lens=np.array([count], np.int32),
        context_lens=np.array([start + count], np.int32),
        block_tables=blocks[None],
        slot_ids=block_size + positions.astype(np.int64),
        logit_rows=np.array([count - 1], np.int32),
        state_slots=np.ones(1, np.int64),
    )


def load_model(model: str | Path, *, dtype: KVDtype = "float32", device: Device = "cpu") -> Any:
    """Load a supported causal language model through transformers, with its own attention.

    Raises:
        ConfigError: files or weights are missing or damaged.
        NotSupportedError: raykv cannot run this kind of model.
    """
    # Loading changes settings of the whole process for a while, so one at a time.
    with loading(model), _loading, quiet_transformers():
        config = read_config(model)
        check_supported(text_config(config))
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(model),
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, in one line
        )
    # transformers fills missing weights with random numbers and only logs it.
    absent = sorted(info["missing_keys"])
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"])
        raise ConfigError(
            f"{len(info['mismatched_keys'])} weights of the model {str(model)!r} have other shapes "
            f"than its config says, such as {name}: {tuple(found)} instead of {tuple(expected)}; "
            "its files belong to different models"
        )
    if absent:
        raise ConfigError(
            f"the model {str(model)!r} lacks {len(absent)} weights, such as {absent[0]}; "
            "its files are incomplete or of another model"
        )
    return loaded.to(device)
