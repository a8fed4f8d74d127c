"""What several sides measured, beside each other: on the terminal, as Markdown, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

OURS = "raykv"
NAMES = {OURS: "raykv", "vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True)
class Line:
    """One workload.

    Attributes:
        workload: in words.
        rows: by side, a row as raykv.bench.timing has it; a peer's may add ``part_us``.
    """

    workload: str
    rows: dict[str, dict[str, Any]]

    def speed_up(self) -> float | None:
        """How many times longer the fastest peer takes than we; None without peers or us."""
        peers = [row["median_us"] for side, row in self.rows.items() if side != OURS]
        ours = self.rows.get(OURS)
        return min(peers) / ours["median_us"] if peers and ours else None


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one workload's rows in several rounds, the one with the middle median (the lower of two).

    Whatever else a machine does spoils whole rounds: a mean over rounds would carry that on.
    """
    return sorted(rows, key=lambda row: row["median_us"])[(len(rows) - 1) // 2]


def figure(microseconds: float) -> str:
    """Two or more digits, never a false third one."""
    return f"{microseconds:.1f}" if microseconds < 20 else f"{microseconds:,.0f}"


def times(factor: float | None) -> str:
    """A speed-up."""
    if factor is None:
        return "-"
    return f"{factor:.1f}x" if factor < 10 else f"{factor:,.0f}x"


def cells(line: Line, sides: list[str]) -> list[str]:
    """One workload's figures, then the speed-up."""
    rows = [line.rows.get(side) for side in sides]
    return [figure(row["median_us"]) if row else "-" for row in rows] + [times(line.speed_up())]


def heads(sides: list[str], hello: dict[str, dict[str, Any]]) -> list[str]:
    """What stands over the figures."""
    named = [f"{NAMES[side]} {hello[side]['version']}" for side in sides]
    return [*named, "speed-up"]


def table(lines: list[Line], hello: dict[str, dict[str, Any]]) -> Table:
    """For a terminal."""
    sides = [*hello]
    result = Table(title="KV block managers, median microseconds")
    result.add_column("workload", no_wrap=True)
    for head in heads(sides, hello):
        result.add_column(head.replace(" ", "\n"), justify="right", no_wrap=True)
    for line in lines:
        result.add_row(line.workload, *cells(line, sides))
    return result


def parts(lines: list[Line], hello: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each peer that tells a part of its admissions apart."""
    found = []
    for side, said in hello.items():
        told = [
            f"{line.workload} {figure(line.rows[side]['part_us'])}"
            for line in lines
            if "part_us" in line.rows.get(side, {})
        ]
        if told:
            found.append(f"{NAMES[side]}, {said['split_of']} (us): {'; '.join(told)}.")
    return found


def includes(hello: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each side: what was timed."""
    return [
        f"{NAMES[side]}: "
        + ". ".join(f"{topic}: {words}" for topic, words in said["includes"].items())
        + "."
        for side, said in hello.items()
    ]


def conditions(result: dict[str, Any]) -> str:
    """The machine, how busy it was, and how often each figure was taken."""
    machine = result["hello"][OURS]["machine"]
    before, after = result["load_before"], result["load_after"]
    return (
        f"{machine['cpu']}, Python {machine['python']}, NumPy {machine['numpy']}; median of "
        f"{result['num_runs']} runs, the middle one of {result['num_rounds']} rounds in which the "
        f"sides took turns; load average {before:.1f} before and {after:.1f} after, of which this "
        "benchmark is one. Speed-up: the faster peer's time over raykv's."
    )


def markdown(lines: list[Line], result: dict[str, Any]) -> str:
    """For README.md."""
    hello = result["hello"]
    sides = [*hello]
    rows = [["median us", *heads(sides, hello)], ["---"] + ["---:"] * (len(sides) + 1)]
    rows += [[line.workload, *cells(line, sides)] for line in lines]
    text = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"- {note}" for note in (*includes(hello), *parts(lines, hello))]
    return "\n".join([*text, "", conditions(result), "", *notes])
