"""Which sequences compute how many tokens in the next step: continuous batching.

A pure state machine over one rank's KV: no model, no clock, no threads. Every running sequence has
at least one token to compute; one that has just one left decodes, the others prefill, in chunks.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace

import numpy as np

from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import KVCacheManager
from raykv.core.sequence import Sequence
from raykv.errors import IntegrityError

from .params import GenerationRequest, TokenOutput

_MAX_BYPASSES = 16
_MAX_LOOKAHEAD = 8


@dataclass(slots=True, eq=False)
class Task:
    """One request on its way through the engine.

    Attributes:
        request: what was asked for.
        driver_id: by whom.
        arrival: its place in line, kept over preemption.
        sequence: its tokens and KV.
        seed: of its random numbers.
        num_cached_tokens: hit of the first admission; None before it.
        miss: why that hit went no further.
        num_preempted: times preempted.
        num_bypassed: times that a later request was admitted while this one headed the line.
        log_probs: per produced token, if asked for.
        top_log_probs: likewise.
        weights_versions: per produced token, the version of the weights that it came from.
        times: seconds on the engine's clock when it was submitted, first computed, and when its
            first token came.
    """

    request: GenerationRequest
    driver_id: str
    arrival: int
    sequence: Sequence
    seed: int
    num_cached_tokens: int | None = None
    miss: MissReport | None = None
    num_preempted: int = 0
    num_bypassed: int = 0
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    weights_versions: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def num_remaining(self) -> int:
        """Tokens that are known but not computed."""
        return self.sequence.num_tokens - self.sequence.kv_state.num_computed_tokens

    @property
    def has_started(self) -> bool:
        """Whether it was admitted before, though it may have been preempted since."""
        return self.num_cached_tokens is not None

    @property
    def produced(self) -> tuple[int, ...]:
        """Tokens produced so far."""
        tokens = self.sequence.token_ids[self.sequence.num_prompt_tokens :]
        return tuple(tokens.tolist())

    def output(self, stop_reason: str, dp_rank: int, now: float) -> TokenOutput:
        """What the caller gets."""
        marks = [*self.times, *[now] * (4 - len(self.times))]
        versions = self.weights_versions
        return TokenOutput(
            request_id=self.request.request_id,
            token_ids=self.produced,
            log_probs=tuple(self.log_probs),
            stop_reason=stop_reason,  # type: ignore[arg-type]
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preempted=self.num_preempted,
            num_failed_over=self.request.num_failed_over,
            weights_version=(versions or [self.sequence.namespace.weights_version])[-1],
            weights_versions=tuple(versions),
            top_log_probs=tuple(self.top_log_probs),
            sample_index=self.request.sample_index,
            miss=self.miss,
            dp_rank=dp_rank,
            queue_s=marks[1] - marks[0],
            prefill_s=marks[2] - marks[1],
            decode_s=marks[3] - marks[2],
        )


class Scheduler:
    """Decides who computes what; owns the waiting line and the running set.

    Args:
        kv: where memory comes from.
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens that one step computes.
        shares_prefixes: whether ``kv`` finds what others computed.
        keeps_state: whether sequences have recurrent state, and reuse prefixes only where a
            checkpoint of it stands.

    Attributes:
        waiting: tasks without memory, oldest first.
        running: tasks with memory, oldest first.
        num_preemptions: how often memory was taken away, since the start.
        failed: tasks whose admission raised, with the error; the engine ends them.
        is_draining: admit nobody who has not been admitted before, and fork nothing.
        weights_version: what tasks are admitted under.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        shares_prefixes: bool = True,
        keeps_state: bool = False,
    ) -> None:
        self.waiting: list[Task] = []
        self.running: list[Task] = []
        self.num_preemptions = 0
        self.failed: list[tuple[Task, Exception]] = []
        self.is_draining = False
        self.weights_version = 0
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._shares_prefixes = shares_prefixes
        self._keeps_state = keeps_state
        # Each running sequence decodes at least, whatever the budget for prefills says.
        self._budget = max(max_num_batched_tokens, 1)

    def add(self, task: Task) -> None:
        """Put a task into the line, at the place of its arrival."""
        self._name_version(task)
        bisect.insort(self.waiting, task, key=_arrival)

    def remove(self, task: Task, *, publish: bool = True) -> None:
        """Take a task out, wherever it is, and give back all that it holds."""
        (self.running if task in self.running else self.waiting).remove(task)
        if publish:
            self._kv.deallocate(task.sequence)
        else:
            self._kv.deallocate_without_cache(task.sequence)

    @property
    def has_started(self) -> bool:
        """Whether a task is under way, with memory or preempted."""
        return bool(self.running) or any(task.has_started for task in self.waiting)

    def begin_version(self, version: int) -> None:
        """Admit under these weights from now on; who runs keeps the version of its admission."""
        self.weights_version = version
        self.is_draining = False
        for task in self.waiting:
            self._name_version(task)

    def preempt(self, sequence: Sequence) -> None:
        """Take the memory of a running sequence away; it goes back into the line."""
        for task in self.running:
            if task.sequence is sequence:
                self._preempt(task)
                return

    def preempt_all(self) -> None:
        """Take all memory away; everybody goes back into the line."""
        while self.running:
            self._preempt(self.running[-1])

    def schedule(self) -> list[tuple[Task, int]]:
        """Tasks of the next step with the tokens each computes: decodes first, then prefills."""
        preempted = self._grow_decodes()
        step = [
            (task, 1)
            for task in self.running
            if task.num_remaining == 1 and not self._is_loading(task)
        ]
        budget = self._budget - len(step)
        for task in self.running:
            if task.num_remaining > 1 and budget > 0 and not self._is_loading(task):
                count = self._chunk(task, budget)
                step.append((task, count))
                budget -= count
        # What was just preempted would come straight back and be preempted again.
        while budget > 0 and not preempted and len(self.running) < self._max_num_seqs:
            admitted = self._admit_next()
            if admitted is None:
                break
            if self._is_loading(admitted):
                continue
            count = self._chunk(admitted, budget)
            step.append((admitted, count))
            budget -= count
        return step

    def _is_loading(self, task: Task) -> bool:
        """Whether a task waits for KV from the host; notes what it hit once it does not."""
        if task.sequence.is_loading:
            return True
        if task.num_cached_tokens is None:
            task.num_cached_tokens = task.sequence.kv_state.num_computed_tokens
            task.miss = self._kv.explain(task.sequence)
        return False

    def _chunk(self, task: Task, budget: int) -> int:
        """Tokens that a task computes now: none beyond the place of its next checkpoint."""
        count = min(task.num_remaining, budget)
        if self._keeps_state:
            stop = self._kv.next_checkpoint(task.sequence)
            if stop is not None:
                count = min(count, stop - task.sequence.kv_state.num_computed_tokens)
        return count

    def fork(self, task: Task) -> list[Task]:
        """Start the waiting samples of a prompt that was just computed, as forks of this one.

        Those that find no place stay in line, and find the prompt in the prefix cache later.
        """
        if self.is_draining or not _will_fork(task):
            return []
        started = []
        for sample in [other for other in self.waiting if _is_same_prompt(task, other)]:
            if len(self.running) < self._max_num_seqs:
                self._kv.fork(task.sequence, sample.sequence)
            if sample.sequence.single_block_id is not None:
                self.waiting.remove(sample)
                bisect.insort(self.running, sample, key=_arrival)
                sample.num_cached_tokens = sample.sequence.kv_state.num_computed_tokens
                started.append(sample)
        return started

    def _grow_decodes(self) -> bool:
        """Give each decoding sequence room for its next token, at the cost of the youngest."""
        preempted = False
        while True:
            decodes = [task.sequence for task in self.running if task.num_remaining == 1]
            if not decodes or self._kv.allocate(decodes):
                return preempted
            self._preempt(self.running[-1])
            preempted = True

    def _preempt(self, task: Task) -> None:
        self.running.remove(task)
        self._kv.deallocate(task.sequence)  # what it computed stays findable while memory lasts
        task.num_preempted += 1
        self.num_preemptions += 1
        self.add(task)

    def _admit_next(self) -> Task | None:
        """Admit the oldest waiting task, or a later one that fits while the oldest does not.

        The oldest is overtaken a bounded number of times, so that small requests cannot starve it.
        """
        line = self.waiting
        if self.is_draining:
            line = [task for task in line if task.has_started]
        for index, task in enumerate(line[: 1 + _MAX_LOOKAHEAD]):
            if index and line[0].num_bypassed >= _MAX_BYPASSES:
                return None
            if self._awaits(task) or not self._allocate(task):
                continue
            if index:
                line[0].num_bypassed += 1
            self.waiting.remove(task)
            bisect.insort(self.running, task, key=_arrival)
            return task
        return None

    def _name_version(self, task: Task) -> None:
        """Let a task that waits share and publish KV of the present weights."""
        namespace = task.request.namespace
        if namespace.weights_version != self.weights_version:
            namespace = replace(namespace, weights_version=self.weights_version)
        task.sequence.namespace = namespace

    def _allocate(self, task: Task) -> bool:
        try:
            return self._kv.allocate(task.sequence)
        except Exception as error:  # noqa: BLE001 - the fault of this request alone
            self.failed.append((task, error))
            return False

    def _awaits(self, task: Task) -> bool:
        """Whether somebody who runs computes what this one could share."""
        if any(_will_fork(other) and _is_same_prompt(other, task) for other in self.running):
            return True
        return self._awaits_prefix(task.sequence)

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to publish a prefix that this one could share.

        So equal prompts that arrive together are prefilled once. If the one that prefills goes
        away, nobody waits for it any more, and the next in line takes over.
        """
        if not self._shares_prefixes:
            return False
        for leader in (task.sequence for task in self.running if task.num_remaining > 1):
            size = leader.kv_state.block_size
            stop: int | None = (leader.kv_state.num_computed_tokens // size + 1) * size
            if self._keeps_state:
                stop = self._kv.next_checkpoint(leader)
            if (
                stop is not None
                and stop <= leader.num_tokens
                and stop < sequence.num_tokens
                and leader.namespace == sequence.namespace
                and np.array_equal(leader.token_ids[:stop], sequence.token_ids[:stop])
            ):
                return True
        return False

    def check_integrity(self) -> None:
        """Running tasks hold memory and have work; waiting ones hold none; both are in order.

        Raises:
            IntegrityError: something disagrees.
        """
        for line, has_memory in ((self.waiting, False), (self.running, True)):
            if [task.arrival for task in line] != sorted(task.arrival for task in line):
                raise IntegrityError("scheduler: a line is out of order")
            for task in line:
                if (task.sequence.single_block_id is not None) != has_memory:
                    raise IntegrityError(f"scheduler: {task.sequence!r} is in the wrong line")
                if has_memory and task.num_remaining < 1:
                    raise IntegrityError(f"scheduler: {task.sequence!r} has nothing to compute")


def _will_fork(task: Task) -> bool:
    """Whether other samples may start from this one, once its prompt is computed."""
    sequence = task.sequence
    return task.request.params.n > 1 and sequence.num_tokens == sequence.num_prompt_tokens


def _is_same_prompt(task: Task, other: Task) -> bool:
    ours, theirs = task.request, other.request
    return (
        other.num_cached_tokens is None
        and not theirs.produced.token_ids  # it has begun already, on a rank that was lost
        and task.driver_id == other.driver_id
        and bool(ours.prompt_id)
        and ours.prompt_id == theirs.prompt_id
        # Ids are the callers' to choose, so they prove nothing; and who waits runs under the
        # present weights, which need not be those of who runs.
        and task.sequence.namespace == other.sequence.namespace
        and np.array_equal(ours.token_ids, theirs.token_ids)
    )


def _arrival(task: Task) -> int:
    return task.arrival
