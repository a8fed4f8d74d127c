"""`raykv demo --profile`: where a decode step's time goes, beside transformers' DynamicCache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raykv.config import PoolConfig
from raykv.engine.params import GenerationRequest, SamplingParams

from .console import Steps, Update
from .demo import fetch, keeps_state
from .settings import DemoOptions, one_rank, pool_config, with_checkpoints

if TYPE_CHECKING:
    from raykv.engine.engine import Engine

    from .reference import DynamicDecoder

SEQUENCES = (1, 8, 32)
_WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over decode steps of one batch, in milliseconds.

    Attributes:
        num_sequences: sequences that decode together.
        step_ms: raykv's whole step.
        engine_ms: of it outside the model: scheduling, block tables, sampling.
        gather_ms: index work and the gather of K and V from the blocks.
        write_ms: writing the new K and V into their slots.
        attention_ms: attention over the gathered K and V.
        model_ms: the rest of the model.
        dynamic_step_ms: the same decode with transformers' DynamicCache and its own attention.
        dynamic_concat_ms: of it in the cache's update, which concatenates K and V.
    """

    num_sequences: int
    step_ms: float
    engine_ms: float
    gather_ms: float
    write_ms: float
    attention_ms: float
    model_ms: float
    dynamic_step_ms: float
    dynamic_concat_ms: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The whole profile.

    Attributes:
        model: as the user named it.
        context_tokens: tokens of each sequence before the first measured step.
        num_steps: decode steps behind each median.
        rows: one per batch size.
    """

    model: str
    context_tokens: int
    num_steps: int
    rows: tuple[StepTimes, ...]

    def as_json(self) -> dict[str, Any]:
        """A plain mapping, milliseconds with three digits."""
        rows = [{name: round(value, 3) for name, value in asdict(row).items()} for row in self.rows]
        return {
            "model": self.model,
            "context_tokens": self.context_tokens,
            "steps": self.num_steps,
            "profile": rows,
        }


def run_profile(options: DemoOptions, steps: Steps) -> Profile:
    """Decode with 1, 8 and 32 sequences on one rank in this process, one torch thread.

    Raises:
        RaykvError: bad input.
    """
    config = pool_config(options)
    assert config.model is not None, "pool_config sets it"
    path = config.model.path
    context, num_steps = (128, 8) if options.quick else (256, 16)
    per_sequence = -(-(context + num_steps + _WARMUP_STEPS + 2) // config.block_size)
    with steps.step(f"model {path}") as update:
        folder = fetch(path, update)
        if keeps_state(folder):
            config = with_checkpoints(config)
        import torch  # noqa: PLC0415 - an extra, and seconds to import

        torch.set_num_threads(1)
        engine = _engine(config, 1 + max(SEQUENCES) * per_sequence, max(SEQUENCES) * context)
        from .reference import Reference  # noqa: PLC0415 - one import for both

        reference = Reference.load(path)
    rows = []
    for count in SEQUENCES:
        tokens = np.random.default_rng(count).integers(
            0, engine.limits.vocab_size, (count, context), np.int32
        )
        with steps.step(f"{count} sequences") as update:
            decoder = reference.decoder(tokens.tolist())
            rows.append(_measure(engine, decoder, tokens, num_steps, update))
    return Profile(path, context, num_steps, tuple(rows))


def print_profile(profile: Profile, console: Console) -> None:
    """Print the profile as a table."""
    model, context = Path(profile.model).name, profile.context_tokens
    title = f"one decode step of {model}, context {context} tokens, one torch thread, in ms"
    table = Table()
    table.add_column("sequences")
    for row in profile.rows:
        table.add_column(str(row.num_sequences), justify="right")
    lines: Sequence[tuple[str, Callable[[StepTimes], float]]] = (
        ("raykv: whole step", lambda row: row.step_ms),
        ("  engine", lambda row: row.engine_ms),
        ("  gather of K/V", lambda row: row.gather_ms),
        ("  write of K/V", lambda row: row.write_ms),
        ("  attention", lambda row: row.attention_ms),
        ("  rest of the model", lambda row: row.model_ms),
        ("DynamicCache: whole step", lambda row: row.dynamic_step_ms),
        ("  concatenation of K/V", lambda row: row.dynamic_concat_ms),
    )
    for name, get in lines:
        table.add_row(name, *(f"{get(row):.2f}" for row in profile.rows))
    ratios = (f"{row.step_ms / row.dynamic_step_ms:.2f}" for row in profile.rows)
    table.add_row("raykv / DynamicCache", *ratios, style="bold")
    console.print()
    console.print(Text(title, style="italic"))
    console.print(table)
    notes = f"medians of {profile.num_steps} steps, both in turn; parts are medians of their own"
    console.print(Text(notes, style="dim"))


def _engine(config: PoolConfig, num_blocks: int, num_batched_tokens: int) -> Engine:
    """An engine that prefills all sequences side by side, so that all decode from then on."""
    from raykv.engine.build import build_rank  # noqa: PLC0415 - brings torch

    config = one_rank(config, num_blocks, max_num_batched_tokens=num_batched_tokens)
    _, engine = build_rank(config, 0)
    assert engine is not None, "a model makes an engine"
    return engine


def _measure(
    engine: Engine, decoder: DynamicDecoder, tokens: Any, num_steps: int, update: Update
) -> StepTimes:
    """Prefill both, then decode with each in turn, so that other load on the box meets both."""
    params = SamplingParams(max_tokens=1 + _WARMUP_STEPS + num_steps, ignore_eos=True)
    engine.kv.reset_prefix_cache()
    engine.submit(
        GenerationRequest(f"profile-{index}", row, params) for index, row in enumerate(tokens)
    )
    update(None, "prefill")
    engine.step()
    while any(task.num_remaining > 1 for task in engine.scheduler.running):  # cut for checkpoints
        engine.step()
    decoder.step()
    samples: list[dict[str, float]] = []
    for step in range(_WARMUP_STEPS + num_steps):
        assert all(task.num_remaining == 1 for task in engine.scheduler.running)
        sample = _raykv_step(engine)
        sample["dynamic_step_ms"], sample["dynamic_concat_ms"] = decoder.step()
        samples.append(sample)
        update((step + 1) / (_WARMUP_STEPS + num_steps), "decode")
    kept = samples[_WARMUP_STEPS:]
    medians = {name: 1e3 * median(sample[name] for sample in kept) for name in kept[0]}
    return StepTimes(len(tokens), **medians)


def _raykv_step(engine: Engine) -> dict[str, float]:
    """Seconds of one step by part, under the names of StepTimes."""
    runner: Any = engine.model
    runner.profile = True
    before, timings, began = engine.stats(), dict(runner.timings), time.perf_counter()
    engine.step()
    step_s = time.perf_counter() - began
    runner.profile = False
    parts = {name: runner.timings[name] - timings[name] for name in timings}
    model_s = engine.stats().model_s - before.model_s
    known_s = parts["gather"] + parts["write"] + parts["attention"]
    return {
        "step_ms": step_s,
        "engine_ms": step_s - model_s,
        "gather_ms": parts["gather"],
        "write_ms": parts["write"],
        "attention_ms": parts["attention"],
        "model_ms": model_s - known_s,
    }
