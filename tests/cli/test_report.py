import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from raykv.cli.report import bar, print_report, stacked_bar, states
from raykv.cli.results import Check, Figures, Report
from raykv.core.explain import MissReport
from raykv.core.kv_cache_manager import RankStats

FIGURES = Figures(
    model="smollm2",
    dp_size=2,
    block_size=16,
    num_blocks=512,
    conversations=4,
    requests=12,
    prompt_tokens=5752,
    hit_tokens=4192,
    hit_rate=4192 / 5752,
    generated_tokens=144,
    ttft_cold_ms=1535.2222,
    ttft_warm_ms=94.1,
    ttft_prompts=3,
    tokens_per_s=20.92,
    tokens_per_s_no_cache=10.4,
    outputs_equal=True,
    near_ties=0,
    compared_no_cache=12,
    compared_generate=1,
    max_logit_diff=1.2e-6,
    corrupted_logit_diff=12.2,
    leaked_blocks=0,
    preemptions=0,
    evicted_blocks=7,
    state_hits=0,
    state_checkpoints=0,
    state_skipped=0,
    state_bytes=0,
    lost_state_logit_diff=None,
    device_hit_tokens=4192,
    host_hit_tokens=0,
    offloaded_blocks=0,
    loaded_blocks=0,
    offloaded_bytes=0,
    loaded_bytes=0,
    host_blocks=0,
    host_blocks_cached=0,
    leaked_host_blocks=0,
    tier_faults=0,
    misses={"complete": 2, "diverged": 1},
    workload_sha256="e9",
    checks_failed=(),
    wall_s=55.63,
)
PEAK = RankStats(
    num_total_blocks=511, num_free_blocks=411, num_used_blocks=60, num_evictable_blocks=33
)
DRAINED = replace(PEAK, num_used_blocks=0, num_evictable_blocks=100)
CHECKS = (Check("a", True, "fine"), Check("b", False, "bad"))
MISSES = (
    MissReport("complete", 32, 32),
    MissReport("complete", 96, 96),
    MissReport("diverged", 16, 21, (7, 8), (9, 8)),
)
REPORT = Report(FIGURES, CHECKS, (PEAK, PEAK), (DRAINED, DRAINED), MISSES)


def rendered(report, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_report(report, console)
    return console.file.getvalue()


def test_the_report_names_everything_and_fits_a_terminal():
    text = rendered(REPORT)
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "smollm2, 2 ranks of 511 blocks of 16 tokens", "5,752", "4,192", "1,560", "72.9% hit rate",
        "16.3 x", "2.0 x", "1,535", "per wall second", "queueing excluded", "rank 1 fullest",
        "rank 1 drained", "evictable", "pending", "ok    a: fine", "FAIL  b: bad",
        " 2  complete", "hit 96 tokens", " 1  diverged", "at token 21",
    ):  # fmt: skip
        assert words in text


def test_models_with_state_show_what_it_took():
    figures = replace(
        FIGURES, state_hits=11, state_checkpoints=37, state_skipped=5, state_bytes=1_474_560
    )
    text = rendered(replace(REPORT, figures=figures))
    for words in ("resumed from a state", " 11 ", " 37 ", "5 found no slot", "1.5"):
        assert words in text
    assert "state" not in rendered(REPORT).replace("by state", "")


def test_host_memory_shows_what_went_to_it_and_came_back():
    figures = replace(
        FIGURES, device_hit_tokens=3168, host_hit_tokens=1024, offloaded_blocks=77,
        loaded_blocks=64, offloaded_bytes=57_000_000, loaded_bytes=47_000_000, host_blocks=511,
        host_blocks_cached=70, tier_faults=3,
    )  # fmt: skip
    text = rendered(replace(REPORT, figures=figures))
    assert max(map(len, text.splitlines())) <= 80
    for words in ("3,168", "1,024", " 77 ", "57 MB", " 64 ", "47 MB", "70 of 511", "3 faults"):
        assert words in text
    assert "host" not in rendered(REPORT)


def test_no_terminal_no_colours():
    assert "\x1b" not in rendered(REPORT)


def test_json_has_the_promised_fields():
    values = json.loads(json.dumps(FIGURES.as_json()))
    assert {
        "dp_size", "requests", "prompt_tokens", "hit_tokens", "hit_rate", "ttft_cold_ms",
        "ttft_warm_ms", "tokens_per_s", "tokens_per_s_no_cache", "outputs_equal", "near_ties",
        "device_hit_tokens", "host_hit_tokens", "offloaded_blocks", "loaded_blocks",
        "host_blocks_cached", "tier_faults", "max_logit_diff", "leaked_blocks", "workload_sha256",
    } <= values.keys()  # fmt: skip
    assert (values["hit_rate"], values["ttft_cold_ms"], values["wall_s"]) == (0.7288, 1535.22, 55.6)
    assert values["max_logit_diff"] == 1.2e-6


def test_one_bad_check_spoils_the_report():
    assert not REPORT.ok
    assert replace(REPORT, checks=REPORT.checks[:1]).ok


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0, ""), (1, "█" * 8), (2, "█" * 8), (-1, ""), (0.5, "████"), (0.51, "████▏"), (1 / 64, "▏")],
)
def test_bar(fraction, text):
    assert bar(fraction, 8) == text


def test_states_add_up():
    assert states(PEAK) == [("used", 60), ("pending", 7), ("evictable", 33), ("free", 411)]


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (PEAK, "██▓▒░░░░░░░░░░░░░░░░"),  # 7 of 511 blocks still show
        (DRAINED, "▒▒▒▒░░░░░░░░░░░░░░░░"),
        (RankStats(num_total_blocks=10, num_used_blocks=10), "█" * 20),
        (RankStats(num_total_blocks=10, num_free_blocks=10), "░" * 20),
    ],
)
def test_stacked_bar(rank, text):
    assert stacked_bar(rank, 20).plain == text


def test_figures_of_zero_do_not_break_the_report():
    zero = replace(FIGURES, ttft_cold_ms=0.0, ttft_warm_ms=0.0, tokens_per_s_no_cache=0.0)
    assert " - " in rendered(replace(REPORT, figures=zero))
