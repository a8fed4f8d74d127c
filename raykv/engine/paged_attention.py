"""Attention over a rank's KV blocks, for any Hugging Face model that uses the AttentionInterface.

The model sees two things of ours. As its *cache* it gets a :class:`PagedStep`, whose ``update``
writes the new tokens' keys and values into their slots. As its *attention* it gets
:func:`paged_attention`, which reads keys and values back from those blocks only, the new ones
included. Both are the same object, made once per step and passed along per call, so any number of
runners can live in one process.

Memory is addressed by token rows. For one layer, ``[block, k or v, slot]`` is a row of
``num_kv_heads * head_dim`` elements at ``block * row_stride + slot``, and a value lies
``block_size`` rows after its key, so one gather fetches both.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raykv.engine.batch import StepBatch
from raykv.engine.linear_attention import LinearStep
from raykv.errors import NotSupportedError
from raykv.memory.buffers import KVBuffers

IMPLEMENTATION = "raykv_paged"
STEP_KWARG = "raykv_step"

# Keys and values of one decode group, in bytes. On the CPU they should still lie in the L2 cache
# when attention reads them: groups of 2 MiB took 96 ms where one group of all 32 sequences took
# 146 (SmolLM2, context 300). On a GPU the bound only limits the scratch memory.
_GROUP_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}


class PagedKV:
    """The token rows of a rank's buffers, as torch tensors that share their memory.

    Attributes:
        num_kv_heads, head_dim, block_size: the layout of a block.
        row_stride: rows from one block to the next, over all layers that keep something.
        layers: per layer of the model a contiguous ``[rows, num_kv_heads * head_dim]``, beginning
            at the layer's keys of block 0; None for layers that keep nothing per token.
    """

    def __init__(self, buffers: KVBuffers) -> None:
        spec = buffers.spec
        keeping = [layer for layer, kept in enumerate(spec.layers) if kept.tensors]
        assert len({spec.layers[layer] for layer in keeping}) == 1, "the runner's are uniform"
        self.num_kv_heads, self.head_dim = spec.layers[keeping[0]].tensors[0].shape
        self.block_size = spec.block_size
        self.row_stride = 2 * spec.block_size * len(keeping)
        # Block 0 feeds the padding, and even masked padding must be finite: see step_groups.
        buffers.storage[0] = 0
        storage: Any = buffers.storage
        if spec.dtype == "bfloat16":
            storage = storage.view(np.int16)
        flat = (torch.from_dlpack if buffers.device == "cuda" else torch.from_numpy)(storage)
        rows = flat.view(getattr(torch, spec.dtype)).view(-1, self.num_kv_heads * self.head_dim)
        self.layers: list[Any] = [None] * spec.num_layers
        for ordinal, layer in enumerate(keeping):
            self.layers[layer] = rows[2 * self.block_size * ordinal :]
        self.device = rows.device
        self.group_tokens = _GROUP_BYTES[buffers.device] // (2 * rows.shape[1] * spec.itemsize)
        self._scratch = rows.new_empty(0, rows.shape[1])

    def gather(self, layer: int, rows: Any) -> Any:
        """Copy keys and values of n tokens into scratch memory, valid until the next gather.

        Args:
            layer: which layer.
            rows: int64 [2 n], the keys' rows, then the values'.

        Returns:
            ``[2, n, num_kv_heads, head_dim]``.
        """
        count = rows.shape[0]
        if self._scratch.shape[0] < count:
            # Kept, because fresh memory of this size is paged in anew for each layer.
            self._scratch = self._scratch.new_empty(count, self._scratch.shape[1])
        target = self._scratch[:count]
        torch.index_select(self.layers[layer], 0, rows, out=target)
        return target.view(2, count // 2, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several new tokens: rows [start, stop) of the batch."""

    start: int
    stop: int
    rows: Any  # int64 [2 * context]
    mask: Any  # bool [new, context], or None where context == new: plainly causal


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one new token each and similar contexts: [start, stop) of the decode order."""

    start: int
    stop: int
    rows: Any  # int64 [2 * sequences * longest context], padding reads slot 0 of block 0
    mask: Any  # bool [sequences, 1, 1, longest context], or None where no padding is


class PagedStep:
    """All that one forward pass needs to write and read KV; index tensors are built once, here.

    Serves transformers as the cache object of this pass.

    Args:
        kv: where keys and values lie.
        batch: what is computed.
        timings: seconds to add to, or None.
        linear: what layers that keep a state need; None for models that have none.

    Attributes:
        num_writes, num_reads: layers that wrote and attended so far.
        linear: see above.
    """

    def __init__(
        self,
        kv: PagedKV,
        batch: StepBatch,
        timings: dict[str, float] | None,
        linear: LinearStep | None = None,
    ) -> None:
        self.linear = linear
        self.num_writes = 0
        self.num_reads = 0
        self._kv = kv
        self._timings = timings
        began = self._lap("", 0.0)
        block, offset = np.divmod(batch.slot_ids, kv.block_size)
        keys = block * kv.row_stride + offset
        self._key_rows, self._value_rows = self._put(keys), self._put(keys + kv.block_size)
        starts = np.concatenate(([0], np.cumsum(batch.query_lens, dtype=np.int64)))
        assert starts[-1] == len(batch.token_ids)
        assert (batch.query_lens > 0).all()
        self._prefills = [
            self._prefill(batch, int(row), int(starts[row]), int(starts[row + 1]))
            for row in np.flatnonzero(batch.query_lens > 1)
        ]
        decodes = np.flatnonzero(batch.query_lens == 1)
        order = decodes[np.argsort(-batch.context_lens[decodes], kind="stable")]
        self._decode_rows = self._put(starts[order])
        self._decodes = [
            self._decode(batch, order, start, stop)
            for start, stop in step_groups(batch.context_lens[order], kv.group_tokens)
        ]
        self._lap("gather", began)

    def update(self, key: Any, value: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write the new tokens' keys and values, each [1, num_kv_heads, T, head_dim]."""
        began = self._lap("", 0.0)
        kv = self._kv
        expected = (1, kv.num_kv_heads, self._key_rows.shape[0], kv.head_dim)
        if key.shape != expected or value.shape != expected:
            raise NotSupportedError(
                f"layer {layer_idx} keeps keys {tuple(key.shape)} and values {tuple(value.shape)}, "
                f"expected {expected}: its heads differ from what the model's config says"
            )
        layer = kv.layers[layer_idx]
        if layer is None:
            raise NotSupportedError(
                f"layer {layer_idx} keeps keys and values, but its config says it keeps a state"
            )
        layer.index_copy_(0, self._key_rows, key[0].transpose(0, 1).reshape(key.shape[2], -1))
        layer.index_copy_(0, self._value_rows, value[0].transpose(0, 1).reshape(key.shape[2], -1))
        self.num_writes += 1
        self._lap("write", began)
        return key, value

    def attend(self, query: Any, layer_idx: int, scaling: float | None) -> Any:
        """Attend from the new tokens to their sequences' whole contexts.

        Args:
            query: ``[1, num_heads, T, head_dim]``.
            layer_idx: which layer's KV to read.
            scaling: factor of the scores; ``head_dim ** -0.5`` if None.

        Returns:
            ``[1, T, num_heads, head_dim]``.
        """
        began = self._lap("", 0.0)
        kv, sdpa = self._kv, torch.nn.functional.scaled_dot_product_attention
        by_token = query[0].transpose(0, 1)
        num_tokens, num_heads, head_dim = by_token.shape
        out = query.new_empty(num_tokens, num_heads, head_dim)
        for part in self._prefills:
            began = self._lap("attention", began)
            keys, values = kv.gather(layer_idx, part.rows).transpose(1, 2).unsqueeze(1)
            began = self._lap("gather", began)
            if part.mask is not None and query.is_cuda:
                # No fused CUDA kernel takes grouped heads and a mask at once.
                repeats = num_heads // kv.num_kv_heads
                keys, values = (x.repeat_interleave(repeats, 1) for x in (keys, values))
            new = query[:, :, part.start : part.stop]
            causal = part.mask is None
            result = sdpa(new, keys, values, part.mask, 0.0, causal, scale=scaling, enable_gqa=True)
            out[part.start : part.stop] = result[0].transpose(0, 1)
        if self._decodes:
            queries = by_token.index_select(0, self._decode_rows)
            results = torch.empty_like(queries)
            for group in self._decodes:
                began = self._lap("attention", began)
                count = group.stop - group.start
                keys, values = (
                    kv.gather(layer_idx, group.rows)
                    .view(2, count, -1, kv.num_kv_heads, head_dim)
                    .transpose(2, 3)
                )
                began = self._lap("gather", began)
                # The query heads that share a KV head stand as that head's queries: no repeated
                # keys (a third of the time), and fused CUDA kernels take it with a mask.
                grouped = queries[group.start : group.stop].view(
                    count, kv.num_kv_heads, -1, head_dim
                )
                result = sdpa(grouped, keys, values, group.mask, scale=scaling)
                results[group.start : group.stop] = result.reshape(count, num_heads, head_dim)
            out.index_copy_(0, self._decode_rows, results)
        self.num_reads += 1
        self._lap("attention", began)
        return out.unsqueeze(0)

    def _prefill(self, batch: StepBatch, row: int, start: int, stop: int) -> _Prefill:
        context, new = int(batch.context_lens[row]), stop - start
        keys = self._token_rows(batch.block_tables[row : row + 1], context)[0]
        mask = None
        if context > new:  # the last query sees everything, so align the triangle to the end
            mask = self._put(np.tri(new, context, context - new, dtype=np.bool_))
        return _Prefill(start, stop, self._put(np.concatenate((keys, keys + self._bs))), mask)

    def _decode(self, batch: StepBatch, order: NDArray[Any], start: int, stop: int) -> _Decode:
        members = order[start:stop]
        contexts = batch.context_lens[members]
        longest = int(contexts[0])
        visible = np.arange(longest) < contexts[:, None]
        keys = self._token_rows(batch.block_tables[members], longest)
        keys = np.where(visible, keys, 0).ravel()
        mask = None if visible.all() else self._put(visible[:, None, None, :])
        return _Decode(start, stop, self._put(np.concatenate((keys, keys + self._bs))), mask)

    def _token_rows(self, tables: NDArray[np.int32], length: int) -> NDArray[np.int64]:
        """Return the key rows [S, length] of the first tokens of S sequences."""
        blocks = tables[:, : -(-length // self._bs)].astype(np.int64) * self._kv.row_stride
        rows = blocks[:, :, None] + np.arange(self._bs)
        return rows.reshape(len(tables), -1)[:, :length]

    @property
    def _bs(self) -> int:
        return self._kv.block_size

    def _put(self, array: NDArray[Any]) -> Any:
        return torch.from_numpy(array).to(self._kv.device)

    def _lap(self, name: str, began: float) -> float:
        """Add the time since ``began`` to a total, when profiling; return the time now."""
        if self._timings is None:
            return 0.0
        if self._kv.device.type == "cuda":
            torch.cuda.synchronize(self._kv.device)
        now = time.perf_counter()
        if name:
            self._timings[name] += now - began
        return now


def step_groups(contexts: NDArray[np.int32], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut decode sequences, longest context first, into groups that are padded alike.

    A group reads at most ``max_tokens`` tokens (unless one sequence alone has more), and no member
    is padded beyond twice its context. Padding is masked, but a masked NaN still poisons a sum, so
    it reads block 0, which is zeros, and never the stale rest of a sequence's last block.

    Args:
        contexts: int32 [S], descending.
        max_tokens: padded tokens that a group may read.

    Yields:
        [start, stop) of each group.
    """
    start = 0
    while start < len(contexts):
        longest = int(contexts[start])
        stop = start + max(1, max_tokens // longest)
        # Descending, so those with at least half the longest context come first.
        stop = min(stop, int(np.searchsorted(-contexts, -((longest + 1) // 2), side="right")))
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


def paged_attention(
    module: Any,
    query: Any,
    key: Any,  # noqa: ARG001 - read from the blocks instead
    value: Any,  # noqa: ARG001 - read from the blocks instead
    attention_mask: Any,  # noqa: ARG001 - transformers makes none for a foreign implementation
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attention as transformers calls it, over the step that the runner passed along.

    Args:
        module: the attention layer, which knows its ``layer_idx``.
        query: ``[1, num_heads, T, head_dim]``.
        key: not used: the step's cache has written it.
        value: not used, likewise.
        attention_mask: not used: the step has masks of its own.
        scaling: factor of the scores.
        kwargs: holds the step under :data:`STEP_KWARG`.

    Returns:
        The output ``[1, T, num_heads, head_dim]``, and no weights.

    Raises:
        NotSupportedError: the layer asks for more than plain causal attention.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotSupportedError(f"its attention uses {name}")
    if kwargs.get("is_causal") is False:
        raise NotSupportedError("its attention is not causal")
    step: PagedStep | None = kwargs.get(STEP_KWARG)
    if step is None:
        raise NotSupportedError("its layers pass no keyword arguments on to attention")
    return step.attend(query, module.layer_idx, scaling), None
