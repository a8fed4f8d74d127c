"""The whole demo in process, over a tiny random model: what it accepts, and what it must not."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from raykv.cli import demo, main, workload
from raykv.cli.console import Steps
from raykv.cli.settings import DemoOptions
from raykv.config import PoolConfig
from raykv.core.sequence import Sequence
from raykv.errors import ConfigError, RequestError
from raykv.pool import BlockManagerPool

from .pair_tokenizer import PairTokenizer


@pytest.fixture
def options(monkeypatch, tiny_folder):
    monkeypatch.setattr(demo, "_tokenizer", lambda _: PairTokenizer())
    monkeypatch.setattr(workload, "system_prompt", lambda: "be an otter. " * 20)
    monkeypatch.setattr(workload, "QUICK", workload.Sizes(4, 3, 6, 2, 2))
    return DemoOptions(model=str(tiny_folder), quick=True, num_blocks=400, block_size=8)


@pytest.fixture
def log():
    return io.StringIO()


def run(options, log, launch=BlockManagerPool.local):
    with Steps(Console(file=log, width=200)) as steps:
        return demo.run_demo(options, steps, launch)


def test_a_run(options, log):
    report = run(options, log)
    figures = report.figures
    assert report.ok, report.checks
    assert (figures.dp_size, figures.requests, figures.conversations) == (2, 12, 4)
    assert figures.outputs_equal
    assert figures.hit_rate == pytest.approx(figures.hit_tokens / figures.prompt_tokens)
    assert 0.5 < figures.hit_rate < 1
    assert figures.ttft_prompts == 2
    assert figures.compared_no_cache == 12
    assert figures.compared_generate == 2
    assert figures.leaked_blocks == 0
    assert figures.max_logit_diff <= 1e-4
    assert figures.checks_failed == ()
    assert all(rank.num_used_blocks > 0 for rank in report.peak)
    assert all(rank.num_used_blocks == 0 for rank in report.drained)
    lines = log.getvalue().splitlines()
    assert all(line.startswith("done") for line in lines)
    assert any("12/12 answers" in line and "tokens/s, hit rate" in line for line in lines)


def test_the_workload_has_a_name_of_its_own(options, log):
    names = {run(options, log).figures.workload_sha256 for _ in range(2)}
    assert len(names) == 1
    changed = demo.make_plan(replace(options, max_tokens=5), Steps(Console(file=log)))
    assert changed.workload.sha256 not in names


class Meddling(BlockManagerPool):
    """A pool that does something wrong, where the prefix cache is off or in all cases."""

    def start(self, requests, listeners, dp_rank=None):
        super().start(requests, [self.meddle(listener) for listener in listeners], dp_rank)

    def meddle(self, listener):
        return listener


class Flipping(Meddling):
    """One token of each answer is wrong, without the cache."""

    def meddle(self, listener):
        def listen(delta):
            if delta.output is not None and not self.config.enable_prefix_cache:
                first, *rest = delta.output.token_ids
                tokens = (first % 100 + 5, *rest)
                delta = replace(delta, output=replace(delta.output, token_ids=tokens))
            listener(delta)

        return listen


class FlippingAlways(Meddling):
    """One token of each answer is wrong, with the cache and without: only generate() can tell."""

    def meddle(self, listener):
        def listen(delta):
            if delta.output is not None:
                *rest, last = delta.output.token_ids
                output = replace(delta.output, token_ids=(*rest, last % 100 + 5))
                delta = replace(delta, output=output)
            listener(delta)

        return listen


class Leaking(Meddling):
    """A sequence of somebody else keeps its blocks."""

    def stats(self):
        self.leak = Sequence([3] * 20)
        assert self.allocate(self.leak)
        return super().stats()


class Forgetting(Meddling):
    """The cache is lost between the cold and the warm prompt."""

    def generate(self, *args, **kwargs):
        self.reset_prefix_cache()
        return super().generate(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "failed"),
    [
        (Flipping, "answers equal the run without prefix cache"),
        (FlippingAlways, "answers equal transformers' generate()"),
        (Leaking, "no block is held after the last answer"),
        (Forgetting, "first tokens were cold, then warm"),
    ],
)
def test_what_is_wrong_is_found(options, log, kind, failed):
    report = run(options, log, kind.local)
    assert not report.ok
    assert report.figures.checks_failed == (failed,)
    assert report.figures.outputs_equal == ("equal" not in failed)
    assert (report.figures.leaked_blocks > 0) == (kind is Leaking)


def test_a_failed_check_is_status_1_and_named(options, log, capsys, monkeypatch):
    run_demo = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda _, steps: run_demo(options, steps, Flipping.local))
    assert main.run(["demo", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert '"outputs_equal": false' in out
    assert "FAIL" in err


def test_settings_of_a_file_and_options_that_win(tmp_path, options, log):
    file = tmp_path / "pool.yaml"
    file.write_text("num_blocks: 300\nblock_size: 4\nmax_num_seqs: 8\n")
    chosen = replace(options, config=file, num_blocks=None, ranks=3)
    config = demo.make_plan(chosen, Steps(Console(file=log))).config
    assert isinstance(config, PoolConfig)
    assert (config.num_blocks, config.block_size, config.dp_size) == (300, 8, 3)
    assert (config.max_num_seqs, config.num_single_blocks) == (8, 9)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"num_blocks": 20}, ConfigError, "conversations.jsonl:1"),
        ({"max_tokens": 0}, RequestError, "max_tokens"),
        ({"ranks": -1}, ConfigError, "--ranks"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options, log, change, kind, words):
    def launch(config):
        pytest.fail("a pool was started")

    with pytest.raises(kind, match=words):
        run(replace(options, **change), log, launch)
