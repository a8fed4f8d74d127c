"""The driver's end of generation: hands requests to ranks and their tokens to whoever waits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raykv.engine.params import GenerationRequest, TokenDelta
from raykv.errors import NotSupportedError, RaykvError, RequestError
from raykv.rank_handle import RankHandle, results
from raykv.routing import Router

_POLL_WAIT_S = 0.5

Listener = Callable[[TokenDelta], None]
"""Called with each delta of a request, on a thread of the pool; must not block."""


@dataclass(slots=True)
class _Pending:
    """A request that a rank works on."""

    request: GenerationRequest
    listener: Listener
    num_blocks: int
    has_started: bool = False


class Generations:
    """All requests of this driver that are under way. Safe to call from any thread.

    Per rank with requests under way, one thread waits for its outputs.

    Args:
        ranks: the pool's ranks.
        router: chooses among them; its debits are kept up to date here.
        block_size: tokens per block.
    """

    def __init__(self, ranks: Sequence[RankHandle], router: Router, block_size: int) -> None:
        self._ranks = ranks
        self._router = router
        self._block_size = block_size
        self._pending: list[dict[str, _Pending]] = [{} for _ in ranks]
        self._pumps: list[threading.Thread | None] = [None] * len(ranks)
        self._names = itertools.count()
        self._lock = threading.Lock()

    def new_id(self) -> str:
        """A request id that this driver has not used."""
        return f"request-{next(self._names)}"

    def start(
        self,
        requests: Sequence[GenerationRequest],
        listeners: Sequence[Listener],
        dp_rank: int | None = None,
    ) -> None:
        """Submit requests; each listener hears of its own until a delta that ``is_last``.

        Args:
            requests: what to generate; checked before any of them is submitted.
            listeners: one per request.
            dp_rank: the rank to use; None lets the router choose per prompt.

        Raises:
            RequestError: a request can never be served, or its id is in use; none was submitted.
            NotSupportedError: the ranks have no engine.
        """
        for request in requests:
            limits = self._ranks[dp_rank or 0].limits
            if limits is None:
                raise NotSupportedError("the pool has no engine: set `model` in its configuration")
            limits.check(request)
        placed = self._place(requests, listeners, dp_rank)
        replies = [(rank, batch, self._ranks[rank].submit(batch)) for rank, batch in placed.items()]
        for rank, batch, reply in replies:
            try:
                reply.result()
            except RaykvError as error:
                for request in batch:
                    self._deliver(rank, TokenDelta(request.request_id, error=error))
                continue
            self._ensure_pump(rank)

    def abort(self, request_id: str) -> None:
        """End a request with all its samples; one that is over already is passed by."""
        with self._lock:
            ids = [
                [name for name in pending if f"{name}/".startswith(f"{request_id}/")]
                for pending in self._pending
            ]
        results([self._ranks[rank].abort(names) for rank, names in enumerate(ids) if names])

    def _place(
        self,
        requests: Sequence[GenerationRequest],
        listeners: Sequence[Listener],
        dp_rank: int | None,
    ) -> dict[int, list[GenerationRequest]]:
        placed: dict[int, list[GenerationRequest]] = {}
        with self._lock:
            known = {name for pending in self._pending for name in pending}
            for request in requests:
                if request.request_id in known:
                    raise RequestError(
                        f"request id {request.request_id!r} is in use: choose another"
                    )
                known.add(request.request_id)
            rank = dp_rank
            for request, listener in zip(requests, listeners, strict=True):
                if dp_rank is None and (request.sample_index == 0 or rank is None):
                    rank = self._router.begin([handle.room for handle in self._ranks]).take(0)
                assert rank is not None, "the first sample of a prompt chose one"
                num_tokens = len(request.token_ids) + request.params.max_tokens
                entry = _Pending(request, listener, -(-num_tokens // self._block_size))
                self._pending[rank][request.request_id] = entry
                self._router.debits[rank] += entry.num_blocks
                placed.setdefault(rank, []).append(request)
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
            except RaykvError as error:
                with self._lock:
                    lost = list(self._pending[rank])
                deltas = [TokenDelta(request_id, error=error) for request_id in lost]
            for delta in deltas:
                self._deliver(rank, delta)

    def _deliver(self, rank: int, delta: TokenDelta) -> None:
        with self._lock:
            entry = self._pending[rank].get(delta.request_id)
            if entry is None:
                return
            if not entry.has_started:  # from now on the rank's own counters show its blocks
                entry.has_started = True
                self._router.debits[rank] -= entry.num_blocks
            if delta.is_last:
                del self._pending[rank][delta.request_id]
        entry.listener(delta)


def sample_id(request_id: str, index: int) -> str:
    """The id of one of several continuations asked for as ``request_id``."""
    return f"{request_id}/{index}"
