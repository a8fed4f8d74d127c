"""Timing one operation many times, without the work around it."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Row:
    """The timings of one workload.

    Attributes:
        workload: what was done.
        level: whose public API was called.
        median_us: median, microseconds.
        min_us: fastest run, microseconds.
        p99_us: 99th percentile, microseconds.
        num_runs: runs measured.
        target_us: what the median should stay under; None where there is no target.
    """

    workload: str
    level: str
    median_us: float
    min_us: float
    p99_us: float
    num_runs: int
    target_us: float | None = None

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def measure(
    workload: str,
    level: str,
    operation: Callable[[T], R],
    *,
    prepare: Callable[[], T],
    after: Callable[[R], object] = lambda _: None,
    num_runs: int = 100,
    num_calls: int = 1,
    target_us: float | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Row:
    """Time ``operation(prepare())``; neither ``prepare`` nor ``after`` counts.

    Garbage collection is off while the clock runs, as ``timeit`` has it. Five runs go first to warm
    up.

    Args:
        workload: the row's name.
        level: whose API it is.
        operation: what to time.
        prepare: makes its argument.
        after: undoes it, from its result.
        num_runs: runs to measure.
        num_calls: what one run's time is divided by, where it does the same thing several times.
        target_us: for the row.
        clock: nanoseconds.
    """
    times = []
    was_enabled = gc.isenabled()
    for _ in range(num_runs + 5):
        argument = prepare()
        gc.disable()
        start = clock()
        result = operation(argument)
        times.append((clock() - start) / 1000 / num_calls)
        if was_enabled:
            gc.enable()
        after(result)
    return row_of(workload, level, np.array(times[5:]), target_us)


def row_of(
    workload: str, level: str, measured: NDArray[np.float64], target_us: float | None = None
) -> Row:
    """The row of runs that were timed, in microseconds."""
    return Row(
        workload,
        level,
        median_us=round(float(np.median(measured)), 2),
        min_us=round(float(measured.min()), 2),
        p99_us=round(float(np.percentile(measured, 99)), 2),
        num_runs=len(measured),
        target_us=target_us,
    )


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0].partition(':')[2].strip()}" if names else cpu
    return {"cpu": cpu, "python": platform.python_version(), "numpy": np.__version__}
