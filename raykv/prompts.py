"""Prompts as callers pass them: as rows of token ids, and as requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raykv.core.namespace import Namespace, require_namespace
from raykv.core.retention import Retention
from raykv.core.tokens import TokenIds, as_tokens
from raykv.engine.params import GenerationRequest, SamplingParams
from raykv.errors import RequestError

_Prompt: TypeAlias = str | TokenIds | Mapping[str, Any]
Prompts: TypeAlias = _Prompt | SequenceOf[_Prompt]

"""One prompt or several, each as text, as token ids, or as what a tokenizer returns."""


def token_rows(prompts: Prompts, encode: Callable[[str], list[int]]) -> list[NDArray[np.int32]]:
    """One int32 row per prompt, copied.

    Args:
        prompts: one or several, as text or token ids.
        encode: turns text into token ids.

    Raises:
        RequestError: it is something else, or nothing.
    """
    if isinstance(prompts, str | Mapping):
        rows: list[Any] = [prompts]
    else:
        if not isinstance(prompts, Iterable):
            raise RequestError(
                f"prompts is a {type(prompts).__name__}: pass text, token ids, or several of them"
            )
        items = list(prompts)
        if not items:
            raise RequestError("there is no prompt: pass text, token ids, or several of them")
        rows = items if hasattr(items[0], "__len__") else [prompts]
    try:
        encoded = [encode(row) if isinstance(row, str) else _ids_of(row) for row in rows]
        return [as_tokens(row).copy() for row in encoded]
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"a prompt is neither text nor token ids ({error}); for chat messages, use "
            "pool.tokenizer.apply_chat_template first"
        ) from None


def _ids_of(row: Any) -> Any:
    """The token ids of what a tokenizer returns, ``apply_chat_template`` too; else the row."""
    return row["input_ids"] if isinstance(row, Mapping) and "input_ids" in row else row


def requests_of(
    rows: SequenceOf[NDArray[np.int32]],
    params: SamplingParams | None,
    name: str,
    namespace: Namespace,
    retention: Retention,
) -> list[GenerationRequest]:
    """One request per prompt and sample.

    Args:
        rows: prompts.
        params: how to continue them; None for the defaults.
        name: of the call; prompt i of several is ``name/i``, and so is sample i of several.
        namespace: with whom their KV may be shared.
        retention: how dearly their cached blocks are kept.

    Raises:
        RequestError: an argument is of the wrong kind.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"params is a {type(params).__name__}: pass raykv.SamplingParams(max_tokens=...)"
        )
    require_namespace(namespace)
    if not isinstance(name, str):
        raise RequestError(f"request_id is {name!r}, but must be text")
    names = [name] if len(rows) == 1 else [sample_id(name, i) for i in range(len(rows))]
    return [
        GenerationRequest(
            request_id=row_name if params.n == 1 else sample_id(row_name, index),
            token_ids=row,
            params=params,
            namespace=namespace,
            sample_index=index,
            prompt_id=row_name,
            call_id=name,
            retention=retention,
            seed=secrets.randbits(63),
        )
        for row_name, row in zip(names, rows, strict=True)
        for index in range(params.n)
    ]


def sample_id(request_id: str, index: int) -> str:
    """The id of one of several continuations asked for as ``request_id``."""
    return f"{request_id}/{index}"
