"""The demo's results in the terminal: a table, bars, and what was verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import RankStats

from .results import Check, Figures, Report

GAIN_WIDTH = 48
BLOCKS_WIDTH = 20
_STATES = (("used", "red"), ("pending", "magenta"), ("evictable", "yellow"), ("free", "green"))
_GLYPHS = {"used": "█", "pending": "▓", "evictable": "▒", "free": "░"}


def print_report(report: Report, console: Console) -> None:
    """Print everything but the JSON line."""
    console.print()
    console.print(figures_table(report.figures))
    console.print(gain_bars(report.figures))
    console.print(block_bars(report.peak, report.drained))
    console.print(miss_list(report.misses))
    console.print(check_list(report.checks))


def figures_table(figures: Figures) -> RenderableType:
    """The figures with and without the prefix cache, and what they mean."""
    f = figures
    model = escape(Path(f.model).name)
    table = Table(
        title=f"raykv demo: {model}, {f.dp_size} ranks of {f.num_blocks - 1} blocks "
        f"of {f.block_size} tokens",
        title_justify="left",
    )
    table.add_column(f"{f.conversations} conversations")
    table.add_column("prefix cache", justify="right")
    table.add_column("without", justify="right")
    table.add_column("gain", justify="right")
    computed = f.prompt_tokens - f.hit_tokens
    first_token_gain = _ratio(f.ttft_cold_ms, f.ttft_warm_ms)
    speed_gain = _ratio(f.tokens_per_s, f.tokens_per_s_no_cache)
    states: tuple[tuple[str, str, str, str], ...] = ()
    if f.state_checkpoints or f.state_skipped:
        states = (
            ("requests resumed from a state", f"{f.state_hits:,}", "0", ""),
            ("  checkpoints taken", f"{f.state_checkpoints:,}", "0",
             f"{f.state_skipped:,} found no slot"),
            ("  kept in the end, MB", f"{f.state_bytes / 1e6:,.1f}", "0", ""),
        )  # fmt: skip
    host: tuple[tuple[str, str, str, str], ...] = ()
    if f.host_blocks:
        host = (
            ("    from the device", f"{f.device_hit_tokens:,}", "0", ""),
            ("    from the host", f"{f.host_hit_tokens:,}", "0", ""),
        )
    for row in (
        ("requests", f"{f.requests:,}", f"{f.requests:,}", ""),
        ("prompt tokens", f"{f.prompt_tokens:,}", f"{f.prompt_tokens:,}", ""),
        ("  computed", f"{computed:,}", f"{f.prompt_tokens:,}", ""),
        ("  not computed again", f"{f.hit_tokens:,}", "0", f"{f.hit_rate:.1%} hit rate"),
        *host,
        ("cached blocks evicted", f"{f.evicted_blocks:,}", "", ""),
        *_host_rows(f),
        *states,
        ("time to first token, ms", f"{f.ttft_warm_ms:,.0f}", f"{f.ttft_cold_ms:,.0f}",
         first_token_gain),
        ("generated tokens/s", f"{f.tokens_per_s:.1f}", f"{f.tokens_per_s_no_cache:.1f}",
         speed_gain),
    ):  # fmt: skip
        table.add_row(*row)
    notes = Text(
        f"time to first token: the same {f.ttft_prompts} prompts with a warm and an empty cache, "
        "one at a time, queueing excluded, median\n"
        f"generated tokens/s: the {f.generated_tokens:,} tokens of all answers per wall second of "
        "the run, prefills included",
        style="dim",
    )
    return Group(table, notes)


def _host_rows(figures: Figures) -> tuple[tuple[str, str, str, str], ...]:
    """What went to and from the host."""
    f = figures
    if not f.host_blocks:
        return ()
    kept = f"{f.host_blocks_cached:,} of {f.host_blocks:,}"
    faults = "" if not f.tier_faults else f"{f.tier_faults:,} faults"
    return (
        ("blocks to the host", f"{f.offloaded_blocks:,}", "", f"{f.offloaded_bytes / 1e6:,.0f} MB"),
        ("blocks back from it", f"{f.loaded_blocks:,}", "", f"{f.loaded_bytes / 1e6:,.0f} MB"),
        ("  kept there in the end", kept, "", faults),
    )


def gain_bars(figures: Figures) -> RenderableType:
    """The two gains as bars, each scaled to the larger of its pair."""
    f = figures
    groups = (
        ("time to first token, ms (shorter is better)", f.ttft_cold_ms, f.ttft_warm_ms, ".0f"),
        ("generated tokens/s (longer is better)", f.tokens_per_s_no_cache, f.tokens_per_s, ".1f"),
    )
    lines: list[Text] = []
    for title, without, with_cache, form in groups:
        longest = max(without, with_cache, 1e-9)
        lines.append(Text(f"\n{title}", style="bold"))
        for name, value, style in (
            ("without cache", without, "yellow"),
            ("prefix cache", with_cache, "green"),
        ):
            line = Text(f"  {name:<14}")
            line.append(bar(value / longest), style=style)
            line.append(f" {value:{form}}")
            lines.append(line)
    return Group(*lines)


def block_bars(peak: Sequence[RankStats], drained: Sequence[RankStats]) -> RenderableType:
    """Blocks by state, a stacked bar per rank: when it used most, and after the last answer."""
    table = Table(box=None, padding=(0, 1))
    table.add_column("")
    table.add_column("")
    for name, style in _STATES:
        table.add_column(Text(f"{_GLYPHS[name]} {name}", style=style), justify="right")
    for title, stats in (("fullest", peak), ("drained", drained)):
        for index, rank in enumerate(stats):
            counts = (str(count) for _, count in states(rank))
            table.add_row(f"rank {index} {title}", stacked_bar(rank), *counts)
    return Group(Text("\nblocks by state per rank", style="bold"), table)


def miss_list(misses: Iterable[MissReport]) -> RenderableType:
    """Why hits ended where they did: a line per reason, with one example."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    by_reason: dict[str, list[MissReport]] = {}
    for miss in misses:
        by_reason.setdefault(miss.reason, []).append(miss)
    for reason, found in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        longest = max(found, key=lambda miss: miss.num_hit_tokens)
        table.add_row(str(len(found)), reason.replace("_", " "), Text(f"e.g. {longest}"))
    return Group(Text("\nwhy hits ended where they did, requests", style="bold"), table)


