"""``raykv bench tiers``: what host memory behind the devices costs, and what it is worth."""

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
    from raykv.bench.slab_copies import Figure
    from raykv.bench.tier_costs import Messages
    from raykv.bench.tier_ttft import ReturningTurns

_BLOCK_BYTES = 512 << 10  # 16 tokens of SmolLM2-135M take 720 KiB in float32


class Part(StrEnum):
    """What is measured."""

    COPIES = "copies"
    COSTS = "costs"
    TTFT = "ttft"


@dataclass(frozen=True, slots=True)
class TiersOptions:
    """What was asked for.

    Attributes:
        parts: what to measure.
        plot: where to draw copies and first tokens, or None.
        is_quick: whether to do less, to see that all works.
    """

    parts: tuple[Part, ...] = tuple(Part)
    plot: Path | None = None
    is_quick: bool = False


def run_tiers(options: TiersOptions, *, as_json: bool) -> bool:
    """Measure, show, and print one JSON object with all that was measured.

    Returns:
        Whether all variants gave the same answers.

    Raises:
        ConfigError: the model cannot be had, the picture cannot be drawn, or memory is short.
    """
    from raykv.bench.timing import machine  # noqa: PLC0415 - costs time to import

    if options.plot is not None:
        from raykv.bench import linear_plot  # noqa: PLC0415

        if not {Part.COPIES, Part.TTFT} <= {*options.parts}:
            raise ConfigError("--plot draws copies and ttft: leave out --only, or add both")
        linear_plot.require()
    result: dict[str, Any] = {"machine": machine()}
    copies: list[Figure] = []
    turns: list[ReturningTurns] = []
    if Part.COPIES in options.parts:
        copies = _copies(options, as_json=as_json)
        result["copies"] = [one.as_json() for one in copies]
    if Part.COSTS in options.parts:
        result |= _costs(options, as_json=as_json)
    if Part.TTFT in options.parts:
        turns = _first_tokens(options, as_json=as_json)
        result["ttft"] = [one.as_json() for one in turns]
    if options.plot is not None:
        from raykv.bench import tiers_plot  # noqa: PLC0415

        tiers_plot.draw(copies, turns, options.plot)
    print(json.dumps(result))
    return all(one.outputs_equal for one in turns)


def _copies(options: TiersOptions, *, as_json: bool) -> list[Figure]:
    from raykv.bench import slab_copies  # noqa: PLC0415

    sizes, num_rounds = slab_copies.BATCH_SIZES, 31
    if options.is_quick:
        sizes, num_rounds = sizes[:2], 5
    measured = slab_copies.measure(sizes, (_BLOCK_BYTES,), num_rounds)
    found = list(told(measured, as_json=as_json))
    if not as_json:
        Console().print(_copies_table(found))
    return found


def _copies_table(figures: list[Figure]) -> Table:
    table = Table(title="GB/s between device and host memory, in batches of blocks")
    for name in ("", "batch", "checksums", "GB/s", "plain copy", "share", "CPU share", "target"):
        table.add_column(name, justify="right")
    direction = ""
    for one in sorted(figures, key=lambda one: (one.direction, one.batch_mib)):
        if direction and one.direction != direction:
            table.add_section()
        direction = one.direction
        table.add_row(
            direction,
            f"{one.batch_mib:g} MiB",
            "yes" if one.with_checksums else "no",
            f"{one.gb_per_s:.1f}",
            f"{one.plain_gb_per_s:.1f}",
            f"{one.share:.0%}",
            f"{one.cpu_share:.0%}",
            "" if one.target_share is None else f"{one.target_share:.0%}",
        )
    return table


def _costs(options: TiersOptions, *, as_json: bool) -> dict[str, Any]:
    from raykv.bench import tier_costs  # noqa: PLC0415

    num_host_blocks, num_runs = (
        (2_049, 30) if options.is_quick else (tier_costs.NUM_HOST_BLOCKS, 100)
    )
    rows = list(shown(tier_costs.rows(num_host_blocks, num_runs), as_json=as_json))
    counted = (tier_costs.messages(num_sequences) for num_sequences in (1, 16))
    messages = list(told(counted, as_json=as_json))
    if not as_json:
        table = table_of(rows)
        table.title = "microseconds of the thread that owns the rank, copies not included"
        Console().print(table)
        Console().print(_messages_table(messages))
    return {
        "costs": [row.as_json() for row in rows],
        "messages": [one.as_json() for one in messages],
    }


def _messages_table(messages: list[Messages]) -> Table:
    table = Table(title="messages of one allocate whose prompts are on the host")
    for name in ("sequences", "loads planned", "driver to rank", "rank to tier", "target",
                 "until reported"):  # fmt: skip
        table.add_column(name, justify="right")
    for one in messages:
        counts = (one.num_sequences, one.num_planned, one.num_calls, one.num_exchanges)
        table.add_row(*map(str, (*counts, one.max_exchanges, one.num_exchanges_in_all)))
    return table


def _first_tokens(options: TiersOptions, *, as_json: bool) -> list[ReturningTurns]:
    from raykv.bench import tier_ttft  # noqa: PLC0415

    from .console import Steps  # noqa: PLC0415
    from .demo import fetch  # noqa: PLC0415
    from .settings import quiet_libraries  # noqa: PLC0415

    quiet_libraries()
    with Steps() as steps, steps.step(f"model {tier_ttft.MODEL}") as update:
        fetch(tier_ttft.MODEL, update)
    sizes = tier_ttft.QUICK if options.is_quick else tier_ttft.Sizes()
    found = list(told(tier_ttft.measure(sizes, tier_ttft.MODEL), as_json=as_json))
    if not as_json:
        Console().print(_turns_table(found))
    return found


def _turns_table(turns: list[ReturningTurns]) -> Table:
    first = turns[0]
    table = Table(
        title=f"milliseconds to the first token of {first.num_turns} returning turns: "
        f"{first.working_blocks} blocks of conversations, {first.device_blocks} on the device"
    )
    table.add_column("behind the device")
    for name in ("median", "slowest", "computed", "device", "host", "gain", "target"):
        table.add_column(name, justify="right")
    for one in turns:
        hits = one.device_hit_tokens + one.host_hit_tokens
        counts = (one.prompt_tokens - hits, one.device_hit_tokens, one.host_hit_tokens)
        table.add_row(
            one.variant,
            f"{one.first_token_ms:,.0f}",
            f"{one.slowest_ms:,.0f}",
            *(f"{count:,}" for count in counts),
            f"{one.speed_up:.1f} x",
            "" if one.target_speed_up is None else f"{one.target_speed_up:g} x",
        )
    same = all(one.outputs_equal for one in turns)
    answers = "all answers are equal" if same else "ANSWERS DIFFER"
    table.caption = f"prompt tokens computed, kept, loaded; {answers}"
    return table
