"""The one thread that owns a rank: applies calls between engine steps, collects outputs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from raykv.core.kv_cache_manager import RankStats
from raykv.errors import RankUnavailableError

from .engine import Engine
from .params import TokenDelta

T = TypeVar("T")

_BLOCKED_WAIT_S = 0.01


@dataclass(slots=True)
class _Channel:
    """What was produced for one driver and not seen by it yet.

    Attributes:
        first: the number of the first delta.
        deltas: in order.
    """

    first: int = 0
    deltas: list[TokenDelta] = field(default_factory=list)


class RankWorker:
    """Owns an engine and its rank's KV; every other thread goes through it.

    Args:
        engine: what to run.

    Attributes:
        stats: the rank's counters as of the last call or step.
        last_moved: ``time.monotonic`` of the owning thread's last turn; old while ``is_busy`` means
            stuck.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last_moved = time.monotonic()
        self.stats: RankStats = engine.kv.rank_stats()
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._channels: dict[str, _Channel] = {}  # by driver id
        self._changed = threading.Condition()
        self._closed = False
        self._is_woken = False
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"raykv-rank-{engine.kv.dp_rank}", daemon=True
        )
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the owning thread, between two steps."""
        future: Future[T] = Future()
        if os.getpid() != self._pid:
            raise RankUnavailableError(
                f"rank {self.engine.kv.dp_rank} lives in process {self._pid}, and a fork of it has "
                "no thread to run it: make pools after forking"
            )
        with self._changed:
            if self._closed:
                raise self._unavailable()
            if not self.is_busy:
                self.last_moved = time.monotonic()  # from now on it has to move
            self._calls.append((function, future))  # type: ignore[arg-type]
            self._changed.notify_all()
        return future

    def wake(self) -> None:
        """Something has come that the next step can go on with; from any thread."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or stopped on a failure."""
        return self._closed

    @property
    def is_busy(self) -> bool:
        """Whether the owning thread has something to do: then ``last_moved`` advances."""
        return bool(self._calls) or self.engine.has_work

    def check_alive(self) -> None:
        """Raises RankUnavailableError if the owning thread has ended."""
        if self._closed:
            raise self._unavailable()

    def poll(self, driver_id: str, wait_s: float, seen: int = 0) -> tuple[int, list[TokenDelta]]:
        """What was produced for a driver, waiting up to ``wait_s`` seconds for something.

        Args:
            driver_id: whose.
            wait_s: seconds to wait.
            seen: deltas that it has seen: those are forgotten, all others come (again).

        Returns:
            The number of the first delta, counted from 0, and the deltas.

        Raises:
            RankUnavailableError: nothing is left and nothing will come.
        """
        with self._changed:
            channel = self._channels.get(driver_id, _Channel(seen))
            del channel.deltas[: max(0, seen - channel.first)]
            channel.first = max(seen, channel.first)
            # Looked up again each time: it is made by the first delta, and gone with the driver.
            self._changed.wait_for(
                lambda: self._closed or bool(self._channels.get(driver_id, channel).deltas), wait_s
            )
            channel = self._channels.get(driver_id, _Channel(seen))
            if self._closed and not channel.deltas:
                raise self._unavailable()
            return channel.first, list(channel.deltas)

    def forget(self, driver_id: str) -> None:
        """Drop what was produced for a driver; the next delta for it is number 0."""
        with self._changed:
            self._channels.pop(driver_id, None)

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
            self._is_woken = False
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
        if self.engine.has_work and self.engine.is_waiting:
            # Somebody else's sequences hold the memory, or the host owes an answer or a copy.
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._is_woken or bool(self._calls), _BLOCKED_WAIT_S
                )
        return True

    def _note_progress(self) -> None:
        self.stats = self.engine.kv.rank_stats()
        self.last_moved = time.monotonic()

    def _publish(self, deltas: Sequence[tuple[str, TokenDelta]]) -> None:
        if deltas:
            with self._changed:
                for driver_id, delta in deltas:
                    self._channels.setdefault(driver_id, _Channel()).deltas.append(delta)
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
