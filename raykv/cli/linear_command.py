"""``raykv bench linear``: what checkpoints of recurrent state cost, and what they are worth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from raykv.errors import ConfigError

from .bench_command import shown, table_of, told

if TYPE_CHECKING:
    from raykv.bench.linear_hits import Hits
    from raykv.bench.visits import Visit


class Part(StrEnum):
    """What is measured."""

    OPS = "ops"
    HITS = "hits"
    TTFT = "ttft"


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """What was asked for.

    Attributes:
        parts: what to measure.
        trace: prompts in Mooncake's format, or None.
        chats: recorded chats, or None. Without either, conversations are made up.
        num_visits: requests of the trace.
        num_chats: conversations of the chats.
        plot: where to draw the hit rates, or None.
        is_quick: whether to do less, to see that all works.
    """

    parts: tuple[Part, ...] = tuple(Part)
    trace: Path | None = None
    chats: Path | None = None
    num_visits: int = 2_000
    num_chats: int = 300
    plot: Path | None = None
    is_quick: bool = False


def run_linear(options: LinearOptions, *, as_json: bool) -> None:
    """Measure, show, and print one JSON object with all that was measured.

    Raises:
        ConfigError: a file cannot be read or written, or something is not installed.
    """
    from raykv.bench.timing import machine  # noqa: PLC0415 - costs time to import

    if options.plot is not None:
        from raykv.bench import linear_plot  # noqa: PLC0415

        if Part.HITS not in options.parts:
            raise ConfigError("--plot draws hit rates: leave out --only, or add --only hits")
        linear_plot.require()
    workloads = _workloads(options) if Part.HITS in options.parts else {}
    result: dict[str, Any] = {"machine": machine()}
    if Part.OPS in options.parts:
        result["ops"] = _ops(options, as_json=as_json)
    if Part.HITS in options.parts:
        hits = _hits(options, workloads, as_json=as_json)
        result["hits"] = [one.as_json() for one in hits]
        if options.plot is not None:
            linear_plot.draw(hits, options.plot)
    if Part.TTFT in options.parts:
        result["ttft"] = _first_tokens(options, as_json=as_json)
    print(json.dumps(result))


def _ops(options: LinearOptions, *, as_json: bool) -> list[dict[str, Any]]:
    from raykv.bench import linear_ops, linear_steps  # noqa: PLC0415

    num_checkpoints, num_runs = (500, 30) if options.is_quick else (10_000, 2_000)
    measured = list(shown(linear_ops.measure(num_checkpoints, num_runs), as_json=as_json))
    num_runs = min(num_runs, 400)
    measured += shown(linear_steps.rows(num_runs, num_checkpoints), as_json=as_json)
    if not as_json:
        Console().print(table_of(measured))
    return [row.as_json() for row in measured]


def _workloads(options: LinearOptions) -> dict[str, list[Visit]]:
    from raykv.bench import visits  # noqa: PLC0415

    found: dict[str, list[Visit]] = {}
    if options.trace is not None:
        found["trace"] = visits.load_trace(options.trace, options.num_visits)
    if options.chats is not None:
        found["chats"] = visits.load_chats(options.chats, options.num_chats)
    if not found:
        found["made up"] = visits.make_up(24 if options.is_quick else 400)
    return found


def _hits(
    options: LinearOptions, workloads: dict[str, list[Visit]], *, as_json: bool
) -> list[Hits]:
    from raykv.bench import linear_hits  # noqa: PLC0415

    compared = linear_hits.settings()
    if options.is_quick:
        compared = linear_hits.settings(num_slots=(64, 256), strides=(512, 256))
    found: list[Hits] = []
    for name, visits in workloads.items():
        served = linear_hits.measure(name, visits, compared)
        of_workload = list(told(served, as_json=as_json))
        if not as_json:
            Console().print(_hit_table(name, of_workload))
        found += of_workload
    return found


def _hit_table(workload: str, hits: list[Hits]) -> Table:
    table = Table(title=f"{workload}: prompt tokens that were not computed again")
    table.add_column("setting")
    for name in ("slots", "hit %", "taken", "skipped", "reclaimed"):
        table.add_column(name, justify="right")
    before = ""
    for one in hits:
        if before and one.setting.name != before:
            table.add_section()
        before = one.setting.name
        counts = (one.setting.num_slots, one.num_checkpoints, one.num_skipped, one.num_reclaimed)
        slots, *rest = ("" if one.setting.match is None else f"{count:,}" for count in counts)
        table.add_row(before, slots, f"{100 * one.hit_rate:.1f}", *rest)
    if hits:
        table.caption = f"{hits[0].num_tokens:,} tokens of {hits[0].num_visits:,} requests"
    return table


def _first_tokens(options: LinearOptions, *, as_json: bool) -> list[dict[str, Any]]:
    from raykv.bench import linear_ttft  # noqa: PLC0415

    from .settings import quiet_libraries  # noqa: PLC0415

    quiet_libraries()
    measured = linear_ttft.measure()
    if options.is_quick:
        measured = linear_ttft.measure(linear_ttft.MODELS[:1], (64, 128), num_runs=1)
    found = list(told(measured, as_json=as_json))
    if not as_json:
        table = Table(title="milliseconds to the first token, by checkpoints of recurrent state")
        table.add_column("model")
        for name in ("cached prefix", "new tokens", "without", "with", "speed-up"):
            table.add_column(name, justify="right")
        for one in found:
            times = (one.without_ms, one.with_ms, one.without_ms / one.with_ms)
            counts = (one.num_prefix_tokens, one.num_new_tokens)
            table.add_row(
                one.model,
                *(f"{count:,}" for count in counts),
                *(f"{value:,.0f}" for value in times[:2]),
                f"{times[2]:.1f} x",
            )
        Console().print(table)
    return [one.as_json() for one in found]
