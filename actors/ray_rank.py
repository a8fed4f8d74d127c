"""A rank in a Ray actor: carries a RemoteRank's messages."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raykv.actors.errors import translate
from raykv.actors.process import RankProcess
from raykv.actors.wire import pack, split, unpack
from raykv.core.kv_cache_manager import NO_ROOM, Room
from raykv.engine.params import TokenDelta
from raykv.errors import RankUnavailableError
from raykv.messages import Answer, Call, RankInfo
from raykv.rank_handle import Reply
from raykv.remote_rank import RemoteRank

_CLOSE_S = 2.0
_KILL_S = 2.0


class RayRank(RemoteRank):
    """A rank in an actor.

    Once it died, froze beyond the time limit or was cut off, the handle stays unavailable: calls
    may have been applied whose answers were never seen, so nothing it says later is believed.

    Args:
        actor: the handle of its RankActor.
        info: what the rank said of itself.
        node_id: the Ray node that it runs on.
        driver_id: who this driver is.
        call_timeout_s: seconds that a call may take.
    """

    def __init__(
        self, actor: Any, info: RankInfo, node_id: str, *, driver_id: str, call_timeout_s: float
    ) -> None:
        super().__init__(info, driver_id)
        self._actor = actor
        self._call_timeout_s = call_timeout_s
        is_here = node_id == ray.get_runtime_context().get_node_id()
        self._process = RankProcess.find(info.pid) if is_here else None
        self._lost: str | None = None  # why nothing can be had from it any more
        self._closing: Any = None  # the reference of the actor's answer to ``close``
        self._is_closed = False
        self._close_lock = threading.Lock()

    def send(self, call: Call) -> Reply[Answer]:
        """Start a call; Ray keeps the order of one driver's calls."""
        parts = split(pack(call))
        return _RayReply(self, self._submit(self._actor.call, *parts))

    def poll(self, wait_s: float) -> list[TokenDelta]:
        """See RankHandle."""
        return self.take(self.get(self._submit(self._actor.poll, self.driver_id, wait_s), wait_s))

    @property
    def room(self) -> Room:
        """See RankHandle; a lost rank has nothing to give."""
        return super().room if self._lost is None else NO_ROOM

    def get(self, reference: Any, wait_s: float = 0) -> Any:
        """Wait for an answer of the actor.

        Args:
            reference: of the answer; None for a call that was not sent.
            wait_s: seconds that the actor was asked to wait, on top of the time limit.

        Raises:
            RankUnavailableError: it will not come.
        """
        if reference is None or self._is_unavailable():
            raise RankUnavailableError(self._lost)
        timeout_s = self._call_timeout_s + wait_s
        try:
            return ray.get(reference, timeout=timeout_s)
        except RayTaskError as error:
            cause = translate(error, self._who, timeout_s)
            raise cause from error
        except Exception as error:  # RayError, and ValueError once Ray was shut down
            if self._lost is None:
                self._lost = str(translate(error, self._who, timeout_s))
            raise RankUnavailableError(self._lost) from error

    def ask_to_close(self) -> None:
        """Begin closing without waiting, so that ranks can close side by side."""
        with self._close_lock:
            if self._closing is None:
                self._closing = self._submit(self._actor.close)
            self._lost = f"rank {self.dp_rank} was closed: make a new pool"

    def close(self) -> None:
        """Let the step in progress end, within bounds, then end the process and see it gone."""
        self.ask_to_close()
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                if self._closing is not None and ray.is_initialized():
                    ray.wait([self._closing], timeout=_CLOSE_S)
            finally:
                self._end()

    @property
    def _who(self) -> str:
        return f"rank {self.dp_rank} (pid {self.info.pid} on {self.info.node})"

    def _is_unavailable(self) -> bool:
        # A call on a handle starts another Ray by itself where none runs.
        if self._lost is None and not ray.is_initialized():
            self._lost = f"{self._who} is gone, for Ray was shut down: launch another pool"
        return self._lost is not None

    def _submit(self, method: Any, *arguments: Any) -> Any:
        """Start a call of the actor; None if the rank is gone."""
        if self._is_unavailable():
            return None
        try:
            return method.remote(*arguments)
        except Exception as error:  # noqa: BLE001 - Ray raises bare ones once it was shut down
            self._lost = str(translate(error, self._who, self._call_timeout_s))
            return None

    def _end(self) -> None:
        if ray.is_initialized():
            with contextlib.suppress(RayError, ValueError):  # another Ray does not know it
                ray.kill(self._actor)
        if self._process is not None and not self._process.wait(_KILL_S):
            self._process.kill()  # a stopped process does not hear Ray
            self._process.wait(_KILL_S)


@dataclass(frozen=True, slots=True)
class _RayReply:
    rank: RayRank
    reference: Any

    def result(self) -> Answer:
        answer: Answer = unpack([self.rank.get(self.reference)])
        return answer
