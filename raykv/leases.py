"""Which drivers a rank knows, in which session, and until when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from raykv.errors import RankUnavailableError
from raykv.messages import Answer
from raykv.rank_sequences import RankSequences

_MAX_REMEMBERED = 4096  # for drivers that leave answers unread
_MAX_ENDED = 4096


def session_name(driver_id: str, session: int) -> str:
    """Whom an engine works for: requests and outputs of two sessions must not meet."""
    return f"{driver_id}/{session}"


@dataclass(slots=True, eq=False)
class Lease:
    """One session of one driver.

    Attributes:
        driver_id: whose.
        session: which.
        expires_s: when it ends unless the driver is heard of, on the rank's clock.
        sequences: the rank's copies of the driver's sequences.
        answers: the latest answers, by call number.
        forgotten: the highest call number whose answer is not remembered any more.
    """

    driver_id: str
    session: int
    expires_s: float
    sequences: RankSequences
    answers: OrderedDict[int, Answer] = field(default_factory=OrderedDict)
    forgotten: int = 0

    @property
    def name(self) -> str:
        """Of the session, for the engine: see ``session_name``."""
        return session_name(self.driver_id, self.session)

    def remember(self, answer: Answer, settled: int) -> None:
        """Keep an answer for whoever asks again; those up to number ``settled`` go."""
        if settled > self.forgotten:
            self.forgotten = settled
            for number in [number for number in self.answers if number <= settled]:
                del self.answers[number]
        self.answers[answer.number] = answer
        if len(self.answers) > _MAX_REMEMBERED:
            number, _ = self.answers.popitem(last=False)
            self.forgotten = max(self.forgotten, number)


class Leases:
    """The sessions that hold something here. A driver is known while it is heard of.

    One thread opens and ends sessions; ``renew`` may come from any.

    Args:
        who: names the rank in errors.
        lease_s: seconds that a driver may be silent.
        clock: seconds.
    """

    def __init__(self, who: str, lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self._who = who
        self._clock = clock
        self._open: dict[str, Lease] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # the last session that was ended

    def all(self) -> list[Lease]:
        """Sessions that are open."""
        return list(self._open.values())

    def find(self, driver_id: str, session: int) -> tuple[Lease | None, Lease | None]:
        """The session's lease, renewed, and an older one of the driver that it replaces.

        Raises:
            RankUnavailableError: the session is over.
        """
        lease = self._open.get(driver_id)
        if session <= self._ended.get(driver_id, -1) or (lease and session < lease.session):
            raise RankUnavailableError(
                f"{self._who} refuses a call of session {session} of driver {driver_id}: it is "
                f"over, for the driver gave it up or was silent for {self.lease_s:g} s; its blocks "
                "are gone, allocate again"
            )
        if lease is None or lease.session == session:
            if lease is not None:
                lease.expires_s = self._clock() + self.lease_s
            return lease, None
        return None, lease

    def open(self, driver_id: str, session: int) -> Lease:
        """Begin a session; the one before must have been ended."""
        expires_s = self._clock() + self.lease_s
        lease = Lease(driver_id, session, expires_s, RankSequences(driver_id))
        self._open[driver_id] = lease
        return lease

    def end(self, lease: Lease) -> None:
        """Know the session no more, and refuse what still comes of it."""
        del self._open[lease.driver_id]
        self._ended[lease.driver_id] = lease.session
        self._ended.move_to_end(lease.driver_id)
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def renew(self, driver_id: str, session: int) -> bool:
        """Note a sign of life; whether the session can go on or begin."""
        lease = self._open.get(driver_id)
        if lease is not None and lease.session == session:
            lease.expires_s = self._clock() + self.lease_s
            return True
        return session > self._ended.get(driver_id, -1)

    def expired(self) -> list[Lease]:
        """Sessions whose driver was silent for too long."""
        now = self._clock()
        return [lease for lease in self.all() if lease.expires_s < now]
