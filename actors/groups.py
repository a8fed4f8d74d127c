"""Which threads of an actor answer which of its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ray

F = TypeVar("F", bound=Callable[..., Any])


def in_group(name: str) -> Callable[[F], F]:
    """Let the threads of a concurrency group of Ray's answer a method."""

    def mark(method: F) -> F:
        marked: F = ray.method(concurrency_group=name)(method)
        return marked

    return mark
