"""The driver's end of weights versions and sleep: over all ranks at once, or not at all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from raykv.engine.weights import (
    UpdateMode,
    WeightsStatus,
    checked_tags,
    checked_version,
    pack,
)
from raykv.errors import RankUnavailableError, RequestError
from raykv.rank_handle import RankHandle, Reply, results

_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.1


class VersionedRanks:
    """What a pool does with the weights and the memory of its ranks; a part of BlockManagerPool.

    Attributes:
        ranks: one handle per dp_rank, in order.
    """

    ranks: list[RankHandle]

    def update_weights(
        self,
        version: int,
        weights: str | Path | Mapping[str, Any] | None = None,
        *,
        mode: UpdateMode = "wait",
        timeout_s: float = 600.0,
    ) -> None:
        """Serve under new weights; returns when every rank does.

        First all ranks read and check them while requests go on, then all change, each between two
        steps; where one cannot, none changes. KV of one version is never found under another: what
        is computed now is published under its own version, and sequences that run on, which depend
        on it, publish nothing more until they are computed anew. For a scheduler of your own the
        same holds for sequences that it holds now; put the new version into the namespaces of
        later ones.

        Args:
            version: greater than what the ranks serve (0 at first).
            weights: a folder or safetensors file as ``save_pretrained`` writes it, which every
                rank can read; or arrays or tensors by parameter name. None changes the version
                only.
            mode: what becomes of requests. ``wait`` admits nobody new until those that run have
                ended under the old weights, ``abort`` ends all, running and waiting (stop reason
                ``abort``), ``keep`` lets those that run go on, under the new weights, with the KV
                they have. Each token says which version it came from.
            timeout_s: seconds that it may take; what has not changed by then stays as it is.

        Raises:
            RequestError: the version is not greater, or the weights cannot be read or do not fit
                the model; nothing changed.
            NotSupportedError: there are weights, but no model.
            RankUnavailableError: a rank is gone, or it took too long. Call again, with the same
                version, to bring the other ranks to it.
        """
        if mode not in _MODES:
            raise RequestError(f"mode is {mode!r}: choose one of {', '.join(_MODES)}")
        version = checked_version(version)
        serves = self.weights_version()
        # Some may have it from an update that failed elsewhere: calling again brings the others.
        pairs = zip(self.ranks, serves, strict=True)
        behind = [rank for rank, served in pairs if served < version]
        if not behind or max(serves) > version:
            raise RequestError(
                f"weights version {version} is not greater than what the ranks serve, {serves}: "
                f"versions only grow, so use {max(serves) + 1} or more"
            )
        packed = pack(weights)
        deadline = time.monotonic() + timeout_s
        prepared: list[RankHandle] = []
        try:
            replies = [rank.prepare_weights(version, packed, mode) for rank in behind]
            results([_Noted(*each, prepared) for each in zip(replies, behind, strict=True)])
            _wait(behind, lambda status: status.is_staged, deadline, "read the weights")
            results([rank.apply_weights(version) for rank in behind])
            _wait(behind, lambda status: status.version == version, deadline, "change weights")
        except BaseException:
            _cancel(prepared, version)
            raise

    def weights_version(self) -> list[int]:
        """The version of the weights that each rank serves."""
        return [status.version for status in _statuses(self.ranks)]

    def retire(self, version: int) -> list[int]:
        """Evict what these weights computed before all else; how much that is now, per rank.

        Holds for good, also for blocks that are released later, and under every eviction policy.
        """
        return results([rank.retire(version) for rank in self.ranks])

    def sleep(self, level: int = 1) -> None:
        """Give up memory until ``wake_up``; idempotent.

        Requests under way lose their KV and go on after waking, with the same outputs; new ones
        wait. All cached prefixes are forgotten.

        Args:
            level: 1 gives up the KV memory, 2 the model's weights as well.

        Raises:
            RequestError: sequences of your own scheduler hold blocks, or an update is under way;
                nothing changed.
            NotSupportedError: a model that raykv did not load cannot give its memory back.
        """
        for check_only in (True, False):
            results([rank.sleep(level, check_only=check_only) for rank in self.ranks])

    def wake_up(self, tags: Iterable[str] | None = None, *, timeout_s: float = 600.0) -> None:
        """Take back what ``sleep`` gave up; returns when it is there. Idempotent.

        Weights are read from where they came last, whatever lies there now: do not overwrite a
        folder whose weights sleep.

        Args:
            tags: ``weights``, ``kv_cache`` or both; None for all.
            timeout_s: seconds that it may take.

        Raises:
            RequestError: the weights cannot be read again, such as those that came as arrays: wake
                ``kv_cache`` and update them instead.
            ConfigError: the KV memory does not fit any more, or the model's folder is gone.
            RankUnavailableError: a rank is gone, or it took too long.
        """
        wanted = checked_tags(tags)
        deadline = time.monotonic() + timeout_s
        results([rank.wake_up(wanted) for rank in self.ranks])
        _wait(self.ranks, lambda status: not set(wanted) & set(status.asleep), deadline, "wake up")


@dataclass(frozen=True, slots=True)
class _Noted:
    """A reply that notes its rank if all went well."""

    reply: Reply[None]
    rank: RankHandle
    noted: list[RankHandle]

    def result(self) -> None:
        self.reply.result()
        self.noted.append(self.rank)


def _statuses(ranks: Sequence[RankHandle]) -> list[WeightsStatus]:
    """How far each rank is, in order."""
    return results([rank.weights_status() for rank in ranks])


def _wait(
    ranks: Sequence[RankHandle],
    is_done: Callable[[WeightsStatus], bool],
    deadline: float,
    what: str,
) -> None:
    """Ask all ranks until each is done; raises what one of them failed with."""
    wait_s = _FIRST_WAIT_S
    while True:
        found = _statuses(ranks)
        left = [
            (rank, status) for rank, status in zip(ranks, found, strict=True) if not is_done(status)
        ]
        for _, status in left:
            if status.error is not None:
                raise status.error
        if not left:
            return
        if time.monotonic() > deadline:
            raise RankUnavailableError(
                f"ranks {[rank.dp_rank for rank, _ in left]} did not {what} in time; the versions "
                f"served are {[status.version for status in found]}: allow more with timeout_s, "
                "and call again"
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _cancel(ranks: Sequence[RankHandle], version: int) -> None:
    """Let ranks that have not changed yet stay as they are; lost ones cannot be asked."""
    for reply in [rank.cancel_weights(version) for rank in ranks]:
        with contextlib.suppress(RankUnavailableError):
            reply.result()
