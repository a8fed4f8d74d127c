#!/usr/bin/env python3
"""Continue a file of prompts: JSON lines in, JSON lines out. Also the entry point of a Ray job.

Run again after an interruption, it goes on where it was.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from raykv.cli import main

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def job(
    *,
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            metavar="FILE",
            help='One JSON object a line: {"prompt": "..."}, {"token_ids": [...]} or '
            '{"messages": [...]} for the chat template. Optional: "id" (the line\'s number if '
            "left out) and raykv.SamplingParams but n, such as max_tokens.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="One JSON object a line, as they come: id, text, token_ids, stop_reason, "
            "num_prompt_tokens, num_cached_tokens, dp_rank; or id, line, error. What is there "
            "already is not done again; what has an error is.",
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML of the pool to launch.")
    ] = None,
    attach: Annotated[
        str | None, typer.Option(metavar="NAME", help="Use a pool that runs, instead of --config.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="The Ray namespace that the pool was launched in.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens per output, where a line does not say.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; where a line does not say.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Makes sampling repeatable; each line gets its own out of it."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts under way at a time.")] = 64,
) -> None:
    """Continue every prompt of a file, and write the outputs in the order of completion.

    Progress goes to stderr. The exit status is 0; 1 if a line failed, which then has an "error" in
    the output; 2 if the arguments are bad.
    """
    if (config is None) == (attach is None):
        raise typer.BadParameter("pass either --config to launch a pool, or --attach to use one")
    if namespace is not None and attach is None:
        raise typer.BadParameter("--namespace says where --attach looks; pass both")
    from raykv.cli.console import Steps  # noqa: PLC0415 - costs time to import
    from raykv.cli.job import JobOptions, run_job  # noqa: PLC0415
    from raykv.cli.settings import quiet_libraries  # noqa: PLC0415

    quiet_libraries()
    options = JobOptions(
        input=source,
        output=output,
        config=config,
        attach=attach,
        namespace=namespace,
        concurrency=concurrency,
        defaults={"max_tokens": max_tokens, "temperature": temperature, "seed": seed},
    )
    with Steps() as steps:
        is_complete = run_job(options, steps)
    if not is_complete:
        raise typer.Exit(1)


if __name__ == "__main__":
    sys.exit(main.run(command=app, name="job.py"))
