"""Where a host tier gets blocks from that it does not have: a store, or another node's tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raykv.core import Namespace


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What is looked for.

    Attributes:
        tokens: int32 [n], full blocks only, from the root on.
        namespace: whose they are.
        prefill_tokens_per_s: how fast the asking rank computes; 0 where nobody has measured it.
    """

    tokens: NDArray[np.int32]
    namespace: Namespace
    prefill_tokens_per_s: float = 0.0


class BlockSource(Protocol):
    """Something that may have the KV of a prompt. Its coroutines run on the tier's event loop.

    Whatever goes wrong is an answer of fewer blocks, and counted by the source; nothing is raised
    but cancellation. After a call has ended, by a cancellation too, its rows are not touched any
    more.

    Attributes:
        name: for people and counters.
    """

    name: str

    async def count(self, prompt: Prompt, first_block: int) -> int:
        """How many blocks it could give without a gap from this one on, and is worth asking for."""
        ...

    async def read(
        self,
        prompt: Prompt,
        first_block: int,
        rows: NDArray[np.uint8],
        row_ids: NDArray[np.intp],
        on_blocks: Callable[[int], None],
    ) -> int:
        """Read blocks into rows of the slab.

        Args:
            prompt: of which.
            first_block: the prompt's block that goes to ``rows[row_ids[0]]``; the others follow.
            rows: uint8 [num_rows, block_bytes], the slab's blocks.
            row_ids: where each block goes.
            on_blocks: called with the number of leading blocks that are complete, as it grows.

        Returns:
            Leading blocks that hold the right bytes.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        ...

    async def close(self) -> None:
        """Let go of everything; idempotent."""
        ...
