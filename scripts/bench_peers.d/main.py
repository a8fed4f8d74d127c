"""Run raykv's block manager, vLLM's and SGLang's side by side on the same workloads.

Each side is a process of its own; they take turns, workload by workload, so that whatever the
machine does meets them all. The peers are the published wheels, in an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import environment
import report
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("raykv", "vllm", "sglang")


class Worker:
    """One side's process; see worker.py.

    Args:
        side: which one.
        python: the interpreter of its environment.
    """

    def __init__(self, side: str, python: Path) -> None:
        self._side = side
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as we do
        self._process = subprocess.Popen(  # noqa: S603 - our own command line
            [python, Path(__file__).with_name("worker.py"), side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment.variables(ROOT),
        )
        self.hello = self._read()

    def run(self, **order: Any) -> dict[str, Any]:
        """One workload's row."""
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = "".join(self._errors.readlines()[-25:])
            raise RuntimeError(f"the process of {self._side} ended:\n{last}")
        return json.loads(line)


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All workloads on all sides, in turn."""
    load_before = os.getloadavg()[0]
    python_of_peers = environment.python_of(args.env)
    workers: dict[str, Worker] = {}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    try:
        with console.status("starting") as status:
            for side in args.sides:
                status.update(f"starting {side}")
                python = Path(sys.executable) if side == report.OURS else python_of_peers
                workers[side] = Worker(side, python)
            names = args.only or workers[report.OURS].hello["workloads"]
            for number in range(args.rounds):
                for name in names:
                    rows = found.setdefault(name, {side: [] for side in args.sides})
                    for side, worker in workers.items():
                        status.update(f"round {number + 1} of {args.rounds}: {name}, {side}")
                        known = rows[report.OURS]  # runs first, and names the workload
                        row = worker.run(
                            workload=name,
                            label=known[0]["workload"] if known else name,
                            num_runs=args.runs,
                        )
                        rows[side].append(row)
    finally:
        for worker in workers.values():
            worker.close()
    return {
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "num_runs": args.runs,
        "num_rounds": args.rounds,
        "hello": {side: worker.hello for side, worker in workers.items()},
        "lines": [
            {
                "workload": rows[report.OURS][0]["workload"],
                "rows": {side: report.middle(taken) for side, taken in rows.items()},
            }
            for rows in found.values()
        ],
    }


def draw(result: dict[str, Any], path: Path, python: Path) -> None:
    """Write the plot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(  # noqa: S603 - our own command line
        [python, Path(__file__).with_name("plot.py"), path],
        input=json.dumps(result),
        text=True,
        check=True,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_peers", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--setup-only", action="store_true", help="make the environment, no more")
    parser.add_argument("--runs", type=int, default=50, metavar="N", help="per figure (50)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="the middle counts (3)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--markdown", action="store_true", help="print the table for README.md")
    parser.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=ROOT / "docs" / "managers.png",
        metavar="FILE",
        help="draw it as well (docs/managers.png)",
    )
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="function names")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], metavar="SIDE")
    parser.add_argument(
        "--env",
        type=Path,
        default=ROOT / ".peers-venv",
        metavar="FOLDER",
        help="the peers' environment (.peers-venv)",
    )
    args = parser.parse_args(arguments)
    if args.runs < 1 or args.rounds < 1:
        parser.error("--runs and --rounds must be at least 1")
    args.env = args.env.absolute()
    # We run first, and always: a workload is named by our row.
    args.sides = [side for side in SIDES if side == report.OURS or side in args.sides]
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run all of it."""
    args = parse(arguments)
    console = Console(stderr=True)
    if args.setup_only or args.plot or len(args.sides) > 1:
        try:
            environment.ensure(args.env)
        except environment.SetupError as error:
            console.print(f"bench_peers: {error}", markup=False)
            return 1
    if args.setup_only:
        return 0
    result = measure(args, console)
    lines = [report.Line(**line) for line in result["lines"]]
    if args.markdown:
        print(report.markdown(lines, result))
    elif not args.json:
        out = Console()
        out = out if out.is_terminal else Console(width=100)
        out.print(report.table(lines, result["hello"]))
        print(report.conditions(result))
        for note in (*report.includes(result["hello"]), *report.parts(lines, result["hello"])):
            print(f"- {note}")
    if args.plot:
        draw(result, args.plot, environment.python_of(args.env))
    if args.json or not args.markdown:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
