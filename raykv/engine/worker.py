"""The one thread that owns a rank: applies calls between engine steps, collects outputs."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from raykv.core.kv_cache_manager import RankStats
from raykv.errors import RankUnavailableError

from .engine import Engine
from .params import TokenDelta

T = TypeVar("T")

_BLOCKED_WAIT_S = 0.01


class RankWorker:
    """Owns an engine and its rank's KV; every other thread goes through it.

    Args:
        engine: what to run.

    Attributes:
        stats: the rank's counters as of the last call or step.
        last_moved: ``time.monotonic`` of the owning thread's last turn: old means stuck.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last_moved = time.monotonic()
        self.stats: RankStats = engine.kv.rank_stats()
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._outputs: defaultdict[str, list[TokenDelta]] = defaultdict(list)  # by driver id
        self._changed = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"raykv-rank-{engine.kv.dp_rank}", daemon=True
        )
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the owning thread, between two steps."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise self._unavailable()
            self._calls.append((function, future))  # type: ignore[arg-type]
            self._changed.notify_all()
        return future

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or stopped on a failure."""
        return self._closed

    def poll(self, driver_id: str, wait_s: float) -> list[TokenDelta]:
        """Take what was produced for a driver, waiting up to ``wait_s`` seconds for something.

        Raises:
            RankUnavailableError: nothing is left and nothing will come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or driver_id in self._outputs, wait_s)
            if self._closed and driver_id not in self._outputs:
                raise self._unavailable()
            return self._outputs.pop(driver_id, [])

    def close(self) -> None:
        """Stop the thread after the step in progress; pending calls fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - a bug of ours: whoever waits must hear of it
            self._failure = error
        with self._changed:
            self._closed = True
            calls = list(self._calls)
            self._changed.notify_all()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._unavailable())

    def _turn(self) -> bool:
        """Apply the calls that came in, then run one step; False when closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or bool(self._calls) or self.engine.has_work
            )
            if self._closed:
                return False
            calls = list(self._calls)
            self._calls.clear()
        results = [
            (future, *_run_call(function))
            for function, future in calls
            if future.set_running_or_notify_cancel()
        ]
        self._note_progress()
        # Callers get their answers before the step, which may take long, but do not put it off.
        for future, value, error in results:
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        deltas = self.engine.step()
        self._note_progress()
        self._publish(deltas)
        if self.engine.has_work and not self.engine.scheduler.running:
            # Sequences of somebody else's scheduler hold the memory: look again in a while.
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._calls), _BLOCKED_WAIT_S)
        return True

    def _note_progress(self) -> None:
        self.stats = self.engine.kv.rank_stats()
        self.last_moved = time.monotonic()

    def _publish(self, deltas: Sequence[tuple[str, TokenDelta]]) -> None:
        if deltas:
            with self._changed:
                for driver_id, delta in deltas:
                    self._outputs[driver_id].append(delta)
                self._changed.notify_all()

    def _unavailable(self) -> RankUnavailableError:
        rank = self.engine.kv.dp_rank
        if self._failure is None:
            return RankUnavailableError(f"rank {rank} was closed: make a new pool")
        return RankUnavailableError(
            f"rank {rank} stopped on {type(self._failure).__name__}: {self._failure}; "
            "please report it, and make a new pool"
        )


def _run_call(function: Callable[[], object]) -> tuple[object, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 - it belongs to the caller, who re-raises it
        return None, error
