"""How ranks and drivers talk to a host tier: one small interface, whatever lies between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raykv.core.namespace import Namespace
from raykv.host.messages import BlockKind, TierAnswer, TierCall, TierInfo
from raykv.host.state_stats import HostStatesStats
from raykv.host.stats import HostTierStats
from raykv.host.tier_host import TierHost
from raykv.memory.copy_batches import CopyFaults


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
        self, client_id: str, pid: int, kind: BlockKind, replaces: str = ""
    ) -> Future[TierInfo]:
        """See TierHost.join."""
        return self.call("join", client_id, pid, kind, replaces)

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

    def prefetch(self, tokens: NDArray[np.int32], namespace: Namespace) -> Future[bool]:
        """See TierHost.prefetch."""
        return self.call("prefetch", tokens, namespace)

    def wait_prefetch(
        self, tokens: NDArray[np.int32], namespace: Namespace, timeout_s: float
    ) -> Future[bool]:
        """See TierHost.wait_prefetch."""
        return self.call("wait_prefetch", tokens, namespace, timeout_s)

    def drain(self, timeout_s: float) -> Future[bool]:
        """See TierHost.drain."""
        return self.call("drain", timeout_s)

    def source_stats(self) -> Future[dict[str, Any]]:
        """See TierHost.source_stats."""
        return self.call("source_stats")

    def stats(self) -> Future[HostTierStats]:
        """See TierHost.stats."""
        return self.call("stats")

    def state_stats(self) -> Future[HostStatesStats | None]:
        """See TierHost.state_stats."""
        return self.call("state_stats")

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
