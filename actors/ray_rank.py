"""A rank in a Ray actor: carries a RemoteRank's messages."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from raykv.actors.errors import translate
from raykv.actors.process import RankProcess
from raykv.actors.tier_actor import RayTier
from raykv.actors.wire import pack, split, unpack
from raykv.config import RayConfig
from raykv.errors import RankUnavailableError
from raykv.host.handle import TierHandle
from raykv.messages import Answer, Call, Health, Outputs, RankInfo
from raykv.rank_handle import Reply
from raykv.remote_rank import RemoteRank, ReplyLostError

_PATIENCE = 4
_SLICE_S = 0.1  # how soon whoever waits hears that the rank was lost
_GONE = "its blocks are gone; it is used again if it comes back, else launch another pool"
_CLOSE_S = 2.0
_KILL_S = 2.0


class RayRank(RemoteRank):
    """A rank in an actor.

    Args:
        actor: the handle of its RankActor.
        info: what the rank said of itself.
        node_id: the Ray node that it runs on, as it was heard last.
        driver_id: who this driver is.
        config: time limits.
    """

    def __init__(
        self, actor: Any, info: RankInfo, node_id: str, *, driver_id: str, config: RayConfig
    ) -> None:
        super().__init__(info, driver_id, config)
        self._actor = actor
        self.node_id = node_id
        self._is_here = node_id == ray.get_runtime_context().get_node_id()
        self._process = RankProcess.find(info.pid) if self._is_here else None
        self._beat: Any = None  # the reference of the answer to the heartbeat under way
        self._num_silent = 0  # heartbeats since it was heard last
        self._closing: Any = None  # the reference of the actor's answer to ``close``
        self._is_closed = False
        self._close_lock = threading.Lock()

    def send(self, call: Call) -> Reply[Answer]:
        """Start a call; Ray keeps the order of one driver's calls."""
        parts = split(pack(call))
        return _RayReply(self, call.session, self._submit(self._actor.call, *parts))

    def fetch(self, session: int, seen: int, wait_s: float) -> Outputs:
        """See RemoteRank."""
        reference = self._submit(self._actor.poll, self.driver_id, session, seen, wait_s)
        outputs: Outputs = self.get(reference, session, wait_s)
        return outputs

    def connect_tier(self, tier: TierHandle, *, is_back: bool = False) -> Reply[None]:
        """See RankHandle; the rank's process talks to the tier's itself."""
        assert isinstance(tier, RayTier), "ranks in actors use tiers in actors"
        reference = self._submit(self._actor.connect_tier, tier.actor, is_back=is_back)
        return _RayAnswer(self, self.session, reference)

    def find_tier(self) -> Any:
        """The actor of the host tier that the rank uses."""
        return self.get(self._submit(self._actor.tier), self.session)

    def find_node(self) -> str:
        """The Ray node that it runs on now."""
        _, self.node_id = self.get(self._submit(self._actor.ready), self.session)
        return self.node_id

    def beat(self) -> None:
        """See RankHandle."""
        if self._closing is not None or self._is_closed or not ray.is_initialized():
            return
        has_ended = self._look_at_process()
        if self._beat is None:
            self._beat = self._submit(self._actor.health, self.driver_id, self.session)
        if self._beat is None:
            return
        if not ray.wait([self._beat], timeout=0)[0]:
            self._note_silence()
            return
        reference, self._beat = self._beat, None
        try:
            health: Health = ray.get(reference)
        except ActorUnavailableError:
            self._note_silence()  # not reached at this time, or starting again
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, it is not there
            self.lose(str(translate(error, self._who, 0)))
        else:
            self._num_silent = 0
            is_new = health.info.pid != self.info.pid
            if is_new:
                is_here = self._is_here and health.info.node == self.info.node
                self._process = RankProcess.find(health.info.pid) if is_here else None
            if is_new or not has_ended:  # else it answered before it died
                self.hear(health)

    def _look_at_process(self) -> bool:
        """Whether the rank's process is seen to have ended, which Ray says late."""
        has_ended = self._process is not None and self._process.wait(0)
        if has_ended:
            self.lose(f"{self._who} has died: {_GONE}")
        return has_ended

    def _note_silence(self) -> None:
        # Counted, not timed: a driver that was stopped itself finds nobody silent.
        self._num_silent += 1
        limit_s = self.config.silence_s
        if self._process is not None and self._process.runs():
            limit_s *= _PATIENCE  # such as while it takes in gigabytes of weights
        if self._num_silent * self.config.heartbeat_s > limit_s:
            self.lose(f"{self._who} is silent for {limit_s:g} s: {_GONE}")

    def get(self, reference: Any, session: int, wait_s: float = 0) -> Any:
        """Wait for an answer of the actor, as long as the session lasts.

        Args:
            reference: of the answer; None for a call that was not sent.
            session: in which it was sent.
            wait_s: seconds that the actor was asked to wait, on top of the time limit.

        Raises:
            ReplyLostError: it was not reached for the moment.
            RankUnavailableError: the answer will not come.
        """
        if reference is None:
            raise self._unavailable()
        timeout_s = self.config.call_timeout_s + wait_s
        deadline = time.monotonic() + timeout_s
        while True:
            if session != self.session or not ray.is_initialized():
                raise self._unavailable()
            left_s = deadline - time.monotonic()
            try:
                return ray.get(reference, timeout=max(0, min(left_s, _SLICE_S)))
            except GetTimeoutError as error:
                if left_s <= 0:
                    raise RankUnavailableError(
                        str(translate(error, self._who, timeout_s))
                    ) from error
            except RayTaskError as error:
                cause = translate(error, self._who, timeout_s)
                raise cause from error
            except ActorUnavailableError as error:
                raise ReplyLostError(str(translate(error, self._who, timeout_s))) from error
            except Exception as error:  # RayError, and ValueError once Ray was shut down
                raise RankUnavailableError(str(translate(error, self._who, timeout_s))) from error

    def ask_to_close(self) -> None:
        """Begin closing without waiting, so that ranks can close side by side."""
        with self._close_lock:
            if self._closing is None:
                self._closing = self._submit(self._actor.close)
            self.lose(f"rank {self.dp_rank} was closed: make a new pool")

    def ask_to_leave(self) -> Any:
        """Give up all that this driver holds there; the rank goes on.

        Returns:
            The reference of the answer; None if nobody hears.
        """
        with self._close_lock, self._lock:
            reference = None
            if not self._is_closed and self.lost is None:
                parts = split(pack(self._new_call("leave")))
                reference = self._submit(self._actor.call, *parts)
            self._is_closed = True
            self.lose(f"the pool was closed, and left rank {self.dp_rank}: attach again")
            return reference

    def close(self) -> None:
        """Let the step in progress end, within bounds, then end the process and see it gone."""
        if not self._is_closed:
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

    def _submit(self, method: Any, *arguments: Any, **options: Any) -> Any:
        """Start a call of the actor; None if that cannot be done."""
        # A call on a handle starts another Ray by itself where none runs.
        if not ray.is_initialized():
            return None
        try:
            return method.remote(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - Ray raises bare ones once it was shut down
            self.lose(str(translate(error, self._who, self.config.call_timeout_s)))
            return None

    def _unavailable(self) -> RankUnavailableError:
        if self.lost is not None:
            return RankUnavailableError(self.lost)
        if not ray.is_initialized():
            return RankUnavailableError(
                f"{self._who} is gone, for Ray was shut down: launch another pool"
            )
        return RankUnavailableError(f"{self._who} was lost meanwhile: {_GONE}")

    def _end(self) -> None:
        if ray.is_initialized():
            with contextlib.suppress(RayError, ValueError):  # another Ray does not know it
                ray.kill(self._actor)
        if self._process is not None and not self._process.wait(_KILL_S):
            self._process.kill()  # a stopped process does not hear Ray
            self._process.wait(_KILL_S)


@dataclass(frozen=True, slots=True)
class _RayAnswer:
    rank: RayRank
    session: int
    reference: Any

    def result(self) -> Any:
        return self.rank.get(self.reference, self.session)


class _RayReply(_RayAnswer):
    __slots__ = ()

    def result(self) -> Answer:
        answer: Answer = unpack([self.rank.get(self.reference, self.session)])
        return answer
