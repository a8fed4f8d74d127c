"""The demo with host memory behind too few device blocks."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from raykv.cli import demo, workload
from raykv.cli.console import Steps
from raykv.cli.main import run as run_command
from raykv.cli.settings import DemoOptions, pool_config, without_cache
from raykv.errors import ConfigError
from raykv.hierarchy import HierarchyBlockManagerPool, local_pool
from raykv.host.stats import HostTierStats
from raykv.pool import BlockManagerPool

from .pair_tokenizer import PairTokenizer


@pytest.fixture
def options(monkeypatch, tiny_folder):
    monkeypatch.setattr(demo, "_tokenizer", lambda _: PairTokenizer())
    monkeypatch.setattr(workload, "system_prompt", lambda: "be an otter. " * 20)
    monkeypatch.setattr(workload, "QUICK", workload.Sizes(4, 3, 6, 2, 2))
    return DemoOptions(
        model=str(tiny_folder), quick=True, ranks=1, num_blocks=90, block_size=8, host_blocks=400
    )


def run(options, launch=local_pool):
    with Steps(Console(file=io.StringIO(), width=200)) as steps:
        return demo.run_demo(options, steps, launch)


def test_what_falls_out_of_the_device_comes_back(options):
    report = run(options)
    figures = report.figures
    assert report.ok, report.checks
    assert figures.evicted_blocks > 0
    assert figures.host_hit_tokens > 0
    assert figures.device_hit_tokens + figures.host_hit_tokens == figures.hit_tokens
    assert figures.loaded_blocks * figures.block_size >= figures.host_hit_tokens
    assert figures.offloaded_blocks >= figures.host_blocks_cached > 0
    assert figures.host_blocks == 399
    num_bytes = (figures.offloaded_bytes, figures.loaded_bytes)
    block_bytes = 2 * 3 * 2 * 16 * 8 * 4  # K and V, layers, heads, their size, tokens, float32
    assert num_bytes == (
        figures.offloaded_blocks * block_bytes,
        figures.loaded_blocks * block_bytes,
    )
    assert (figures.leaked_blocks, figures.leaked_host_blocks, figures.tier_faults) == (0, 0, 0)
    assert "nothing is held for the host after the last answer" in {c.name for c in report.checks}


def test_without_a_host_fewer_tokens_hit(options):
    plain = run(replace(options, host_blocks=None)).figures
    assert plain.hit_tokens < run(options).figures.hit_tokens
    assert (plain.host_hit_tokens, plain.offloaded_blocks, plain.host_blocks) == (0, 0, 0)


class Holding(HierarchyBlockManagerPool):
    """A pool whose host keeps a block pinned."""

    is_drained = False

    def wait_for_transfers(self, timeout_s):
        self.is_drained = super().wait_for_transfers(timeout_s)
        return self.is_drained

    def host_stats(self):
        pinned = int(self.is_drained)
        return [replace(stats, pinned=stats.pinned + pinned) for stats in super().host_stats()]


def test_what_the_host_still_holds_is_found(options):
    report = run(
        options, lambda config: (Holding if config.host else BlockManagerPool).local(config)
    )
    assert report.figures.checks_failed == ("nothing is held for the host after the last answer",)
    assert report.figures.leaked_host_blocks == 1


def test_host_blocks_win_over_a_file(tmp_path, options):
    file = tmp_path / "pool.yaml"
    host = "host: {num_blocks: 9, checksum_rate: 0.5}"
    file.write_text(f"num_blocks: 300\nmodel: {{path: smollm2}}\n{host}\n")
    config = pool_config(replace(options, config=file))
    assert (config.host.num_blocks, config.host.checksum_rate) == (400, 0.5)
    assert pool_config(replace(options, config=file, host_blocks=None)).host.num_blocks == 9


def test_the_run_without_cache_has_no_host(options):
    config = without_cache(pool_config(options))
    assert config.host is None
    assert not config.enable_prefix_cache


def test_a_pool_has_a_host_where_the_configuration_has_one(options):
    config = pool_config(options)
    for each, kind in (
        (config, HierarchyBlockManagerPool), (without_cache(config), BlockManagerPool),
    ):  # fmt: skip
        with local_pool(each) as pool:
            assert type(pool) is kind


@pytest.mark.parametrize("number", [1, 0, -3, 2**31])
def test_an_impossible_number_is_named_as_the_option(options, number):
    with pytest.raises(ConfigError, match=rf"^--host-blocks: must be .* got {number}$"):
        pool_config(replace(options, host_blocks=number))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host-blocks", "1"], ["--host-blocks", "2", "got 1"]),
        (["--host-blocks", "many"], ["--host-blocks", "integer"]),
        (["--device-blocks", "1", "--host-blocks", "8"], ["--num-blocks", "got 1"]),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    assert run_command(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert all(word in err for word in words)


def test_stats_name_the_size_of_a_block(options):
    with local_pool(pool_config(options)) as pool:
        [stats] = pool.host_stats()
    assert isinstance(stats, HostTierStats)
    assert stats.block_bytes == 2 * 3 * 2 * 16 * 8 * 4
