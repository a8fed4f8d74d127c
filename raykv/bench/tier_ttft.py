"""Time to the first token of conversations that come back, when the device cannot keep them all.

Conversations take turns in random order, one at a time, on one rank in this process with one torch
thread; together they have four times as many blocks as the device. All variants serve the same
turn before the next one begins, so that what else the machine does hits each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.config import PoolConfig
from raykv.engine.params import SamplingParams, TokenOutput
from raykv.hierarchy import HierarchyBlockManagerPool, local_pool
from raykv.pool import BlockManagerPool

MODEL, BLOCK_SIZE = "smollm2", 16
DEVICE_ONLY, HOST, STORE = "device only", "host memory", "half of it and a disk"
TARGET_SPEED_UP = 4.0
_OVERCOMMIT = 4  # blocks of all conversations over blocks of the device
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is served.

    Attributes:
        num_conversations: conversations.
        num_first_tokens: tokens of their first prompts.
        num_new_tokens: tokens that each later turn adds to what was said before.
        num_answer_tokens: tokens of an answer.
        num_returns: turns after the first; these are measured.
    """

    num_conversations: int = 8
    num_first_tokens: int = 768
    num_new_tokens: int = 32
    num_answer_tokens: int = 8
    num_returns: int = 2

    @property
    def num_tokens(self) -> int:
        """Tokens of one conversation in the end."""
        per_turn = self.num_new_tokens + self.num_answer_tokens
        return self.num_first_tokens + self.num_answer_tokens + self.num_returns * per_turn

    @property
    def num_working_blocks(self) -> int:
        """Blocks of all conversations."""
        return self.num_conversations * -(-self.num_tokens // BLOCK_SIZE)

    @property
    def num_device_blocks(self) -> int:
        """Blocks that the device has for them, without the padding block."""
        return self.num_working_blocks // _OVERCOMMIT


QUICK = Sizes(num_conversations=6, num_first_tokens=192, num_returns=1)


@dataclass(frozen=True, slots=True)
class ReturningTurns:
    """What the turns after the first took under one variant.

    Attributes:
        variant: what was behind the device.
        model: the model's name.
        num_turns: turns measured.
        working_blocks: blocks of all conversations.
        device_blocks: blocks of the device.
        prompt_tokens: tokens of all prompts measured.
        device_hit_tokens: those that were still on the device.
        host_hit_tokens: those that came from elsewhere.
        first_token_ms: from submission to the first token; median, milliseconds.
        slowest_ms: the slowest one.
        speed_up: the median of ``device only`` over this one's.
        outputs_equal: whether all answers are those of ``device only``.
        target_speed_up: what ``speed_up`` should reach; None where there is no target.
    """

    variant: str
    model: str
    num_turns: int
    working_blocks: int
    device_blocks: int
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    first_token_ms: float
    slowest_ms: float
    speed_up: float
    outputs_equal: bool
    target_speed_up: float | None

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


@dataclass(slots=True)
class _Served:
    """One variant's pool and its outputs, first turns included, in order."""

    pool: BlockManagerPool
    outputs: list[TokenOutput] = field(default_factory=list)
    returns: list[TokenOutput] = field(default_factory=list)

    def serve(self, prompt: NDArray[np.int64], num_tokens: int, *, is_return: bool) -> TokenOutput:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        [output] = self.pool.generate([prompt.tolist()], params)
        self.outputs.append(output)
        if is_return:
            self.returns.append(output)
        # What is stored goes on beside the next turn; here it would go on beside another variant's.
        if isinstance(self.pool, HierarchyBlockManagerPool):
            assert self.pool.wait_for_transfers(_WAIT_S), "copies take milliseconds"
            for tier in self.pool.tiers:
                assert tier.drain(_WAIT_S).result(), "it is in the store"
        return output


def variants(sizes: Sizes, folder: str) -> dict[str, dict[str, Any]]:
    """What is compared: settings of a pool by the variant's name, the one to beat first.

    Args:
        sizes: how much is served.
        folder: an empty one, for a store.
    """
    num_blocks = sizes.num_working_blocks
    return {
        DEVICE_ONLY: {},
        HOST: {"host": {"num_blocks": 1 + num_blocks}},
        STORE: {
            "host": {"num_blocks": 1 + num_blocks // 2},
            "store": {"type": "disk", "path": folder},
        },
    }


def measure(sizes: Sizes, model: str) -> Iterator[ReturningTurns]:
    """Serve all variants, in turns; yields one record each.

    Args:
        sizes: how much.
        model: a known name, or a folder.

    Raises:
        ConfigError: the model cannot be had.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="raykv-"))
        served = {
            name: _Served(stack.enter_context(local_pool(_config(sizes, model, settings))))
            for name, settings in variants(sizes, folder).items()
        }
        prompt_tokens = _play(sizes, list(served.values()))
        base = served[DEVICE_ONLY]
        base_s = median(map(_first_token_s, base.returns))
        for name, one in served.items():
            times = [_first_token_s(output) for output in one.returns]
            num_host = sum(output.miss.num_host_tokens for output in one.returns if output.miss)
            num_hit = sum(output.num_cached_tokens for output in one.returns)
            yield ReturningTurns(
                name,
                model,
                len(times),
                sizes.num_working_blocks,
                sizes.num_device_blocks,
                prompt_tokens,
                device_hit_tokens=num_hit - num_host,
                host_hit_tokens=num_host,
                first_token_ms=round(1e3 * median(times), 1),
                slowest_ms=round(1e3 * max(times), 1),
                speed_up=round(base_s / median(times), 2),
                outputs_equal=_tokens(one) == _tokens(base),
                target_speed_up=None if one is base else TARGET_SPEED_UP,
            )


def _play(sizes: Sizes, served: list[_Served]) -> int:
    """Serve every turn under every variant; returns the prompt tokens of those measured."""
    rng = np.random.default_rng(0)
    num_prompt_tokens = 0
    histories = [np.empty(0, np.int64)] * sizes.num_conversations
    for turn in range(1 + sizes.num_returns):
        length = sizes.num_new_tokens if turn else sizes.num_first_tokens
        for index in rng.permutation(sizes.num_conversations).tolist():
            prompt = np.concatenate((histories[index], rng.integers(3, 100, length)))
            answers = [
                one.serve(prompt, sizes.num_answer_tokens, is_return=turn > 0) for one in served
            ]
            num_prompt_tokens += len(prompt) if turn else 0
            histories[index] = np.concatenate((prompt, answers[0].token_ids))
    return num_prompt_tokens


def _config(sizes: Sizes, model: str, settings: dict[str, Any]) -> PoolConfig:
    values: dict[str, Any] = {
        "num_blocks": 1 + sizes.num_device_blocks,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 2,
        "max_model_len": sizes.num_tokens + BLOCK_SIZE,
        "memory": {"device": "cpu"},
        "model": {"path": model, "max_num_batched_tokens": 256, "num_threads": 1},
    }
    return PoolConfig(**values, **settings)


def _first_token_s(output: TokenOutput) -> float:
    """Seconds from submission: what is loaded counts, which the first step comes after."""
    return output.queue_s + output.prefill_s


def _tokens(served: _Served) -> list[tuple[int, ...]]:
    return [output.token_ids for output in served.outputs]
