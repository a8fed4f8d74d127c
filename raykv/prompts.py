"""Prompts as callers pass them, as rows of token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raykv.core.tokens import TokenIds, as_tokens
from raykv.errors import RequestError

Prompts: TypeAlias = str | TokenIds | SequenceOf[str | TokenIds]
"""One prompt or several, each as text or token ids."""


def token_rows(prompts: Prompts, encode: Callable[[str], list[int]]) -> list[NDArray[np.int32]]:
    """One int32 row per prompt, copied.

    Args:
        prompts: one or several, as text or token ids.
        encode: turns text into token ids.

    Raises:
        RequestError: it is something else, or nothing.
    """
    if isinstance(prompts, str):
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
        encoded = [encode(row) if isinstance(row, str) else row for row in rows]
        return [as_tokens(row).copy() for row in encoded]
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"a prompt is neither text nor token ids ({error}); for chat messages, use "
            "pool.tokenizer.apply_chat_template first"
        ) from None
