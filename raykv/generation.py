"""The driver's end of generation: hands requests to ranks and their tokens to whoever waits."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from raykv.config import PoolConfig
from raykv.engine.params import GenerationRequest, TokenDelta, TokenOutput
from raykv.errors import NotSupportedError, RankUnavailableError, RaykvError, RequestError
from raykv.rank_handle import Failed, RankHandle, Reply
from raykv.routing import Charge, Router

_POLL_WAIT_S = 0.5
_LOOK_S = 0.05
_log = logging.getLogger(__name__)

Listener = Callable[[TokenDelta], None]
"""Called with each delta of a request, on a thread of the pool; must not block."""


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that are started together, and can be given up together at any time.

    Attributes:
        requests: what to generate.
        listeners: one per request; each hears of its own until a delta that ``is_last``.
        dp_rank: the rank to use; None lets the router choose per prompt.
        is_abandoned: nobody waits for them any more.
    """

    requests: Sequence[GenerationRequest]
    listeners: Sequence[Listener]
    dp_rank: int | None = None
    is_abandoned: bool = False


@dataclass(slots=True)
class _Pending:
    """A request that a rank works on.

    Attributes:
        request: with what earlier ranks have produced of it.
        produced: by this rank.
        session: of the rank, in which it was submitted; None until it was.
    """

    request: GenerationRequest
    listener: Listener
    batch: Batch
    charge: Charge
    is_aborted: bool = False
    produced: list[TokenDelta] = field(default_factory=list)
    session: int | None = None

    def is_called(self, request_id: str) -> bool:
        """Whether the caller's word for it, its prompt or its whole call is ``request_id``."""
        request = self.request
        return request_id in {request.request_id, request.prompt_id, request.call_id}


