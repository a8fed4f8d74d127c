"""What checkpoints of recurrent state are worth: token hit rates of recorded prompts.

A rank without memory and without a model serves the visits as an engine would: it admits a prompt,
computes to each boundary where a checkpoint is due, publishes, generates the reply that was
recorded, and ends. So many sequences run at a time; the oldest ends first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from raykv.config import PoolConfig
from raykv.core import Sequence
from raykv.rank import RankKV

from .visits import Visit

BLOCK_SIZE = 16
NUM_RUNNING = 16
_SPARSE = 128  # tokens
NUM_SLOTS = (64, 256, 1024, 4096)
STRIDES = (512, 256, 16)
RULES = ("at_stride", "at_prompt_end", "at_generation_end", "at_branch")
_BRANCH = (("at_branch",), ("at_stride", "at_branch"))
SCARCE = 0.05  # KV blocks where they are scarce, over those that a trace fills at most

Match = Literal["contiguous", "deepest"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How checkpoints are taken and used.

    Attributes:
        match: the policy; None for a model whose layers all keep K and V, which hits as far as K
            and V are cached: the ceiling.
        stride_tokens: tokens between checkpoints.
        num_slots: state slots, the padding slot included.
        without: the rules that are off.
        is_kv_scarce: whether the K/V of a trace does not fit.
    """

    match: Match | None = "deepest"
    stride_tokens: int = 512
    num_slots: int = 1024
    without: tuple[str, ...] = ()
    is_kv_scarce: bool = False

    @property
    def name(self) -> str:
        """What it is, in words, the number of slots apart."""
        if self.match is None:
            words = ["K and V alone"]
        else:
            words = [str(self.match), *(f"no {rule.removeprefix('at_')}" for rule in self.without)]
            if "at_stride" not in self.without:
                words.insert(1, f"every {self.stride_tokens}")
        return ", ".join([*words, "little KV"] if self.is_kv_scarce else words)

    def config(self, visits: list[Visit], *, num_running: int = NUM_RUNNING) -> PoolConfig:
        """A rank for these visits."""
        num_filled = sum(_num_blocks(visit) for visit in visits)
        longest = max((_num_blocks(visit) for visit in visits), default=1)
        num_blocks = max(int(num_filled * SCARCE), num_running * longest // 4, longest)
        values: dict[str, Any] = {
            "num_blocks": 1 + (num_blocks if self.is_kv_scarce else num_filled),
            "block_size": BLOCK_SIZE,
            "max_num_seqs": num_running,
            "max_model_len": longest * BLOCK_SIZE,
        }
        if self.match is not None:
            values["linear_state"] = {
                "num_slots": self.num_slots,
                "match": self.match,
                "stride_tokens": self.stride_tokens,
                **{rule: rule not in self.without for rule in RULES},
            }
        return PoolConfig(**values)


@dataclass(frozen=True, slots=True)
class Hits:
    """What one setting made of the visits.

    Attributes:
        workload: which visits.
        setting: the setting.
        num_blocks: KV blocks, the padding block not counted.
        num_visits: visits that were served.
        num_tokens: prompt tokens.
        hit_rate: those that were not computed again, of all.
        num_checkpoints: checkpoints that were taken.
        num_skipped: those that were not, since no slot was to be had.
        num_reclaimed: those that were given up for others.
        us_per_visit: the rank's time for a visit's whole life, mean, microseconds.
    """

    workload: str
    setting: Setting
    num_blocks: int
    num_visits: int
    num_tokens: int
    hit_rate: float
    num_checkpoints: int
    num_skipped: int
    num_reclaimed: int
    us_per_visit: float

    def as_json(self) -> dict[str, Any]:
        """A JSON object, flat."""
        values = asdict(self)
        setting = values.pop("setting")
        setting["without"] = ", ".join(setting["without"])
        return {"workload": values.pop("workload"), **setting, **values}


def settings(
    *, num_slots: tuple[int, ...] = NUM_SLOTS, strides: tuple[int, ...] = STRIDES
) -> list[Setting]:
    """Those that are compared: the ceiling, policies and strides, rules, and all with little KV.

    Args:
        num_slots: numbers of state slots.
        strides: tokens between checkpoints; the rules are compared at the first.
    """
    main = Setting(stride_tokens=strides[0], num_slots=num_slots[len(num_slots) // 2])
    others = [main, replace(main, match="contiguous"), replace(main, without=("at_stride",))]

    def each_size(*several: Setting) -> list[Setting]:
        return [replace(each, num_slots=number) for each in several for number in num_slots]

    found = [Setting(match=None)]
    found += each_size(*others, *(replace(main, without=without) for without in _BRANCH))
    found += [replace(main, without=(rule,)) for rule in ("at_prompt_end", "at_generation_end")]
    found += [replace(each, is_kv_scarce=True) for each in (found[0], *others)]
    for stride in strides[1:]:
        # At the dense ones few slots hold a prompt or two, and that takes long to say.
        sizes = num_slots if stride >= _SPARSE else num_slots[-2:]
        for match in ("contiguous", "deepest"):
            found += [Setting(match, stride, number) for number in sizes]
    return found


def measure(
    workload: str, visits: list[Visit], compared: list[Setting] | None = None
) -> Iterator[Hits]:
    """Serve the visits under each setting."""
    for setting in settings() if compared is None else compared:
        yield Replay(visits, setting).run(workload)


class Replay:
    """One rank that serves visits in order of arrival.

    Args:
        visits: what to serve.
        setting: of the rank.
        num_running: sequences at a time.
    """

    def __init__(
        self, visits: list[Visit], setting: Setting, *, num_running: int = NUM_RUNNING
    ) -> None:
        self.kv = RankKV(setting.config(visits, num_running=num_running))
        self.setting = setting
        self._visits = visits
        self._running: deque[tuple[int, Sequence]] = deque()
        self._num_running = num_running
        self._num_served = self._num_tokens = self._num_hit = 0

    def run(self, workload: str = "") -> Hits:
        """Serve all visits."""
        start = time.perf_counter()
        for number in range(len(self._visits)):
            self._serve(number)
        while self._running:
            self._finish()
        spent_s = time.perf_counter() - start
        cache = self.kv.linear_state
        return Hits(
            workload,
            self.setting,
            num_blocks=self.kv.block_manager.num_total_blocks,
            num_visits=self._num_served,
            num_tokens=self._num_tokens,
            hit_rate=round(self._num_hit / max(1, self._num_tokens), 4),
            num_checkpoints=0 if cache is None else cache.num_committed_total,
            num_skipped=0 if cache is None else cache.num_skipped_total,
            num_reclaimed=0 if cache is None else cache.num_reclaimed_total,
            us_per_visit=round(spent_s / max(1, self._num_served) * 1e6, 1),
        )

    def _serve(self, number: int) -> None:
        """Admit a visit and compute its prompt."""
        visit = self._visits[number]
        while self._running and (
            len(self._running) == self._num_running
            or any(earlier == visit.after for earlier, _ in self._running)
        ):
            self._finish()
        sequence = Sequence(visit.prompt)
        # Room for the reply, too: a replay does not preempt.
        while not self.kv.allocate(sequence, len(visit.prompt) + max(1, len(visit.reply))):
            assert self._running, "the rank has room for each visit"
            self._finish()
        state = sequence.kv_state
        self._num_served += 1
        self._num_tokens += sequence.num_tokens
        self._num_hit += state.num_computed_tokens
        self._copy()
        while (stop := self.kv.next_checkpoint(sequence)) is not None:
            self._compute(sequence, stop)
        state.num_computed_tokens = sequence.num_tokens
        self.kv.cache(sequence)
        self._copy()
        self._running.append((number, sequence))
        sequence.extend(visit.reply)
        # The state at the first boundary in the reply, if any, takes a slot from now on.
        self._generate(sequence, stop=(len(visit.prompt) // BLOCK_SIZE + 1) * BLOCK_SIZE)

    def _finish(self) -> None:
        """Generate the rest of the oldest one's reply, and end it."""
        _, sequence = self._running.popleft()
        stride, states = self.setting.stride_tokens, self.kv.states
        if states is not None and states.config.at_stride:
            done = sequence.kv_state.num_computed_tokens
            for stop in range((done // stride + 1) * stride, sequence.num_tokens, stride):
                self._generate(sequence, stop)
        # The steps between make no difference: only the last boundary's state is kept.
        self._generate(sequence, (sequence.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)
        state = sequence.kv_state  # nobody computes the last token that is generated
        state.num_computed_tokens = max(state.num_computed_tokens, sequence.num_tokens - 1)
        self.kv.deallocate(sequence)

    def _generate(self, sequence: Sequence, stop: int) -> None:
        if sequence.kv_state.num_computed_tokens < stop < sequence.num_tokens:
            self._compute(sequence, stop)

    def _compute(self, sequence: Sequence, stop: int) -> None:
        """Compute up to a boundary, and save the state if that is due."""
        sequence.kv_state.num_computed_tokens = stop
        self.kv.checkpoint((sequence,))
        self._copy()

    def _copy(self) -> None:
        self.kv.take_state_copies("")
        self.kv.ack_state_transfers()


def _num_blocks(visit: Visit) -> int:
    return -(-(len(visit.prompt) + max(1, len(visit.reply))) // BLOCK_SIZE)
