"""A picture of token hit rates over the number of state slots, a panel for each workload."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from raykv.errors import ConfigError

from .linear_hits import Hits

_COLOURS = {512: "#1b7f5c", 256: "#5a6fb5", 16: "#d98c21"}
_OTHER_COLOUR = "#a33b5b"
_STYLES = {"deepest": "-", "contiguous": ":"}


def require() -> None:
    """Raise ConfigError unless matplotlib is installed: better before minutes of work than after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'raykv[bench]'")


def draw(hits: list[Hits], path: Path) -> None:
    """Draw to a file, whose ending says the format: svg, png, pdf.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    require()
    import matplotlib as mpl  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "raykv", "font.size": 8})  # the same file every time
    workloads = list(dict.fromkeys(one.workload for one in hits))
    figure = Figure(figsize=(1 + 3.8 * len(workloads), 4.2), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        _draw_panel(axes, workload, [one for one in hits if one.workload == workload])
    handles = _legend(panels)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    try:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {path} cannot be written: {error}") from None


def _draw_panel(axes: Any, workload: str, hits: list[Hits]) -> None:
    lines: dict[tuple[str, int, tuple[str, ...]], list[Hits]] = {}
    for one in hits:
        setting = one.setting
        if setting.is_kv_scarce:
            continue
        if setting.match is None:
            axes.axhline(100 * one.hit_rate, color="black", lw=1, ls="--", label="K and V alone")
        elif setting.without in {(), ("at_stride",)}:
            key = (setting.match, setting.stride_tokens, setting.without)
            lines.setdefault(key, []).append(one)
    for (match, stride, without), found in lines.items():
        name = f"{match}, every {stride}" if not without else f"{match}, none at strides"
        colour = _COLOURS.get(stride, _OTHER_COLOUR) if not without else _OTHER_COLOUR
        slots = [one.setting.num_slots for one in found]
        rates = [100 * one.hit_rate for one in found]
        axes.plot(slots, rates, _STYLES[match], marker="o", ms=3, color=colour, label=name)
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
