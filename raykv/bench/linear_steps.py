"""What checkpoints cost a decode step, at RankKV's public API: books only, no states are copied.

Of 256 running sequences 16 end a block with each step, as they do at block size 16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import numpy as np

from raykv.config import LinearStateConfig, PoolConfig
from raykv.core import Sequence
from raykv.rank import RankKV

from .timing import Row, measure

LEVEL = "RankKV"
NUM_SEQS, BLOCK_SIZE = 256, 16
NUM_AT_BOUNDARY = NUM_SEQS // BLOCK_SIZE
NUM_CHECKPOINTS = 10_000
_PROMPT = 1024  # tokens
_TARGET_US = 200


class Workbench:
    """A rank whose sequences decode, each token a step, the ends of their blocks spread evenly.

    Args:
        stride_tokens: tokens between checkpoints.
        num_checkpoints: state slots beside those of the running sequences.
        match: the policy; generation leaves checkpoints at strides under ``contiguous`` alone.
        has_states: whether sequences have recurrent state.
    """

    def __init__(
        self,
        stride_tokens: int,
        num_checkpoints: int,
        *,
        match: Literal["contiguous", "deepest"] = "deepest",
        has_states: bool = True,
    ) -> None:
        linear_state = LinearStateConfig(
            num_slots=2 * NUM_SEQS + num_checkpoints + 1,
            match=match,
            stride_tokens=stride_tokens,
        )
        self.kv = RankKV(
            PoolConfig(
                dp_size=1,
                num_blocks=1 << 16,
                block_size=BLOCK_SIZE,
                max_num_seqs=NUM_SEQS,
                max_model_len=1 << 14,
                linear_state=linear_state if has_states else None,
            )
        )
        rng = np.random.default_rng(0)
        self.sequences = [
            Sequence(rng.integers(0, 50_000, _PROMPT + index % BLOCK_SIZE, dtype=np.int32))
            for index in range(NUM_SEQS)
        ]
        assert self.kv.allocate(self.sequences), "the rank is large enough"
        for sequence in self.sequences:
            sequence.kv_state.num_computed_tokens = sequence.num_tokens
            sequence.append(0)
        self._steps = itertools.count()

    def compute(self, _: object = None) -> list[Sequence]:
        """Have every sequence compute its last token and get another one; who is at a boundary."""
        at_boundary = []
        step = next(self._steps)
        for index, sequence in enumerate(self.sequences):
            state = sequence.kv_state
            state.num_computed_tokens += 1
            sequence.append(step * NUM_SEQS + index)
            if state.num_computed_tokens % BLOCK_SIZE == 0:
                at_boundary.append(sequence)
        return at_boundary

    def grow(self) -> None:
        """Blocks for the tokens of the next step."""
        assert self.kv.allocate(self.sequences), "the rank is large enough"

    def save(self, at_boundary: list[Sequence]) -> None:
        """The checkpoints that are due: reserved, handed out to be copied, and acknowledged."""
        self.kv.checkpoint(at_boundary)
        self.kv.take_state_copies("")
        self.kv.ack_state_transfers()


def rows(num_runs: int = 100, num_checkpoints: int = NUM_CHECKPOINTS) -> Iterator[Row]:
    """A step's books with and without recurrent state, and what checkpoints add."""
    yield _step_row("without recurrent state", num_runs, Workbench(16, 0, has_states=False))
    yield _step_row("with it, 16 checkpoints", num_runs, Workbench(512, num_checkpoints))
    for bench, what in (
        (Workbench(512, num_checkpoints), "at the end of what is generated"),
        (Workbench(16, num_checkpoints, match="contiguous"), "at every block, contiguous"),
    ):

        def prepare(bench: Workbench = bench) -> list[Sequence]:
            bench.grow()
            return bench.compute()

        yield measure(
            f"16 checkpoints {what}", LEVEL, bench.save,
            prepare=prepare, num_runs=num_runs, target_us=_TARGET_US,
        )  # fmt: skip


def _step_row(what: str, num_runs: int, bench: Workbench) -> Row:
    def step(at_boundary: list[Sequence]) -> None:
        bench.save(at_boundary)
        bench.grow()

    bench.grow()
    return measure(
        f"decode step, 256 sequences, {what}", LEVEL, step,
        prepare=bench.compute, num_runs=num_runs,
    )  # fmt: skip
