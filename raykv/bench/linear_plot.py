"""A picture of token hit rates over the number of state slots, a panel for each workload."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from raykv.errors import ConfigError

from .linear_hits import Hits

_COLOURS = {512: "#1b7f5c", 256: "#5a6fb5", 16: "#d98c21", 0: "#a33b5b"}  # by stride, 0 for none
_DRAWN = ((), ("at_stride",))  # rules that are off
_STYLES = {"deepest": "-", "contiguous": ":"}


def require() -> None:
    """Raise ConfigError unless matplotlib is installed; better before the work than after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'raykv[bench]'")


def draw(hits: list[Hits], path: Path) -> None:
    """Draw to a file, whose ending says the format: svg, png, pdf.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    workloads = list(dict.fromkeys(one.workload for one in hits))
    figure = new_figure(1.2 + 3.6 * len(workloads), 4.2)
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        _draw_panel(axes, workload, [one for one in hits if one.workload == workload])
    handles = _legend(panels)
    num_columns = 1 + len(workloads)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=num_columns,
        frameon=False,
    )  # fmt: skip
    save(figure, path)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require()
    import matplotlib as mpl  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "raykv", "font.size": 8})  # the same file every time
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file, whose ending says the format.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {path} cannot be written: {error}") from None


def _draw_panel(axes: Any, workload: str, hits: list[Hits]) -> None:
    lines: dict[str, list[Hits]] = {}
    for one in hits:
        if one.setting.match is None and not one.setting.is_kv_scarce:
            label = one.setting.name
            axes.axhline(100 * one.hit_rate, color="black", lw=1, ls="--", label=label)
        elif not one.setting.is_kv_scarce and one.setting.without in _DRAWN:
            lines.setdefault(one.setting.name, []).append(one)
    for index, (name, found) in enumerate(lines.items()):
        setting = found[0].setting
        colour = _COLOURS.get(0 if setting.without else setting.stride_tokens)
        slots = [one.setting.num_slots for one in found]
        rates = [100 * one.hit_rate for one in found]
        style = _STYLES[setting.match or "deepest"]
        width = max(1.0, 3 - 0.5 * index)  # equal lines lie on one another, and all are to be seen
        axes.plot(slots, rates, style, marker="o", ms=3, lw=width, color=colour, label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({one.setting.num_slots for one in hits if one.setting.match is not None})
    axes.set_xticks(ticks, [f"{each:,}" for each in ticks])
    axes.set_ylim(0, None)
    axes.set_xlabel("state slots")
    axes.set_ylabel("% of prompt tokens not computed again")
    axes.set_title(workload)
    axes.spines[["top", "right"]].set_visible(b=False)


def _legend(panels: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    return found