class Generations:
    """All requests of this driver that are under way. Safe to call from any thread.

    Per rank with requests under way, one thread waits for its outputs. If the rank is lost, that
    thread hands its requests to other ranks, with the tokens that they have already.

    Args:
        ranks: the pool's ranks.
        router: chooses among them; hears here what becomes of the requests.
        config: the pool's.

    Attributes:
        num_failed_over: requests that went on elsewhere.
    """

    def __init__(self, ranks: Sequence[RankHandle], router: Router, config: PoolConfig) -> None:
        self.num_failed_over = 0
        self._ranks = ranks
        self._router = router
        self._fails_over = config.ray.on_rank_loss == "fail_over"
        self._patience_s = config.ray.failover_timeout_s
        self._closed = False
        self._pending: list[dict[str, _Pending]] = [{} for _ in ranks]
        self._homeless: dict[str, _Pending] = {}  # their rank was lost, and they have no other yet
        self._pumps: list[threading.Thread | None] = [None] * len(ranks)
        self._names = itertools.count()
        self._lock = threading.Lock()

    def new_id(self) -> str:
        """A request id that no request under way has."""
        with self._lock:
            while True:
                name = f"request-{next(self._names)}"
                if not any(entry.is_called(name) for entry in self._entries()):
                    return name

    def start(self, batch: Batch) -> None:
        """Submit requests, and return once the ranks have them.

        Raises:
            RequestError: a request can never be served, or its id is in use; none was submitted.
            NotSupportedError: the ranks have no engine.
        """
        if batch.dp_rank is not None and batch.dp_rank not in range(len(self._ranks)):
            raise RequestError(
                f"dp_rank is {batch.dp_rank!r}, but ranks are 0..{len(self._ranks) - 1}"
            )
        limits = self._ranks[batch.dp_rank or 0].limits
        if limits is None:
            raise NotSupportedError("the pool has no engine: set `model` in its configuration")
        for request in batch.requests:
            limits.check(request)
        try:
            self._submit_all(self._place(batch))
        except BaseException:
            self.abandon(batch)
            self._drop_unsent(batch)
            raise
        finally:
            # Whoever gave up meanwhile may have been faster than the submission.
            self._withdraw(lambda entry: entry.batch is batch and _is_unwanted(entry))

    def abort(self, request_id: str) -> None:
        """End a request with all its samples; one that is over already is passed by."""

        def is_meant(entry: _Pending) -> bool:
            if entry.is_called(request_id):
                entry.is_aborted = True
            return entry.is_aborted

        self._withdraw(is_meant)

    def abandon(self, batch: Batch) -> None:
        """End what is left of a batch that nobody waits for any more; started or not."""
        batch.is_abandoned = True
        self._withdraw(lambda entry: entry.batch is batch)

    def _drop_unsent(self, batch: Batch) -> None:
        """An interrupt may come before a submission; the end of what was submitted is awaited."""
        with self._lock:
            for pending in self._pending:
                for name, entry in [*pending.items()]:
                    if entry.batch is batch and entry.session is None:
                        del pending[name]
                        self._router.credit(entry.charge, 0, is_last=True)
        for rank in range(len(self._ranks)):
            self._ensure_pump(rank)

    def _entries(self) -> Iterator[_Pending]:
        for pending in (*self._pending, self._homeless):
            yield from pending.values()

    def _withdraw(self, is_meant: Callable[[_Pending], bool]) -> None:
        """One call per rank, whatever the number of requests; a lost rank needs none."""
        with self._lock:
            for entry in self._homeless.values():
                is_meant(entry)  # marks it; whoever looks for a rank ends it
            names = [
                [name for name, entry in pending.items() if is_meant(entry)]
                for pending in self._pending
            ]
        replies = [self._ranks[rank].abort(ids) for rank, ids in enumerate(names) if ids]
        for reply in replies:
            with contextlib.suppress(RankUnavailableError):
                reply.result()

    def close(self) -> None:
        """Fail what waits for a rank to come back; the ranks' own end fails the rest."""
        self._closed = True

    def _submit_all(self, placed: dict[int, list[GenerationRequest]]) -> None:
        """Submit requests to the ranks that they were placed on, and see that they are awaited."""
        replies = [(rank, part, self._submit(rank, part)) for rank, part in placed.items()]
        with self._lock:
            for rank, part, reply in replies:
                for entry in (self._pending[rank].get(request.request_id) for request in part):
                    if entry is not None:
                        entry.session = getattr(reply, "session", 0)
        for rank, part, reply in replies:
            try:
                reply.result()
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                if not (self._fails_over and isinstance(error, RankUnavailableError)):
                    for request in part:
                        self._deliver(rank, TokenDelta(request.request_id, error=_known(error)))
            self._ensure_pump(rank)  # which hands them on if the rank is lost

    def _submit(self, rank: int, requests: list[GenerationRequest]) -> Reply[None]:
        try:
            return self._ranks[rank].submit(requests)
        except Exception as error:  # noqa: BLE001 - such as what cannot be pickled
            return Failed(error)

    def _place(self, batch: Batch) -> dict[int, list[GenerationRequest]]:
        placed: dict[int, list[GenerationRequest]] = {}
        prompts = self._router.read_all(batch.requests)
        with self._lock:
            known = {entry.request.request_id for entry in self._entries()}
            for request in batch.requests:
                if request.request_id in known:
                    raise RequestError(
                        f"request id {request.request_id!r} is in use: choose another"
                    )
                known.add(request.request_id)
            rooms = [handle.room for handle in self._ranks]
            charges = self._router.place(batch.requests, prompts, rooms, self._wanted(batch))
            for request, listener, charge in zip(
                batch.requests, batch.listeners, charges, strict=True
            ):
                entry = _Pending(request, listener, batch, charge)
                self._pending[charge.rank][request.request_id] = entry
                placed.setdefault(charge.rank, []).append(request)
        return placed

    def _wanted(self, batch: Batch) -> int | None:
        """The rank that the caller chose, unless it is lost and another one may stand in."""
        rank = batch.dp_rank
        is_lost = rank is not None and self._ranks[rank].lost is not None
        return None if is_lost and self._fails_over else rank

    def _fail_over(self, entries: list[_Pending], lost: Exception) -> None:
        """Let other ranks go on with what a lost one had, where that is wanted."""
        deadline = time.monotonic() + self._patience_s
        while is_hopeless := self._is_hopeless():
            entries = self._end_unwanted(entries)
            if not self._fails_over or self._closed or time.monotonic() > deadline or not entries:
                break
            time.sleep(_LOOK_S)
        entries = self._end_unwanted(entries)
        placed: dict[int, list[GenerationRequest]] = {}
        over: list[tuple[_Pending, TokenDelta]] = []
        with self._lock:
            for entry in entries:
                name = entry.request.request_id
                del self._homeless[name]
                if is_hopeless:
                    over.append((entry, TokenDelta(name, error=_known(lost))))
                else:
                    try:
                        entry.charge = self._charge_elsewhere(entry.request)
                    except Exception as error:  # noqa: BLE001 - a policy's fault; others go on
                        over.append((entry, TokenDelta(name, error=_known(error))))
                        continue
                    self._pending[entry.charge.rank][name] = entry
                    placed.setdefault(entry.charge.rank, []).append(entry.request)
                    self.num_failed_over += 1
        for entry, delta in over:
            self._tell(entry, delta)
        self._submit_all(placed)
        # What was given up meanwhile may have been faster than the submission.
        self._withdraw(_is_unwanted)

    def _charge_elsewhere(self, request: GenerationRequest) -> Charge:
        prompt = self._router.read(request.token_ids, request.namespace)
        num_left = request.params.max_tokens - len(request.produced.token_ids)
        rank = self._router.choose([handle.room for handle in self._ranks], prompt, num_left)
        return self._router.charge(rank, prompt, num_left)

    def _end_unwanted(self, entries: list[_Pending]) -> list[_Pending]:
        """Tell who gave up meanwhile that his request is over; returns the others."""
        with self._lock:
            unwanted = [entry for entry in entries if _is_unwanted(entry)]
            for entry in unwanted:
                del self._homeless[entry.request.request_id]
        for entry in unwanted:
            output = _aborted(entry.request)
            self._tell(entry, TokenDelta(output.request_id, output=output))
        return [entry for entry in entries if entry not in unwanted]

    def _is_hopeless(self) -> bool:
        return not self._fails_over or all(handle.lost is not None for handle in self._ranks)

    def _take_stale(self, rank: int) -> list[_Pending]:
        """The requests that went with a rank's loss, with what it has produced of them."""
        session = self._ranks[rank].session
        with self._lock:
            pending = self._pending[rank]
            entries = [e for e in pending.values() if e.session not in {None, session}]
            for entry in entries:
                del pending[entry.request.request_id]
                entry.session = None
                self._router.credit(entry.charge, 0, is_last=True)
                produced = entry.request.produced
                for delta in entry.produced:
                    produced = produced.with_delta(delta)
                entry.produced.clear()
                entry.request = replace(
                    entry.request,
                    produced=produced,
                    num_failed_over=entry.request.num_failed_over + 1,
                )
                self._homeless[entry.request.request_id] = entry
        if entries:
            self._router.forget(rank)
        return entries

    def _ensure_pump(self, rank: int) -> None:
        with self._lock:
            pump = self._pumps[rank]
            if self._pending[rank] and (pump is None or not pump.is_alive()):
                pump = threading.Thread(
                    target=self._pump, args=(rank,), name=f"raykv-pump-{rank}", daemon=True
                )
                self._pumps[rank] = pump
                pump.start()

    def _pump(self, rank: int) -> None:
        handle = self._ranks[rank]
        while True:
            with self._lock:
                if not self._pending[rank]:
                    self._pumps[rank] = None
                    return
            stale = self._take_stale(rank)
            if stale:
                reason = handle.lost or f"rank {rank} was lost, and is back without blocks"
                self._fail_over(stale, RankUnavailableError(reason))
                continue
            session, deltas = handle.session, []
            try:
                deltas = handle.poll(_POLL_WAIT_S)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                if handle.lost is not None or handle.session != session:
                    time.sleep(_LOOK_S)  # what is being submitted to it just now is stale soon
                    continue
                self._router.forget(rank)
                with self._lock:
                    lost = list(self._pending[rank])
                deltas = [TokenDelta(name, error=_known(error)) for name in lost]
            for delta in deltas:
                self._deliver(rank, delta)

    def _deliver(self, rank: int, delta: TokenDelta) -> None:
        with self._lock:
            entry = self._pending[rank].get(delta.request_id)
            if entry is None:
                return
            self._router.credit(entry.charge, len(delta.token_ids), is_last=delta.is_last)
            if delta.is_last:
                del self._pending[rank][delta.request_id]
            else:
                entry.produced.append(delta)
        if delta.output is not None:
            self._router.learn(entry.charge, entry.request, delta.output)
        self._tell(entry, delta)

    def _tell(self, entry: _Pending, delta: TokenDelta) -> None:
        try:
            entry.listener(delta)
        except Exception:  # noqa: BLE001 - a fault of one caller must not stop the others' outputs
            _log.exception("the listener of request %s failed", delta.request_id)


def collect(deltas: queue.SimpleQueue[TokenDelta], num_requests: int) -> dict[str, TokenOutput]:
    """Wait for all outputs, by request id; raises the first error."""
    outputs: dict[str, TokenOutput] = {}
    while len(outputs) < num_requests:
        delta = deltas.get()
        if delta.error is not None:
            raise delta.error
        if delta.output is not None:
            outputs[delta.request_id] = delta.output
    return outputs


def _is_unwanted(entry: _Pending) -> bool:
    return entry.is_aborted or entry.batch.is_abandoned


def _aborted(request: GenerationRequest) -> TokenOutput:
    """The output of a request that was given up while no rank had it."""
    return TokenOutput(
        request.request_id,
        request.produced.token_ids,
        log_probs=request.produced.log_probs,
        top_log_probs=request.produced.top_log_probs,
        weights_versions=request.produced.weights_versions,
        stop_reason="abort",
        sample_index=request.sample_index,
        num_failed_over=request.num_failed_over,
    )


def _known(error: Exception) -> RaykvError:
    if isinstance(error, RaykvError):
        return error
    return RequestError(f"a rank cannot take the request: {type(error).__name__}: {error}")
