"""Parts for tests of code that uses host tiers: copies and tiers with faults on demand."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raykv.config import PoolConfig
from raykv.errors import RankUnavailableError
from raykv.host.handle import TierHandle, done
from raykv.host.tier_host import TierHost
from raykv.memory.copy_batches import CopyBatch, Fault

_LOSSY = frozenset({"join", "renew", "exchange", "unmapped"})  # what ranks say


@dataclass
class RandomCopyFaults:
    """What goes wrong with copies, each with a probability per batch; see CopyFaults.

    Attributes:
        rng: decides.
        fail: it fails before anything is copied.
        short: it fails in the middle.
        late: it is carried out after the next one.
        corrupt: a byte arrives changed.
        counts: how often each came to pass.
    """

    rng: random.Random
    fail: float = 0.0
    short: float = 0.0
    late: float = 0.0
    corrupt: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def on_copy(self, batch: CopyBatch) -> Fault | None:  # noqa: ARG002 - see CopyFaults
        """See CopyFaults."""
        point = self.rng.random()
        kinds: tuple[Fault, ...] = ("fail", "short", "late", "corrupt")
        for kind in kinds:
            point -= getattr(self, kind)
            if point < 0:
                self.counts[kind] += 1
                return kind
        return None


@dataclass
class TierFaults:
    """What goes wrong on a rank's way to its host tier and back, per call.

    Attributes:
        rng: decides.
        lost_call: the call does not arrive.
        lost_reply: it is applied, but the answer does not arrive.
        counts: how often each came to pass.
    """

    rng: random.Random
    lost_call: float = 0.0
    lost_reply: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def draw(self) -> str:
        """The fault of one call, mostly ``""``."""
        point = self.rng.random()
        for kind in ("lost_call", "lost_reply"):
            point -= getattr(self, kind)
            if point < 0:
                self.counts[kind] += 1
                return kind
        return ""


class FaultyTier(TierHandle):
    """A host tier in this process that can be frozen, killed and started again.

    Its methods may be called from any thread.

    Args:
        config: the pool's configuration, its hash seed drawn.
        faults: what gets lost.
        clock: seconds, for leases.

    Attributes:
        host: the tier, as started last.
        faults: what gets lost.
        is_dead: whether it was killed, and not started again.
        is_frozen: whether it answers nothing now.
    """

    def __init__(
        self,
        config: PoolConfig,
        faults: TierFaults | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.faults = faults
        self.is_dead = False
        self._clock = clock
        self._lock = threading.RLock()
        self.is_frozen = False
        self._waiting: list[tuple[Future[Any], str, tuple[Any, ...]]] = []
        self.host = TierHost(config, clock=clock)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """See TierHandle."""
        with self._lock:
            if not self.is_frozen:
                return self._carry(method, arguments)
            waiting: Future[Any] = Future()
            self._waiting.append((waiting, method, arguments))
            return waiting

    def freeze(self) -> None:
        """As SIGSTOP: calls arrive, but nothing answers."""
        with self._lock:
            self.is_frozen = True

    def thaw(self) -> None:
        """As SIGCONT: what came meanwhile is done, in order."""
        with self._lock:
            self.is_frozen = False
            waiting, self._waiting = self._waiting, []
            carried = [(one, self._carry(method, values)) for one, method, values in waiting]
        for one, result in carried:
            _pass_on(result, one)

    def kill(self) -> None:
        """As SIGKILL: its books are gone, and so is what it was asked; ranks keep the memory."""
        with self._lock:
            self.is_dead = True
            self.host.close()
        self.thaw()

    def restart(self) -> None:
        """Start again, empty."""
        with self._lock:
            self.host.close()
            self.host = TierHost(self.config, clock=self._clock)
            self.is_dead = False

    def close(self) -> None:
        """See TierHandle."""
        self.thaw()
        self.host.close()

    def _carry(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        if self.is_dead:
            return done(_fail("the host tier was killed"))
        fault = ""
        if self.faults is not None and method in _LOSSY:
            fault = self.faults.draw()
        if fault != "lost_call":
            result = done(lambda: getattr(self.host, method)(*arguments))
        return done(_fail(f"{method}: {fault}, as asked for")) if fault else result


def _fail(message: str) -> Callable[[], None]:
    def fail() -> None:
        raise RankUnavailableError(message)

    return fail


def _pass_on(result: Future[Any], waiting: Future[Any]) -> None:
    error = result.exception()
    if error is None:
        waiting.set_result(result.result())
    else:
        waiting.set_exception(error)
