"""The driver's end of generation: hands requests to ranks and their tokens to whoever waits."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raykv.engine.params import GenerationRequest, TokenDelta, TokenOutput
from raykv.errors import NotSupportedError, RankUnavailableError, RaykvError, RequestError
from raykv.rank_handle import Failed, RankHandle, Reply
from raykv.routing import Charge, Router

_POLL_WAIT_S = 0.5
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
    """A request that a rank works on."""

    request: GenerationRequest
    listener: Listener
    batch: Batch
    charge: Charge
    is_aborted: bool = False

    def is_called(self, request_id: str) -> bool:
        """Whether the caller's word for it, its prompt or its whole call is ``request_id``."""
        request = self.request
        return request_id in {request.request_id, request.prompt_id, request.call_id}


class Generations:
    """All requests of this driver that are under way. Safe to call from any thread.

    Per rank with requests under way, one thread waits for its outputs.

    Args:
        ranks: the pool's ranks.
        router: chooses among them; hears here what becomes of the requests.
    """

    def __init__(self, ranks: Sequence[RankHandle], router: Router) -> None:
        self._ranks = ranks
        self._router = router
        self._pending: list[dict[str, _Pending]] = [{} for _ in ranks]
        self._pumps: list[threading.Thread | None] = [None] * len(ranks)
        self._names = itertools.count()
        self._lock = threading.Lock()

    def new_id(self) -> str:
        """A request id that no request under way has."""
        with self._lock:
            while True:
                name = f"request-{next(self._names)}"
                entries = (entry for pending in self._pending for entry in pending.values())
                if not any(entry.is_called(name) for entry in entries):
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
            placed = self._place(batch)
            replies = [(rank, part, self._submit(rank, part)) for rank, part in placed.items()]
            for rank, part, reply in replies:
                try:
                    reply.result()
                except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                    for request in part:
                        self._deliver(rank, TokenDelta(request.request_id, error=_known(error)))
                else:
                    self._ensure_pump(rank)
        except BaseException:
            batch.is_abandoned = True
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

    def _withdraw(self, is_meant: Callable[[_Pending], bool]) -> None:
        """One call per rank, whatever the number of requests; a lost rank needs none."""
        with self._lock:
            names = [
                [name for name, entry in pending.items() if is_meant(entry)]
                for pending in self._pending
            ]
        replies = [self._ranks[rank].abort(ids) for rank, ids in enumerate(names) if ids]
        for reply in replies:
            with contextlib.suppress(RankUnavailableError):
                reply.result()

    def _submit(self, rank: int, requests: list[GenerationRequest]) -> Reply[None]:
        try:
            return self._ranks[rank].submit(requests)
        except Exception as error:  # noqa: BLE001 - such as what cannot be pickled
            return Failed(error)

    def _place(self, batch: Batch) -> dict[int, list[GenerationRequest]]:
        placed: dict[int, list[GenerationRequest]] = {}
        prompts = self._router.read_all(batch.requests)
        with self._lock:
            known = {name for pending in self._pending for name in pending}
            for request in batch.requests:
                if request.request_id in known:
                    raise RequestError(
                        f"request id {request.request_id!r} is in use: choose another"
                    )
                known.add(request.request_id)
            rooms = [handle.room for handle in self._ranks]
            charges = self._router.place(batch.requests, prompts, rooms, batch.dp_rank)
            for request, listener, charge in zip(
                batch.requests, batch.listeners, charges, strict=True
            ):
                entry = _Pending(request, listener, batch, charge)
                self._pending[charge.rank][request.request_id] = entry
                placed.setdefault(charge.rank, []).append(request)
        return placed

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
        while True:
            with self._lock:
                if not self._pending[rank]:
                    self._pumps[rank] = None
                    return
            try:
                deltas = self._ranks[rank].poll(_POLL_WAIT_S)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
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
        if delta.output is not None:
            self._router.learn(entry.charge, entry.request, delta.output)
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


def sample_id(request_id: str, index: int) -> str:
    """The id of one of several continuations asked for as ``request_id``."""
    return f"{request_id}/{index}"


def _is_unwanted(entry: _Pending) -> bool:
    return entry.is_aborted or entry.batch.is_abandoned


def _known(error: Exception) -> RaykvError:
    if isinstance(error, RaykvError):
        return error
    return RequestError(f"a rank cannot take the request: {type(error).__name__}: {error}")
