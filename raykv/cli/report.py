"""The demo's results in the terminal: a table, bars, and what was verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from raykv.core.kv_cache_manager import RankStats

from .results import Check, Figures, Report

BAR_WIDTH = 48
_STATES = (("used", "red"), ("pending", "magenta"), ("evictable", "yellow"), ("free", "green"))
_GLYPHS = {"used": "█", "pending": "▓", "evictable": "▒", "free": "░"}


def print_report(report: Report, console: Console) -> None:
    """Print everything but the JSON line."""
    console.print()
    console.print(figures_table(report.figures))
    console.print(gain_bars(report.figures))
    console.print(block_bars(report.peak, report.drained))
    console.print(check_list(report.checks))


def figures_table(figures: Figures) -> Table:
    """The figures with and without the prefix cache."""
    f = figures
    table = Table(
        title=f"raykv demo: {f.model}, {f.dp_size} ranks of {f.num_blocks - 1} blocks "
        f"of {f.block_size} tokens",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("prefix cache", justify="right")
    table.add_column("without", justify="right")
    table.add_column("")
    computed = f.prompt_tokens - f.hit_tokens
    rows = (
        ("requests", f"{f.requests:,}", f"{f.requests:,}", f"{f.conversations} conversations"),
        ("prompt tokens", f"{f.prompt_tokens:,}", f"{f.prompt_tokens:,}", "the same prompts"),
        ("  computed", f"{computed:,}", f"{f.prompt_tokens:,}", ""),
        ("  not computed again", f"{f.hit_tokens:,}", "0", f"hit rate {f.hit_rate:.1%}"),
        (
            "time to first token",
            f"{f.ttft_warm_ms:,.0f} ms",
            f"{f.ttft_cold_ms:,.0f} ms",
            f"{_ratio(f.ttft_cold_ms, f.ttft_warm_ms)}, warm and empty cache; median of "
            f"{f.ttft_prompts}, one at a time",
        ),
        (
            "generated tokens/s",
            f"{f.tokens_per_s:.1f}",
            f"{f.tokens_per_s_no_cache:.1f}",
            f"{_ratio(f.tokens_per_s, f.tokens_per_s_no_cache)}, per wall second of all "
            "conversations, prefills included",
        ),
    )
    for row in rows:
        table.add_row(*row)
    return table


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
    lines = [Text("\nblocks by state per rank", style="bold")]
    for title, stats in (("fullest", peak), ("drained", drained)):
        for index, rank in enumerate(stats):
            line = Text(f"  rank {index} {title}  ")
            line.append_text(stacked_bar(rank))
            line.append("  " + ", ".join(f"{count} {name}" for name, count in states(rank)))
            lines.append(line)
    legend = Text("  ")
    for name, style in _STATES:
        legend.append(f"{_GLYPHS[name]} {name}  ", style=style)
    return Group(*lines, legend)


def check_list(checks: Iterable[Check]) -> RenderableType:
    """What was verified, a line each."""
    lines = [Text("\nverified", style="bold")]
    for check in checks:
        line = Text("  ok    " if check.ok else "  FAIL  ", style="green" if check.ok else "bold red")
        line.append(f"{check.name}: {check.detail}", style="default")
        lines.append(line)
    return Group(*lines)


def bar(fraction: float, width: int = BAR_WIDTH) -> str:
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


def stacked_bar(rank: RankStats, width: int = BAR_WIDTH) -> Text:
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