def check_list(checks: Iterable[Check]) -> RenderableType:
    """What was verified, a line each."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("FAIL", style="bold red")
        table.add_row(mark, Text(f"{check.name}: {check.detail}"))
    return Group(Text("\nverified", style="bold"), table)


def bar(fraction: float, width: int = GAIN_WIDTH) -> str:
    """A bar of ``fraction`` of the width, in eighths of a character."""
    full, eighths = divmod(round(max(0.0, min(fraction, 1.0)) * width * 8), 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")


def states(rank: RankStats) -> list[tuple[str, int]]:
    """A rank's blocks by state, in the order of the bars; they add up to all its blocks."""
    counts = {
        "used": rank.num_used_blocks,
        "pending": rank.num_pending_blocks,
        "evictable": rank.num_evictable_blocks,
        "free": rank.num_free_blocks,
    }
    return [(name, counts[name]) for name, _ in _STATES]


def stacked_bar(rank: RankStats, width: int = BLOCKS_WIDTH) -> Text:
    """One bar of exactly ``width`` characters; a state with any blocks shows at least one."""
    counts = dict(states(rank))
    total = max(rank.num_total_blocks, 1)
    cells = {name: max(round(n * width / total), 1 if n else 0) for name, n in counts.items()}
    largest = max(cells, key=lambda name: cells[name])
    cells[largest] += width - sum(cells.values())
    text = Text()
    for name, style in _STATES:
        text.append(_GLYPHS[name] * cells[name], style=style)
    return text


def _ratio(larger: float, smaller: float) -> str:
    return f"{larger / smaller:.1f} x" if smaller > 0 else "-"
