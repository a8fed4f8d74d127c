"""Ray's exceptions, translated into raykv's; the one place that knows them."""

from __future__ import annotations

from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from raykv.errors import RankUnavailableError, RaykvError

_MAX_TEXT = 300


def translate(error: Exception, who: str, timeout_s: float) -> Exception:
    """What to raise instead of one of Ray's errors.

    Args:
        error: what Ray raised.
        who: the rank and its process, for messages.
        timeout_s: seconds that were allowed.

    Returns:
        What the rank itself raised, if it is an error of raykv's or of its caller's; else a
        RankUnavailableError, or a RaykvError for a fault inside the rank.
    """
    if isinstance(error, RayTaskError):
        return _from_the_rank(error, who)
    if isinstance(error, GetTimeoutError):
        what = f"did not answer within {timeout_s:g} s"
    elif isinstance(error, ActorUnavailableError):
        what = f"cannot be reached ({_last_line(error)})"
    elif isinstance(error, RayActorError):
        what = f"died ({_last_line(error)})"
    elif isinstance(error, OutOfMemoryError):
        what = "was ended by Ray, for its node ran out of memory; use fewer or smaller ranks"
    else:
        what = f"was lost with {type(error).__name__} ({_last_line(error)})"
    return RankUnavailableError(
        f"{who} {what}: its blocks are gone; it is used again if it comes back, else launch "
        "another pool"
    )


def _from_the_rank(error: RayTaskError, who: str) -> Exception:
    cause = error.cause
    if isinstance(cause, RaykvError | ValueError | TypeError):
        return cause
    return RaykvError(f"{who} failed with {_last_line(error)}; please report it")


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = " ".join(lines[-1].split()) if lines else type(error).__name__
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
