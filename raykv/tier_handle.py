"""How ranks and drivers talk to a host tier: one small interface, whatever lies between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from raykv.host_stats import HostTierStats
from raykv.memory.copy_batches import CopyFaults
from raykv.tier_host import TierHost
from raykv.tier_messages import TierAnswer, TierCall, TierInfo


class TierHandle(ABC):
    """A node's host tier. Calls start at once, in order; futures raise what the tier raised.

    Attributes:
        copy_faults: what goes wrong on purpose with copies to and from its memory, in tests.
    """

    copy_faults: CopyFaults | None = None

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Start a method of TierHost; never waits, never raises."""

    def join(
        self, client_id: str, pid: int, block_bytes: int, replaces: str = ""
    ) -> Future[TierInfo]:
        """See TierHost.join."""
        return self.call("join", client_id, pid, block_bytes, replaces)

    def renew(self, client_id: str) -> Future[bool]:
        """See TierHost.renew."""
        return self.call("renew", client_id)

    def exchange(self, call: TierCall) -> Future[TierAnswer]:
        """See TierHost.exchange."""
        return self.call("exchange", call)

    def unmapped(self, client_id: str) -> Future[None]:
        """See TierHost.unmapped."""
        return self.call("unmapped", client_id)

    def reset(self) -> Future[tuple[int, int]]:
        """See TierHost.reset."""
        return self.call("reset")

    def retire(self, weights_version: int) -> Future[int]:
        """See TierHost.retire."""
        return self.call("retire", weights_version)

    def stats(self) -> Future[HostTierStats]:
        """See TierHost.stats."""
        return self.call("stats")

    def check_integrity(self) -> Future[None]:
        """See TierHost.check_integrity."""
        return self.call("check_integrity")

    def close(self) -> None:  # noqa: B027 - of a tier that others use, there is nothing to close
        """Let go of the tier; idempotent."""


class LocalTier(TierHandle):
    """A host tier in this process: calls are done when they return.

    Args:
        host: the tier.
    """

    def __init__(self, host: TierHost) -> None:
        self.host = host

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """See TierHandle."""
        return done(lambda: getattr(self.host, method)(*arguments))

    def close(self) -> None:
        """See TierHandle."""
        self.host.close()


def done(function: Callable[[], Any]) -> Future[Any]:
    """What a function says or raises, as a future that is there."""
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - it belongs to whoever asks for the result
        future.set_exception(error)
    return future
