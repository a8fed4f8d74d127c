"""Draw the JSON object of main.py, read from standard input, as bars; runs where matplotlib is."""

from __future__ import annotations

import json
import sys

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

_COLOURS = {"raykv": "#1b7f5c", "vllm": "#d98c21", "sglang": "#5a6fb5"}
_NAMES = {"raykv": "raykv", "vllm": "vLLM", "sglang": "SGLang"}


def main() -> None:
    """Draw to the file named by the only argument."""
    mpl.use("Agg")
    result = json.load(sys.stdin)
    lines, sides = result["lines"], [*result["hello"]]
    figure, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    middles, height = np.arange(len(lines))[::-1], 0.8 / len(sides)
    for number, side in enumerate(sides):
        medians = [line["rows"][side]["median_us"] for line in lines]
        bars = axes.barh(
            middles + 0.4 - height * (number + 0.5),
            medians,
            height,
            color=_COLOURS[side],
            label=f"{_NAMES[side]} {result['hello'][side]['version']}",
        )
        labels = [f"{each:.1f}" if each < 20 else f"{each:,.0f}" for each in medians]
        axes.bar_label(bars, labels, padding=2, fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(1, 3 * axes.get_xlim()[1])
    axes.set_yticks(middles, [line["workload"] for line in lines], fontsize=8)
    axes.set_xlabel("median microseconds, logarithmic; shorter is better", fontsize=8)
    axes.spines[["top", "right"]].set_visible(b=False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(sys.argv[1], dpi=90, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
