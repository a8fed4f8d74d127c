"""Which eviction policy keeps the right blocks: a trace of real prompts replayed under each.

A trace has one JSON object a line, in the format of Mooncake's: ``timestamp`` (ms) and
``hash_ids``, one id per 512-token block of the prompt, equal where all tokens up to there are. A
block stands for 4 tokens here, derived from its id: eviction does not look at tokens, and walking
fewer keeps a replay short. Requests come one after the other; a prompt is looked up, allocated,
published and given back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.core import BlockManagerImpl, Blocks
from raykv.core.retention import DEFAULT_RETENTION, Retention
from raykv.errors import ConfigError

BLOCK_SIZE = 4  # tokens that stand for a block of the trace
POLICIES = ("lru", "lrfu", "priority")
FRACTIONS = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request of a trace.

    Attributes:
        arrival_s: when it came.
        hash_ids: int64 [num_blocks], what its blocks hold.
    """

    arrival_s: float
    hash_ids: NDArray[np.int64]

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [num_blocks * BLOCK_SIZE], equal where the ids are."""
        tokens = self.hash_ids[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
        return tokens.ravel().astype(np.int32)


@dataclass(frozen=True, slots=True)
class Replay:
    """What one policy made of a trace.

    Attributes:
        policy: its name.
        num_blocks: blocks of the pool, the padding block not counted.
        fraction: those over the different blocks of the trace.
        hit_rate: prompt blocks that were hit over all.
        us_per_request: the manager's time for a request's whole life, mean, microseconds.
        num_refused: prompts that did not fit the pool.
    """

    policy: str
    num_blocks: int
    fraction: float
    hit_rate: float
    us_per_request: float
    num_refused: int

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


Wish = Callable[[Prompt, int], Retention]
"""How dearly a prompt is to be kept, knowing how many of its blocks were hit."""


def wish(prompt: Prompt, num_hit: int) -> Retention:
    """A prompt that was there to its end is a repeat: nobody continued it, so it may go sooner.

    All that a replay can know. An application knows more: what is a system prompt, who is waiting.
    """
    return REPEATED if num_hit >= len(prompt.hash_ids) - 1 else DEFAULT_RETENTION


REPEATED = Retention(40)


def load(path: Path) -> list[Prompt]:
    """Read a trace.

    Raises:
        ConfigError: the file cannot be read, or a line is not as described.
    """
    prompts = []
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007 - for the message
                row = json.loads(line)
                ids = np.array(row["hash_ids"], np.int64)
                prompts.append(Prompt(row["timestamp"] / 1000, ids))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"trace {path}, line {number}: expected an object with timestamp and hash_ids, "
            f"got {type(error).__name__}: {error}"
        ) from None
    return prompts


def replays(
    prompts: list[Prompt],
    *,
    policies: Iterable[str] = POLICIES,
    fractions: Iterable[float] = FRACTIONS,
) -> Iterator[Replay]:
    """Replay a trace under each policy, in pools of these fractions of its different blocks."""
    num_different = len({block for prompt in prompts for block in prompt.hash_ids.tolist()})
    for fraction in fractions:
        for policy in policies:
            yield replay(prompts, policy, max(1, round(fraction * num_different)), num_different)


def replay(
    prompts: list[Prompt], policy: str, num_blocks: int, num_different: int, *, wish: Wish = wish
) -> Replay:
    """Replay a trace under one policy."""
    manager = BlockManagerImpl(num_blocks + 1, BLOCK_SIZE, eviction=policy)
    num_hit = num_wanted = num_refused = 0
    spent_s = 0.0
    for prompt in prompts:
        tokens = prompt.tokens
        start = time.perf_counter()
        manager.set_time(prompt.arrival_s)
        hit = manager.allocate_shared(tokens)
        shared = len(hit)
        fresh = manager.allocate(len(prompt.hash_ids) - shared)
        if fresh is None:
            num_refused += 1
            hit.release()
        else:
            blocks = Blocks.concat((hit, fresh)) if shared else fresh
            manager.cache(tokens, blocks, retention=wish(prompt, shared))
            manager.deallocate(blocks)
            blocks.release()
        spent_s += time.perf_counter() - start
        num_wanted += len(prompt.hash_ids)
        num_hit += shared
    return Replay(
        policy,
        num_blocks,
        round(num_blocks / num_different, 4),
        round(num_hit / max(1, num_wanted), 4),
        round(spent_s / max(1, len(prompts)) * 1e6, 1),
        num_refused,
    )
