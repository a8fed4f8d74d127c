"""A picture of the host tier: how fast blocks are copied, how soon first tokens come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .linear_plot import new_figure, save
from .slab_copies import TARGET_SHARE, Figure
from .tier_ttft import ReturningTurns

_COLOURS = {"offload": "#1b7f5c", "load": "#5a6fb5"}


def draw(copies: list[Figure], turns: list[ReturningTurns], path: Path) -> None:
    """Draw to a file, whose ending says the format: svg, png, pdf.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(8.4, 3.6)
    left, right = figure.subplots(1, 2)
    _draw_copies(left, copies)
    _draw_turns(right, turns)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(b=False)
    save(figure, path)


def _draw_copies(axes: Any, copies: list[Figure]) -> None:
    lines: dict[tuple[str, bool], list[Figure]] = {}
    for one in copies:
        lines.setdefault((one.direction, one.with_checksums), []).append(one)
    for (direction, checked), found in lines.items():
        axes.plot(
            [one.batch_mib for one in found],
            [100 * one.share for one in found],
            ":" if checked else "-",
            marker="o",
            ms=3,
            color=_COLOURS[direction],
            label=f"{direction}{', checksums' if checked else ''}",
        )
    axes.axhline(100 * TARGET_SHARE, color="black", lw=1, ls="--", label="target")
    axes.set_xscale("log", base=2)
    ticks = sorted({one.batch_mib for one in copies})
    axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
    axes.set_ylim(0, None)
    axes.set_xlabel("MiB in a batch")
    axes.set_ylabel("% of a plain copy's speed")
    axes.set_title("copies")
    axes.legend(frameon=False)


def _draw_turns(axes: Any, turns: list[ReturningTurns]) -> None:
    names = [one.variant for one in turns]
    bars = axes.barh(names, [one.first_token_ms for one in turns], color="#5a6fb5", height=0.5)
    axes.bar_label(bars, [f"{one.first_token_ms:,.0f} ms" for one in turns], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("ms to the first token, median")
    axes.set_title("conversations that come back")
