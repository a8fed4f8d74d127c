"""Time to the first token of a hybrid model, by the length of the cached prefix.

A prompt is a prefix that was served before and 64 new tokens, alone on its rank, on the CPU with
one torch thread. K and V of the prefix are cached either way, but only with checkpoints of the
recurrent state can they be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from raykv.config import PoolConfig
from raykv.engine.params import SamplingParams
from raykv.pool import BlockManagerPool

MODELS = ("qwen3_5-tiny", "qwen3_5-50m")
LENGTHS = (512, 1024, 2048, 4096)  # tokens
NUM_NEW = 64  # tokens
BLOCK_SIZE = 16
_NUM_BYTES = 256  # token ids that all these models have


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One length of prefix.

    Attributes:
        model: the model's name.
        num_prefix_tokens: tokens that were served before.
        num_new_tokens: tokens behind them.
        num_reused_tokens: tokens that were not computed again, with checkpoints.
        with_ms: from the first step to the first token, with checkpoints; median, milliseconds.
        without_ms: the same without them.
        num_runs: runs of each.
    """

    model: str
    num_prefix_tokens: int
    num_new_tokens: int
    num_reused_tokens: int
    with_ms: float
    without_ms: float
    num_runs: int

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def measure(
    models: Iterable[str] = MODELS, lengths: Iterable[int] = LENGTHS, num_runs: int = 3
) -> Iterator[FirstToken]:
    """Serve each length with checkpoints and without, in turns.

    Raises:
        ConfigError: a model cannot be made.
    """
    for model in models:
        yield from _of_model(model, tuple(lengths), num_runs)


def _of_model(model: str, lengths: tuple[int, ...], num_runs: int) -> Iterator[FirstToken]:
    rng = np.random.default_rng(0)
    with (
        _pool(model, max(lengths), saves=True) as saving,
        _pool(model, max(lengths), saves=False) as plain,
    ):
        for length in lengths:
            prefix = rng.integers(0, _NUM_BYTES, length)
            new = [rng.integers(0, _NUM_BYTES, NUM_NEW) for _ in range(num_runs)]
            for pool in (saving, plain):
                _serve(pool, prefix)
            times = []
            reused: list[int] = []
            for each in new:
                prompt = np.concatenate((prefix, each))
                with_s, num_reused = _serve(saving, prompt)
                without_s, num_without = _serve(plain, prompt)
                assert num_without == 0, "nothing can be reused without a checkpoint"
                times.append((with_s, without_s))
                reused.append(num_reused)
            yield FirstToken(
                model,
                length,
                NUM_NEW,
                min(reused),
                with_ms=round(1e3 * median(pair[0] for pair in times), 2),
                without_ms=round(1e3 * median(pair[1] for pair in times), 2),
                num_runs=num_runs,
            )


def _pool(model: str, longest: int, *, saves: bool) -> BlockManagerPool:
    """A rank in this process; without ``saves`` no state is ever kept."""
    rules = ("at_stride", "at_prompt_end", "at_generation_end", "at_branch")
    num_tokens = longest + NUM_NEW + BLOCK_SIZE
    values: dict[str, Any] = {
        "num_blocks": 4 + 4 * num_tokens // BLOCK_SIZE,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 2,
        "max_model_len": num_tokens,
        "linear_state": {
            "num_slots": 32 + longest // 512,
            "match": "deepest",
            **dict.fromkeys(rules, saves),
        },
        "memory": {"device": "cpu"},
        "model": {"path": model, "max_num_batched_tokens": 512, "num_threads": 1},
    }
    return BlockManagerPool.local(PoolConfig(**values))


def _serve(pool: BlockManagerPool, tokens: np.ndarray[Any, Any]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were reused."""
    [output] = pool.generate([tokens.tolist()], SamplingParams(max_tokens=1, ignore_eos=True))
    return output.prefill_s, output.num_cached_tokens
