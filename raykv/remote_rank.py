"""A rank behind messages: the driver's end, without saying what carries them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from raykv.config import RayConfig
from raykv.core.kv_cache_manager import NO_ROOM, RankStats, Room
from raykv.core.sequence import Sequence
from raykv.engine.params import TokenDelta
from raykv.errors import RankUnavailableError, RaykvError
from raykv.messages import Answer, Call, Health, Operation, Outputs, RankInfo
from raykv.mirror import Mirror
from raykv.rank_handle import Failed, Reply
from raykv.remote_calls import RemoteCalls
from raykv.transfer_report import TransferReport

_RESEND_S = 0.01
_POLL_AGAIN_S = 0.05
_log = logging.getLogger(__name__)


class ReplyLostError(RankUnavailableError):
    """Whether a call was applied is not known; sent again, it is applied once."""


class RemoteRank(RemoteCalls):
    """A rank behind messages. Keeps the driver's copies of sequences and counters up to date.

    A rank that died, was silent for too long or knows this driver no more is *lost*: what it held
    is gone, whatever was sent is given up, and no answer to it is believed, for the next session
    begins. A heartbeat that is answered again ends that.

    Args:
        info: what the rank said of itself.
        driver_id: who this driver is.
        config: time limits.

    Attributes:
        info: what the rank said of itself when it was there last.
    """

    def __init__(self, info: RankInfo, driver_id: str, config: RayConfig) -> None:
        self.info = info
        self.dp_rank = info.dp_rank
        self.limits = info.limits
        self.block_size = info.block_size
        self.driver_id = driver_id
        self.config = config
        self._stats = info.stats
        self._numbers = itertools.count(1)
        self._unsettled: set[int] = set()  # calls of this session that may be sent again
        self._num_seen = 0  # deltas of this session
        self._returned_s: float | None = None
        self._welcomer: threading.Thread | None = None
        self._session_tried: int | None = None  # the last one in which the rank was welcomed
        self._mirror = Mirror(info.dp_rank, info.block_size)
        self._interrupted: list[_RemoteReply] = []
        self._num_resets = self._num_resets_heard = 0  # of the prefix cache: asked for, and done
        self._lock = threading.RLock()

    # -- what carries the messages ----------------------------------------------------------------

    @abstractmethod
    def send(self, call: Call) -> Reply[Answer]:
        """Carry a call to the rank.

        The reply raises ReplyLostError if the call may be sent again, and any other
        RankUnavailableError if the rank is lost.
        """

    @abstractmethod
    def fetch(self, session: int, seen: int, wait_s: float) -> Outputs:
        """Carry a poll to the rank, and wait for what it answers; raises as ``send``."""

    # -- lost and found ---------------------------------------------------------------------------

    def lose(self, reason: str, session: int | None = None) -> None:
        """Give the rank up.

        Args:
            reason: for errors.
            session: the one that failed; None for the current one. An earlier one was given up.
        """
        with self._lock:
            if session not in {None, self.session} or self.lost is not None:
                return
            self.lost = reason
            self.session += 1
            self._mirror.lose_all()
            self._interrupted.clear()

    def hear(self, health: Health) -> None:
        """Take note of an answer to a heartbeat: lost, or back."""
        who = f"rank {self.dp_rank}"
        if self.lost is None:
            if health.info.epoch != self.info.epoch:
                self.lose(f"{who} was restarted: its blocks are gone")
            elif not health.knows_driver:
                self.lose(
                    f"{who} was not heard by this driver for {self.config.lease_s:g} s, and took "
                    "back its blocks"
                )
        if self.lost is not None and (self._welcomer is None or not self._welcomer.is_alive()):
            self._return(health.info)

    def take_lost(self, sequence: Sequence) -> bool:
        """See RankHandle."""
        with self._lock:
            return self._mirror.take_lost(sequence)

    def _return(self, info: RankInfo) -> None:
        """A lost rank is back, empty as far as this driver is concerned."""
        with self._lock:
            self.info, self.limits = info, info.limits
            self._stats = info.stats
            if self._session_tried == self.session:
                self.session += 1  # the rank remembers the answers of the attempt before
            self._session_tried = self.session
            self._numbers = itertools.count(1)
            self._unsettled.clear()
            self._num_seen = 0
            # Its first word is the tombstone of all that was given up; nobody waits for the answer.
            self.send(self._new_call("refresh"))
            self._welcomer = threading.Thread(
                target=self._welcome, name=f"raykv-welcome-{self.dp_rank}", daemon=True
            )
        self._welcomer.start()

    def _welcome(self) -> None:
        """Bring the rank to where the others are, and only then use it again."""
        session = self.session
        try:
            # It may still know what a reset was to make it forget: even anew from a restart, for
            # another driver may have used it since.
            if self._num_resets_heard < self._num_resets:
                self._call("reset_prefix_cache", argument=self._num_resets).result()
            self.welcome(self)
        except Exception as error:  # noqa: BLE001 - the next heartbeat tries again
            _log.warning("rank %d is back, but cannot be used: %s", self.dp_rank, error)
            return
        with self._lock:
            if session == self.session:
                self._returned_s = time.monotonic()
                self.lost = None

    @property
    def room(self) -> Room:
        """See RankHandle; a lost rank has nothing, one that is back offers more by and by."""
        if self.lost is not None:
            return NO_ROOM
        room = self._stats.room
        if self._returned_s is not None:
            ramp = (time.monotonic() - self._returned_s) / max(self.config.ramp_s, 1e-9)
            if ramp < 1:
                blocks = (int(ramp * room.num_available_blocks), int(ramp * room.num_free_blocks))
                return Room(*blocks, room.num_free_single_blocks)
            self._returned_s = None
        return room

    # -- calls ------------------------------------------------------------------------------------

    @property
    def stats(self) -> RankStats:
        """The rank's counters as of its last reply; zeros while it is lost."""
        return self._stats if self.lost is None else RankStats()

    def reset_prefix_cache(self) -> Reply[int]:
        """See RankHandle; a lost rank does it when it is back, before anything else."""
        with self._lock:
            self._num_resets += 1
            number = self._num_resets
        return self._call("reset_prefix_cache", argument=number)

    def transfer(self) -> Reply[TransferReport]:
        """See RankHandle."""
        with self._lock:
            loading = self._mirror.loading()
        return self._call("transfer", loading)

    def apply_weights(self, version: int) -> Reply[None]:
        """See RankHandle."""
        with self._lock:
            held = self._mirror.held()
        return self._call("apply_weights", held, {"version": version})

    def poll(self, wait_s: float) -> list[TokenDelta]:
        """See RankHandle."""
        with self._lock:
            session, seen = self.session, self._num_seen
            if self.lost is not None:
                raise RankUnavailableError(self.lost)
        try:
            outputs = self.fetch(session, seen, wait_s)
        except ReplyLostError:
            time.sleep(min(wait_s, _POLL_AGAIN_S))  # such as while it starts again
            return []  # what was lost comes again
        except RankUnavailableError as error:
            self.lose(str(error), session)
            raise
        with self._lock:
            if session != self.session:
                return []
            new = outputs.deltas[max(0, self._num_seen - outputs.first) :]
            self._num_seen = max(self._num_seen, outputs.first + len(outputs.deltas))
            self._stats = outputs.stats
        return new

    def _call(
        self, operation: Operation, sequences: list[Sequence] | None = None, argument: Any = None
    ) -> Reply[Any]:
        self._settle_interrupted()
        sequences = sequences or []
        with self._lock:
            if self.lost is not None and threading.current_thread() is not self._welcomer:
                return Failed(RankUnavailableError(self.lost))
            try:
                call = self._new_call(operation, sequences, argument)
            except RaykvError as error:
                return Failed(error)
            self._unsettled.add(call.number)
            try:
                return _RemoteReply(self, call, sequences, self.send(call))
            except Exception:
                self._unsettled.discard(call.number)
                raise
            except BaseException:
                # Whether it was sent is not known: the next call sends it (again), and reads on.
                lost = Failed(ReplyLostError(f"call {call.number} was interrupted"))
                self._interrupted.append(_RemoteReply(self, call, sequences, lost))
                raise

    def _new_call(
        self, operation: Operation, sequences: SequenceOf[Sequence] = (), argument: Any = None
    ) -> Call:
        updates = self._mirror.updates(sequences) if sequences else None
        number, epoch = next(self._numbers), self.info.epoch
        settled = min(self._unsettled, default=number) - 1
        return Call(
            self.driver_id, self.session, number, epoch, operation, updates, argument, settled
        )

    def await_answer(self, reply: _RemoteReply) -> Any:
        """Wait for a reply; send its call again where the answer was lost."""
        call, answer = reply.call, reply.answer
        deadline = time.monotonic() + self.config.call_timeout_s
        pause_s = 0.0
        while True:
            try:
                got = answer.result()
                break
            except ReplyLostError as error:
                if time.monotonic() > deadline:
                    self.lose(str(error), call.session)
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s + _RESEND_S, 1.0)
            except RankUnavailableError as error:
                self.lose(str(error), call.session)
                raise
            except BaseException as error:
                # An interrupt must not lose what the call did: the next call reads the answer.
                with self._lock:
                    if isinstance(error, Exception):
                        self._settle(call)
                    else:
                        self._interrupted.append(reply)
                raise
            with self._lock:
                self._check_session(call)
                answer = self.send(call)
        with self._lock:
            self._check_session(call)
            self._settle(call)
            self._stats = got.stats
            self._mirror.apply(got, call, reply.sequences)
            if call.operation == "reset_prefix_cache" and got.error is None:
                self._num_resets_heard = max(self._num_resets_heard, call.argument)
        if got.error is not None:
            raise got.error
        return got.value

    def _settle(self, call: Call) -> None:
        if call.session == self.session:
            self._unsettled.discard(call.number)

    def _check_session(self, call: Call) -> None:
        if call.session != self.session:
            raise RankUnavailableError(self.lost or f"rank {self.dp_rank} was lost meanwhile")

    def _settle_interrupted(self) -> None:
        while True:
            with self._lock:
                if not self._interrupted:
                    return
                reply = self._interrupted.pop(0)
            with contextlib.suppress(Exception):  # whose call it was has heard of another error
                reply.result()


@dataclass(frozen=True, slots=True, eq=False)
class _RemoteReply:
    """A reply that updates the driver's copies when it is read."""

    rank: RemoteRank
    call: Call
    sequences: list[Sequence]
    answer: Reply[Answer]

    @property
    def session(self) -> int:
        return self.call.session

    def result(self) -> Any:
        return self.rank.await_answer(self)
