"""One rank's engine: schedules, runs the model, samples, publishes, finishes."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raykv.core.sequence import Sequence
from raykv.errors import IntegrityError, RaykvError, RequestError
from raykv.rank import RankKV
from raykv.rank_tiering import ENGINE

from .batch import ModelRunner, StepBatch
from .lifecycle import Lifecycle
from .packing import pack
from .params import EngineLimits, GenerationRequest, SamplingParams, StopReason, TokenDelta
from .sampler import log_probs, sample, top
from .scheduler import Scheduler, Task
from .step_copies import StepCopies


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine's start.

    Attributes:
        num_waiting: requests without memory now.
        num_running: requests with memory now.
        num_steps: forward passes.
        num_computed_tokens: tokens that went through the model.
        num_generated_tokens: tokens produced.
        num_preemptions: times that a sequence lost its memory.
        model_s: seconds in the model runner.
        step_s: seconds in steps, the model included.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    model_s: float = 0.0
    step_s: float = 0.0


class Engine:
    """Serves requests on one rank; usable without Ray. One thread calls it.

    Args:
        model: runs the model over ``rank_kv``'s buffers.
        rank_kv: the rank's KV.
        max_num_batched_tokens: tokens that one step computes at most.
        eos_token_ids: tokens that end an output.
        detokenize: turns tokens into text, for stop strings.
        clock: seconds, for the timings that outputs report; decisions never look at it.

    Attributes:
        is_waiting: whether the last step computed nothing: what is to be done waits for memory, or
            for the host tier.
        scheduler: who computes when.
        lifecycle: its weights versions and sleep.
    """

    def __init__(
        self,
        model: ModelRunner,
        rank_kv: RankKV,
        *,
        max_num_batched_tokens: int = 512,
        eos_token_ids: SequenceOf[int] = (),
        detokenize: Callable[[SequenceOf[int]], str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.kv = rank_kv
        self.is_waiting = True
        self.limits = EngineLimits(
            vocab_size=model.vocab_size,
            max_model_len=min(model.max_model_len, rank_kv.config.max_tokens_per_sequence),
            has_detokenizer=detokenize is not None,
        )
        self.scheduler = Scheduler(
            rank_kv,
            max_num_seqs=rank_kv.config.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            shares_prefixes=rank_kv.config.enable_prefix_cache,
            keeps_state=rank_kv.states is not None,
        )
        self.scheduler.begin_version(rank_kv.weights_version)
        self.lifecycle = Lifecycle(rank_kv, self)
        self._copies = StepCopies(rank_kv, ENGINE)
        self._eos = frozenset(eos_token_ids)
        self._detokenize = detokenize
        self._clock = clock
        self._arrivals = itertools.count()
        self._tasks: dict[tuple[str, str], Task] = {}  # by driver id and request id
        self._ended: list[tuple[str, TokenDelta]] = []  # between steps; the next one reports them
        self._num_steps = self._num_computed = self._num_generated = 0
        self._model_s = self._step_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self._ended or self.lifecycle.has_work:
            return True
        if self.kv.tier is not None and not self.kv.tier.is_idle:
            return True
        return bool(self._tasks) and not self.lifecycle.asleep

    def submit(self, requests: Iterable[GenerationRequest], driver_id: str = "") -> None:
        """Take requests into the waiting line, all or none.

        Args:
            requests: what to generate.
            driver_id: who asks; request ids are unique per driver.

        Raises:
            RequestError: one can never be served, asks for other weights, or its id is in use.
        """
        accepted: dict[tuple[str, str], GenerationRequest] = {}
        for request in requests:
            self.limits.check(request)
            self._check_version(request)
            key = driver_id, request.request_id
            if key in self._tasks or key in accepted:
                raise RequestError(f"request {key[1]} exists already: use a fresh id")
            accepted[key] = request
        for key, request in accepted.items():
            params = request.params
            sequence = Sequence(
                request.token_ids,
                namespace=request.namespace,
                max_new_tokens=params.max_tokens,
                retention=request.retention,
            )
            sequence.driver_id = ENGINE
            before = request.produced
            sequence.extend(before.token_ids)
            task = Task(
                request,
                driver_id,
                next(self._arrivals),
                sequence,
                _seed(request),
                log_probs=list(before.log_probs),
                top_log_probs=list(before.top_log_probs),
                weights_versions=list(before.weights_versions),
                times=[self._clock()],
            )
            self._tasks[key] = task
            self.scheduler.add(task)
            if self.kv.tier is not None:
                self.kv.tier.expect(sequence)

    def abort(self, request_ids: Iterable[str], driver_id: str = "") -> None:
        """End requests in whatever state they are; the next step reports them.

        Ids that are not, or no longer, known are passed by.
        """
        for request_id in request_ids:
            task = self._tasks.pop((driver_id, request_id), None)
            if task is not None:
                output = task.output("abort", self.kv.dp_rank, self._clock())
                self.scheduler.remove(task)
                self._ended.append((driver_id, TokenDelta(request_id, output=output)))

    def abort_all(self) -> None:
        """End all requests of all drivers; the next step reports them."""
        for driver_id, request_id in list(self._tasks):
            self.abort([request_id], driver_id)

    def begin_version(self, version: int) -> None:
        """Serve under these weights from now on; the KV and the model know of them already.

        Requests that insist on another version and have not started fail.
        """
        self.scheduler.begin_version(version)
        for task in list(self.scheduler.waiting):
            try:
                if not task.has_started:
                    self._check_version(task.request)
            except RequestError as error:
                self._ended.append((task.driver_id, self._fail(task, "the update", error)))

    def drop(self, driver_id: str) -> None:
        """End all requests of a driver, and report nothing: it does not listen any more."""
        for key in [key for key in self._tasks if key[0] == driver_id]:
            self.scheduler.remove(self._tasks.pop(key))
        self._ended = [entry for entry in self._ended if entry[0] != driver_id]

    def step(self) -> list[tuple[str, TokenDelta]]:
        """Run the model once over what the scheduler chose.

        Returns:
            What that produced, each with the driver it belongs to.

        An error of the model fails the requests of the batch and gives their memory back without
        publishing it; the others go on.
        """
        start = self._clock()
        self.is_waiting = True
        self.lifecycle.advance()
        self._pump_tier()
        deltas, self._ended = self._ended, []
        if self.lifecycle.asleep:
            return deltas
        step = self.scheduler.schedule()
        if self.kv.tier is not None and self.kv.tier.num_loading:
            self._pump_tier()  # who was just admitted loads while the others compute
        self.is_waiting = not step
        failed, self.scheduler.failed = self.scheduler.failed, []
        for task, error in dict(failed).items():
            deltas.append((task.driver_id, self._fail(task, "admission", error)))
        return deltas + self._compute(step, start) if step else deltas

    @property
    def tokens_per_s(self) -> float:
        """How fast the model computed so far; 0 before it has."""
        return self._num_computed / self._model_s if self._model_s else 0.0

    def stats(self) -> EngineStats:
        """Totals since the start."""
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed,
            num_generated_tokens=self._num_generated,
            num_preemptions=self.scheduler.num_preemptions,
            model_s=self._model_s,
            step_s=self._step_s,
        )

    def check_integrity(self) -> None:
        """Check the scheduler's lines, versions and the rank's books; raises IntegrityError."""
        self.scheduler.check_integrity()
        self.kv.check_integrity()
        for task in self.scheduler.running:
            version = task.sequence.namespace.weights_version
            if version != self.kv.weights_version and not self.kv.is_outdated(task.sequence):
                raise IntegrityError(f"{task.sequence!r} would publish under version {version}")

    def _pump_tier(self) -> None:
        for sequence in self.kv.pump_tier(ENGINE):
            self.scheduler.preempt(sequence)

    def _compute(self, step: list[tuple[Task, int]], start: float) -> list[tuple[str, TokenDelta]]:
        """Run the model over a step that began at ``start``, and take what it produced."""
        deltas: list[tuple[str, TokenDelta]] = []
        for task, _ in step:
            if len(task.times) == 1:
                task.times.append(start)
        members = [(task.sequence, count) for task, count in step]
        begin = self._clock()
        try:
            self._copies.before(self.model)
            logits = self._forward(pack(self.kv, *zip(*members, strict=True)))
        except Exception as error:  # noqa: BLE001 - whatever the model throws must not end the rank
            return [(task.driver_id, self._fail(task, "the model", error)) for task, _ in step]
        now = self._clock()
        self._model_s += now - begin
        rows = iter(logits)
        at_boundary = self._publish(step)
        for task, _ in step:
            if task.num_remaining == 0:
                row = next(rows)
                for sample in (*self.scheduler.fork(task), task):
                    sample.times[1:] = sample.times[1:] or task.times[1:2]
                    deltas.append((sample.driver_id, self._advance(sample, row, now)))
                    self._num_generated += 1
        if at_boundary:  # who has just ended there left its slot as a checkpoint
            self._copies.save(self.model, at_boundary)
        self._num_steps += 1
        self._num_computed += sum(count for _, count in step)
        self._step_s += self._clock() - start
        return deltas

    def _publish(self, step: list[tuple[Task, int]]) -> list[Sequence]:
        """Note what was computed; what prefills computed can be shared from now on.

        Returns:
            Decoding sequences whose recurrent state stands at the end of a block.
        """
        at_boundary = []
        for task, count in step:
            sequence = task.sequence
            state = sequence.kv_state
            state.num_computed_tokens += count
            is_at_end = self.kv.states is not None and (
                state.num_computed_tokens % state.block_size == 0
            )
            if count > 1 or (is_at_end and state.num_computed_tokens <= state.num_admitted_tokens):
                self.kv.cache(sequence)
            elif is_at_end:
                at_boundary.append(sequence)
        states = self.kv.states
        if states is None:
            return []
        if states.promotes:
            self._copies.save(self.model)
            return at_boundary
        self._copies.save(self.model, at_boundary)  # who ends leaves no checkpoint by itself
        return []

    def _forward(self, batch: StepBatch) -> NDArray[np.float32]:
        logits = self.model.forward(batch)
        if len(logits) != len(batch.logit_rows):
            raise ValueError(f"{len(logits)} rows of logits for {len(batch.logit_rows)} tokens")
        return logits

    def _advance(self, task: Task, logits: NDArray[np.float32], now: float) -> TokenDelta:
        """Choose the next token of a sequence that has computed all it knows."""
        params, sequence = task.request.params, task.sequence
        position = sequence.num_tokens
        token = sample(logits, params, task.seed, task.request.sample_index, position)
        sequence.append(token)
        chosen: tuple[float, ...] = ()
        likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
        version = self.kv.weights_version
        task.weights_versions.append(version)
        if params.logprobs:
            values = log_probs(logits)
            chosen = (float(values[token]),)
            if params.logprobs > 1:
                likeliest = (top(values, params.logprobs),)
            task.log_probs += chosen
            task.top_log_probs += likeliest
        if len(task.times) == 2:
            task.times.append(now)
        try:
            reason = self._stop_reason(task, token, params)
        except Exception as error:  # noqa: BLE001 - whatever the tokenizer throws, likewise
            return self._fail(task, "the tokenizer", error)
        if reason is None:
            return TokenDelta(
                task.request.request_id, (token,), chosen, likeliest, weights_version=version
            )
        output = task.output(reason, self.kv.dp_rank, now)
        del self._tasks[task.driver_id, task.request.request_id]
        self.scheduler.remove(task)
        return TokenDelta(
            task.request.request_id, (token,), chosen, likeliest, output, weights_version=version
        )

    def _stop_reason(self, task: Task, token: int, params: SamplingParams) -> StopReason | None:
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            return "stop"
        if params.stop and self._detokenize is not None:
            text = self._detokenize(task.produced)
            if any(stop in text for stop in params.stop):
                return "stop"
        sequence = task.sequence
        num_produced = sequence.num_tokens - sequence.num_prompt_tokens
        if num_produced >= params.max_tokens or sequence.num_tokens >= self.limits.max_model_len:
            return "length"
        return None

    def _check_version(self, request: GenerationRequest) -> None:
        asked, served = request.namespace.weights_version, self.kv.weights_version
        if asked not in {0, served}:
            raise RequestError(
                f"{request.request_id}: it asks for weights version {asked}, but rank "
                f"{self.kv.dp_rank} serves {served}: ask for that, or for 0, whichever is served"
            )

    def _fail(self, task: Task, culprit: str, error: Exception) -> TokenDelta:
        request_id = task.request.request_id
        del self._tasks[task.driver_id, request_id]
        self.scheduler.remove(task, publish=False)
        if not isinstance(error, RaykvError):
            error = RaykvError(
                f"request {request_id}: {culprit} failed with {type(error).__name__}: {error}; "
                f"its memory was given back, send it again or look into {culprit}"
            )
        return TokenDelta(request_id, error=error)


def _seed(request: GenerationRequest) -> int:
    for seed in (request.params.seed, request.seed):
        if seed is not None:
            return seed
    return secrets.randbits(63)
