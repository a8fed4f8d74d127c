"""``raykv bench``: the benchmarks that ship with raykv."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from raykv.errors import ConfigError

if TYPE_CHECKING:
    from raykv.bench.timing import Row


class Record(Protocol):
    """One line of a benchmark's result."""

    def as_json(self) -> dict[str, Any]:
        """Its values by name."""


P = TypeVar("P", bound=StrEnum)
R = TypeVar("R", bound=Record)


def run_managers(*, num_runs: int, with_ray: bool, as_json: bool) -> None:
    """Operations of the manager, plain and thread-safe, of a local pool, and of one over Ray."""
    from raykv.bench import managers, pools, threads  # noqa: PLC0415 - costs time to import

    parts: list[Iterable[Row]] = [
        managers.rows(num_runs), threads.rows(num_runs), pools.local_rows(num_runs)
    ]  # fmt: skip
    if with_ray:
        parts.append(pools.ray_rows(num_runs))
    _run_rows(chain.from_iterable(parts), as_json=as_json)


def run_ray(*, num_runs: int, as_json: bool) -> None:
    """What the pool adds to an actor call, and how soon a lost rank is noticed."""
    from raykv.bench import ray_calls  # noqa: PLC0415

    _run_rows(ray_calls.rows(num_runs), as_json=as_json)


def run_growth(*, num_runs: int, as_json: bool) -> None:
    """How costs grow with prompts, pools, turns, branches and what lies in the way."""
    from raykv.bench import growth  # noqa: PLC0415

    _run_rows(growth.rows(num_runs), as_json=as_json)


def run_memory(*, as_json: bool) -> None:
    """Bytes that the books take."""
    from raykv.bench import memory  # noqa: PLC0415

    _run_records(memory.figures(), as_json=as_json)


def run_eviction(trace: Path, *, as_json: bool) -> None:
    """Hit rates of the eviction policies on a trace.

    Raises:
        ConfigError: the trace cannot be read.
    """
    from raykv.bench import eviction  # noqa: PLC0415

    _run_records(eviction.replays(eviction.load(trace)), as_json=as_json)


def parts_of(kind: type[P], names: Iterable[str] | None) -> tuple[P, ...]:
    """The parts of a benchmark that ``--only`` names; all without any.

    Raises:
        ConfigError: a name is unknown.
    """
    known = {part.value: part for part in kind}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--only {name}: known parts are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else tuple(kind)


def _run_rows(rows: Iterable[Row], *, as_json: bool) -> None:
    from raykv.bench.timing import machine  # noqa: PLC0415

    measured = list(shown(rows, as_json=as_json))
    if not as_json:
        Console().print(table_of(measured))
    print(json.dumps({"machine": machine(), "rows": [row.as_json() for row in measured]}))


def _run_records(records: Iterable[Record], *, as_json: bool) -> None:
    """Records of one kind, a line each as they come, then one JSON object with all of them."""
    from raykv.bench.timing import machine  # noqa: PLC0415

    found: list[dict[str, Any]] = []
    table = Table()
    for record in records:
        values = record.as_json()
        if as_json:
            print(json.dumps(values), flush=True)
        elif not found:
            for name in values:
                table.add_column(name.replace("_", " "))
        table.add_row(*("" if value is None else str(value) for value in values.values()))
        found.append(values)
    if not as_json:
        Console().print(table)
    print(json.dumps({"machine": machine(), "rows": found}))


def shown(rows: Iterable[Row], *, as_json: bool) -> Iterator[Row]:
    """The rows as they are measured, each told on stderr, or as a line of JSON."""
    progress = Console(stderr=True)
    for row in rows:
        if as_json:
            print(json.dumps(row.as_json()), flush=True)
        else:
            progress.print(f"{row.level}: {row.workload}: {row.median_us:,.1f} us")
        yield row


def table_of(rows: list[Row]) -> Table:
    """The rows as a table, a section for each level."""
    table = Table(title="microseconds; per sequence where a call takes several")
    table.add_column("workload")
    for name in ("median", "min", "p99", "target"):
        table.add_column(name, justify="right")
    level = ""
    for row in rows:
        if row.level != level:
            level = row.level
            table.add_section()
            table.add_row(f"[bold]{level}")
        target = "" if row.target_us is None else f"{row.target_us:g}"
        table.add_row(
            row.workload,
            f"{row.median_us:,.1f}",
            f"{row.min_us:,.1f}",
            f"{row.p99_us:,.1f}",
            target,
        )
    return table


def told(records: Iterable[R], *, as_json: bool) -> Iterator[R]:
    """The records as they come, each told on stderr, or as a line of JSON."""
    progress = Console(stderr=True, highlight=False)
    for record in records:
        values = record.as_json()
        if as_json:
            print(json.dumps(values), flush=True)
        else:
            words = (f"{name.replace('_', ' ')} {value}" for name, value in values.items() if value)
            progress.print(", ".join(words), soft_wrap=True)
        yield record
