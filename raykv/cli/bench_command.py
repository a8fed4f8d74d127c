"""``raykv bench``: the benchmarks that ship with raykv."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from raykv.bench.timing import Row


def run_managers(*, num_runs: int, with_ray: bool, as_json: bool) -> None:
    """Measure and print; each row as it comes, then one JSON object with all of them."""
    from raykv.bench import managers, pools, timing  # noqa: PLC0415 - costs time to import

    parts: list[Iterable[Row]] = [managers.rows(num_runs), pools.local_rows(num_runs)]
    if with_ray:
        parts.append(pools.ray_rows(num_runs))
    rows = list(_shown(chain.from_iterable(parts), as_json=as_json))
    if not as_json:
        Console().print(_table(rows))
    print(json.dumps({"machine": timing.machine(), "rows": [row.as_json() for row in rows]}))


def _shown(rows: Iterable[Row], *, as_json: bool) -> Iterator[Row]:
    progress = Console(stderr=True)
    for row in rows:
        if as_json:
            print(json.dumps(row.as_json()), flush=True)
        else:
            progress.print(f"{row.level}: {row.workload}: {row.median_us:,.1f} us")
        yield row


def _table(rows: list[Row]) -> Table:
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
