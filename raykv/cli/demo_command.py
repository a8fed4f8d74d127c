"""What the commands print: progress on stderr, results on stdout, the JSON line last."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from .console import Steps
from .settings import DemoOptions


def demo_command(options: DemoOptions, *, as_json: bool) -> bool:
    """Run the demo and print it; whether every check holds."""
    from .demo import run_demo  # noqa: PLC0415 - brings the pool
    from .report import check_list, print_report  # noqa: PLC0415

    with Steps() as steps:
        report = run_demo(options, steps)
        if as_json and not report.ok:
            steps.console.print(check_list(check for check in report.checks if not check.ok))
    if not as_json:
        print_report(report, Console(highlight=False))
    _print_json(report.figures.as_json())
    return report.ok


def profile_command(options: DemoOptions, *, as_json: bool) -> bool:
    """Profile decode steps and print where their time goes."""
    from .step_profile import print_profile, run_profile  # noqa: PLC0415

    with Steps() as steps:
        profile = run_profile(options, steps)
    if not as_json:
        print_profile(profile, Console(highlight=False))
    _print_json(profile.as_json())
    return True


def pull_command(name: str) -> None:
    """Fetch a model; its folder is the one line on stdout."""
    from raykv.engine.model_store import pull  # noqa: PLC0415

    with Steps() as steps, steps.step(f"model {name}") as update:
        folder = pull(name, on_progress=lambda message, fraction: update(fraction, message))
    print(folder)


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)
