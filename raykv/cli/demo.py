"""`raykv demo`: serve conversations from a pool on Ray, check everything, say what it gained."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from raykv.config import PoolConfig
from raykv.errors import ConfigError
from raykv.pool import BlockManagerPool

from .checks import Evidence, checks_of
from .console import Steps, Update
from .conversations import load_conversations
from .first_token import FirstToken, longest_prompts, measure_first_token, medians
from .logit_check import LogitCheck, check_logits
from .play import Phase, Served, converse, replay
from .prompts import ChatFormat
from .reference import Reference
from .results import Figures, Report
from .settings import DemoOptions, one_rank, pool_config, with_checkpoints, without_cache
from .verify import Pair, Verdict, compare
from .workload import Workload, make_workload

Launch = Callable[[PoolConfig], BlockManagerPool]


@dataclass(frozen=True, slots=True)
class Plan:
    """A demo that can be run: everything the user gave was read and found possible.

    Attributes:
        config: of the pool.
        workload: what is played.
        chat: how prompts are written.
    """

    config: PoolConfig
    workload: Workload
    chat: ChatFormat

    @property
    def model_path(self) -> str:
        """What the user called the model."""
        assert self.config.model is not None, "pool_config sets it"
        return self.config.model.path


def make_plan(options: DemoOptions, steps: Steps) -> Plan:
    """Read the input and fetch the model, before anything is started.

    Raises:
        RaykvError: something is missing or impossible.
    """
    config = pool_config(options)
    assert config.model is not None, "pool_config sets it"
    path = config.model.path
    conversations = load_conversations(options.conversations)
    workload = make_workload(
        path, conversations, quick=options.quick, max_tokens=options.max_tokens
    )
    with steps.step(f"model {path}") as update:
        folder = fetch(path, update)
        if keeps_state(folder):
            config = with_checkpoints(config)
        chat = ChatFormat(_tokenizer(path), workload.system)
        update(None, folder)
    workload.check(chat, config.max_tokens_per_sequence)
    return Plan(config, workload, chat)


def run_demo(options: DemoOptions, steps: Steps, launch: Launch | None = None) -> Report:
    """Run the whole demo.

    Args:
        options: what the user asked for.
        steps: where progress goes.
        launch: how a pool is started; on Ray unless given.

    Raises:
        RaykvError: bad input, or a rank went away.
    """
    began = time.perf_counter()
    plan = make_plan(options, steps)
    sizes, params = plan.workload.sizes, plan.workload.params
    with ExitStack() as stack:
        if launch is None:
            launch = _launcher(plan.config, stack)
        with _start("ranks", launch, plan.config, steps) as pool:
            with steps.step("conversations, prefix cache on") as update:
                cached = converse(pool, plan.chat, plan.workload, update)
            with steps.step("time to first token") as update:
                samples = longest_prompts(cached.served, sizes.num_first_token)
                first_tokens = measure_first_token(pool, samples, update)
        with (
            _start("ranks without prefix cache", launch, without_cache(plan.config), steps) as pool,
            steps.step("the same prompts, prefix cache off") as update,
        ):
            plain = replay(pool, cached, params, update)
    evidence = _verify(plan, cached, plain, first_tokens, steps)
    return _report(plan, evidence, time.perf_counter() - began)


def fetch(path: str, update: Update) -> str:
    """Fetch a model that is known by name; where it lies.

    Raises:
        ConfigError: it cannot be had, or the folder is no model.
    """
    from raykv.engine.model_store import known_names, pull, resolve_model  # noqa: PLC0415

    def report(message: str, fraction: float | None) -> None:
        update(fraction, message)

    folder = pull(path, on_progress=report) if path in known_names() else resolve_model(path)
    return str(folder)


def keeps_state(folder: str) -> bool:
    """Whether a model's layers keep recurrent state, as its config says.

    Raises:
        ConfigError: the config cannot be read.
    """
    from raykv.engine.hf_support import read_config, text_config  # noqa: PLC0415 - seconds
    from raykv.engine.mixers import linear_layers  # noqa: PLC0415

    return bool(linear_layers(text_config(read_config(folder))))


def _tokenizer(path: str) -> Any:
    from raykv.engine.build import load_tokenizer  # noqa: PLC0415 - seconds to import

    try:
        from raykv.engine.model_cache import quiet_transformers  # noqa: PLC0415

        with quiet_transformers():
            tokenizer = load_tokenizer(path)
    except ImportError as error:
        raise ConfigError(f"model {path} needs {error.name}: pip install 'raykv[model]'") from None
    if tokenizer is None:
        raise ConfigError(
            f"cannot load a tokenizer for the model {path!r}: name a folder that has one, a hub id "
            "that can be reached, or smollm2"
        )
    return tokenizer


def _launcher(config: PoolConfig, stack: ExitStack) -> Launch:
    """Start pools on one Ray, which stays up between them."""
    from raykv.actors import cluster, launch  # noqa: PLC0415 - Ray takes seconds to import

    stack.callback(cluster.acquire(config, None))
    return launch


def _start(text: str, launch: Launch, config: PoolConfig, steps: Steps) -> BlockManagerPool:
    with steps.step(text) as update:
        pool = launch(config)
        update(None, f"{len(pool.ranks)} of {config.num_blocks - 1} blocks ready")
    return pool


def _verify(
    plan: Plan, cached: Phase, plain: Phase, first_tokens: list[FirstToken], steps: Steps
) -> Evidence:
    """Hold the answers against the run without cache and against transformers."""
    import torch  # noqa: PLC0415 - an extra, and seconds to import

    torch.set_num_threads(1)
    count = plan.workload.sizes.num_generate
    with steps.step("compared with the run without cache") as update:
        reference = Reference.load(plan.model_path)
        pairs = zip(cached.served, plain.served, strict=True)
        no_cache = compare(
            [_pair(one, other.output.token_ids) for one, other in pairs], reference.logits
        )
        update(1.0, _words(no_cache))
    with steps.step("compared with transformers' generate()") as update:
        generated = _generated(reference, longest_prompts(cached.served, count), plan, update)
    with steps.step("logits from cached blocks") as update:
        logits = _logits(plan, longest_prompts(cached.served, count))
        update(1.0, f"{logits.num_shared_tokens} of {logits.num_prompt_tokens} tokens shared")
    return Evidence(cached, plain, tuple(first_tokens), no_cache, generated, logits)


def _generated(reference: Reference, samples: list[Served], plan: Plan, update: Update) -> Verdict:
    pairs = []
    for item in samples:
        answer = reference.generate(item.prompt.tolist(), plan.workload.sizes.max_tokens)
        pairs.append(Pair(item.name, item.prompt.tolist(), answer, item.output.token_ids))
        update(len(pairs) / len(samples), f"{len(pairs)} answers")
    verdict = compare(pairs, reference.logits)
    update(1.0, _words(verdict))
    return verdict


def _logits(plan: Plan, samples: list[Served]) -> LogitCheck:
    from raykv.engine.build import build_rank  # noqa: PLC0415 - seconds to import

    size = plan.config.block_size
    # One token behind full blocks is the hardest case: the warm prefill computes that one alone,
    # and a product with one row adds up in another order than one with many.
    prompts = [item.prompt[: (len(item.prompt) - 1) // size * size + 1] for item in samples]
    num_blocks = 3 + 3 * (-(-max(map(len, prompts)) // size))
    _, engine = build_rank(one_rank(plan.config, num_blocks), 0)
    assert engine is not None, "a model makes an engine"
    return LogitCheck.worst([check_logits(engine, prompt.tolist()) for prompt in prompts])


def _pair(item: Served, answer: tuple[int, ...]) -> Pair:
    return Pair(item.name, item.prompt.tolist(), answer, item.output.token_ids)


def _words(verdict: Verdict) -> str:
    same = verdict.num_pairs - verdict.num_near_ties - len(verdict.differences)
    return f"{same} of {verdict.num_pairs} answers the same, {verdict.num_near_ties} near ties"


def _report(plan: Plan, evidence: Evidence, wall_s: float) -> Report:
    cached, plain = evidence.cached, evidence.plain
    cold_s, warm_s = medians(evidence.first_tokens)
    checks = checks_of(evidence)
    misses = tuple(item.output.miss for item in cached.served if item.output.miss is not None)
    num_offloaded = sum(rank.num_offloaded_blocks_total for rank in cached.drained)
    num_loaded = sum(rank.num_loaded_blocks_total for rank in cached.drained)
    block_bytes = max((host.block_bytes for host in cached.hosts), default=0)
    figures = Figures(
        model=plan.model_path,
        dp_size=plan.config.dp_size,
        block_size=plan.config.block_size,
        num_blocks=plan.config.num_blocks,
        conversations=len(plan.workload.conversations),
        requests=len(cached.served),
        prompt_tokens=cached.num_prompt_tokens,
        hit_tokens=cached.num_hit_tokens,
        hit_rate=cached.hit_rate,
        generated_tokens=cached.num_generated_tokens,
        ttft_cold_ms=1e3 * cold_s,
        ttft_warm_ms=1e3 * warm_s,
        ttft_prompts=len(evidence.first_tokens),
        tokens_per_s=cached.tokens_per_s,
        tokens_per_s_no_cache=plain.tokens_per_s,
        outputs_equal=evidence.no_cache.is_equal and evidence.generated.is_equal,
        near_ties=evidence.no_cache.num_near_ties + evidence.generated.num_near_ties,
        compared_no_cache=evidence.no_cache.num_pairs,
        compared_generate=evidence.generated.num_pairs,
        max_logit_diff=evidence.logits.max_diff,
        corrupted_logit_diff=evidence.logits.corrupted_diff,
        leaked_blocks=evidence.num_leaked_blocks,
        preemptions=sum(item.output.num_preempted for item in cached.served),
        evicted_blocks=sum(rank.num_evicted_blocks_total for rank in cached.drained),
        state_hits=sum(rank.state_hits_total for rank in cached.drained),
        state_checkpoints=sum(rank.state_checkpoints_total for rank in cached.drained),
        state_skipped=sum(rank.state_skipped_total for rank in cached.drained),
        state_bytes=sum(rank.state_bytes for rank in cached.drained),
        lost_state_logit_diff=evidence.logits.lost_state_diff,
        device_hit_tokens=cached.num_hit_tokens - cached.num_host_hit_tokens,
        host_hit_tokens=cached.num_host_hit_tokens,
        offloaded_blocks=num_offloaded,
        loaded_blocks=num_loaded,
        offloaded_bytes=num_offloaded * block_bytes,
        loaded_bytes=num_loaded * block_bytes,
        host_blocks=sum(host.blocks for host in cached.hosts),
        host_blocks_cached=sum(host.cached for host in cached.hosts),
        leaked_host_blocks=cached.num_leaked_host_blocks,
        tier_faults=sum(rank.num_tier_faults_total for rank in cached.drained),
        misses=dict(Counter(miss.reason for miss in misses).most_common()),
        workload_sha256=plan.workload.sha256,
        checks_failed=tuple(check.name for check in checks if not check.ok),
        wall_s=wall_s,
    )
    return Report(figures, checks, tuple(cached.peak), tuple(cached.drained), misses)
