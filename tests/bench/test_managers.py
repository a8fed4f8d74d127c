"""The benchmarks run and say what they measured; how fast is for people to judge."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from raykv.bench import eviction, growth, linear_ops, managers, memory, threads
from raykv.bench.timing import Row, machine, measure
from raykv.errors import ConfigError


def check_rows(rows) -> list[Row]:
    rows = list(rows)
    assert len({(row.workload, row.level) for row in rows}) == len(rows)
    for row in rows:
        assert 0 <= row.min_us <= row.median_us <= row.p99_us
        assert row.num_runs > 0
        assert json.loads(json.dumps(row.as_json()))["workload"] == row.workload
    return rows


def test_measure_times_the_operation_and_nothing_else():
    done = []
    row = measure(
        "work", "level", lambda x: done.append(("run", x)),
        prepare=lambda: done.append("prepare") or 7, after=lambda _: done.append("after"),
        num_runs=3, num_calls=2, target_us=1.5,
    )  # fmt: skip
    assert done == ["prepare", ("run", 7), "after"] * 8  # five to warm up
    assert (row.workload, row.level, row.num_runs, row.target_us) == ("work", "level", 3, 1.5)


def test_the_machine_is_named():
    assert set(machine()) == {"cpu", "python", "numpy"}


@pytest.mark.parametrize("workload", managers.WORKLOADS)
def test_each_workload_of_the_managers_runs(workload):
    (row,) = check_rows([workload(2)])
    assert row.level == "BlockManagerImpl"


def test_the_slots_of_recurrent_state_are_measured_beside_full_caches():
    rows = check_rows(linear_ops.measure(20, 3))
    assert {row.level for row in rows} == {"LinearStatePrefixCache"}
    assert sum("reclaiming" in row.workload for row in rows) == 3


def test_the_workbench_of_recurrent_state_keeps_as_many_checkpoints_as_it_says():
    bench = linear_ops.Workbench(20, 2)
    assert (bench.cache.num_checkpoints, bench.cache.num_free_slots) == (20, 2)
    bench.fill()
    assert (bench.cache.num_checkpoints, bench.cache.num_free_slots) == (22, 0)
    bench.acquire()
    bench.release()
    assert bench.cache.num_reclaimed_total == 1
    bench.match_and_release(bench.known())
    bench.promote(bench.fresh_name(), final=True).release()
    assert (bench.cache.num_hits_total, bench.cache.num_live_slots) == (1, 0)
    bench.promote(bench.fresh_name(), final=False).release()
    assert bench.cache.num_live_slots == 1
    bench.cache.check_integrity()


def test_the_lock_is_measured_beside_no_lock():
    rows = check_rows(threads.rows(2))
    for plain, locked in zip(rows[::2], rows[1::2], strict=True):
        assert plain.workload == locked.workload
        assert locked.target_us == pytest.approx(1.25 * plain.median_us, abs=0.01)


def test_growth_runs(monkeypatch):
    monkeypatch.setattr(growth, "PROMPT_LENGTHS", (1024, 2048))
    monkeypatch.setattr(growth, "POOL_SIZES", (4096,))
    monkeypatch.setattr(growth, "NUM_IN_THE_WAY", (0, 50))
    monkeypatch.setattr(growth, "NUM_TURNS", 3)
    monkeypatch.setattr(growth, "NUM_BRANCHES", (60,))
    assert len(check_rows(growth.rows(2))) == 2 * 3 + 3 + 2 * 2 * 2 + 2 + 2 * 3


def test_memory_of_a_small_pool_keeps_to_its_bounds():
    figures = {figure.what: figure for figure in memory.figures(4096)}
    bounded = {what for what, figure in figures.items() if figure.target_bytes is not None}
    assert bounded == figures.keys() - {"an idle manager, per block"}
    assert {"a block, cached", "a run"} <= bounded
    for figure in figures.values():
        if figure.what in bounded:
            assert figure.num_bytes <= figure.target_bytes, figure.what
        assert json.loads(json.dumps(figure.as_json()))["what"] == figure.what


# -- replays of traces ----------------------------------------------------------------------------


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request(time_ms, *hash_ids):
    return {"timestamp": time_ms, "input_length": 1, "output_length": 1, "hash_ids": hash_ids}


@pytest.fixture
def trace(tmp_path):
    """Two conversations, then many single prompts, then the first conversation again."""
    singles = [request(100 + i, 0, 1000 + i) for i in range(20)]
    talks = [request(1, 0, 1, 2), request(2, 0, 3), request(3, 0, 1, 2, 4), request(4, 0, 1, 2, 4)]
    return write(tmp_path / "trace.jsonl", [*talks, *singles, request(200, 0, 1, 2, 5)])


def test_blocks_of_a_prompt_have_tokens_of_their_own(trace):
    prompts = eviction.load(trace)
    assert prompts[0].tokens.tolist() == list(range(12))
    assert prompts[1].tokens.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert prompts[0].arrival_s == 0.001


def test_a_replay_counts_hits_as_by_hand(trace):
    prompts = eviction.load(trace)
    replays = {r.policy: r for r in eviction.replays(prompts, fractions=[1.0])}
    hits, blocks = 0 + 1 + 3 + 4 + 20 * 1 + 3, 3 + 2 + 4 + 4 + 40 + 4
    for policy in eviction.POLICIES:
        assert replays[policy].num_blocks == 26
        assert replays[policy].hit_rate == round(hits / blocks, 4)
        assert replays[policy].num_refused == 0
        assert json.loads(json.dumps(replays[policy].as_json()))["policy"] == policy


def test_what_was_used_often_survives_under_lrfu_only(trace):
    prompts = eviction.load(trace)
    rate = {r.policy: r.hit_rate for r in eviction.replays(prompts, fractions=[0.5])}
    assert rate["lrfu"] > rate["lru"]


def test_a_prompt_too_long_for_the_pool_is_counted_and_costs_nothing(trace):
    prompts = eviction.load(trace)
    replay = eviction.replay(prompts, "lru", 3, 26)
    assert replay.num_refused == 3
    assert replay.hit_rate > 0


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"timestamp": 1}', '{"timestamp": "x", "hash_ids": []}', "7"]
)
def test_a_bad_trace_is_refused_by_line(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(request(0, 1)) + "\n" + text + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        eviction.load(path)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        eviction.load(tmp_path / "none")


def test_lrfu_pays_on_a_real_trace_where_memory_is_scarce():
    folder = os.environ.get("RAYKV_TRACES")
    path = Path(folder or "", "conversation_trace.jsonl")
    if not folder or not path.exists():
        pytest.skip("RAYKV_TRACES names no folder with Mooncake's conversation_trace.jsonl")
    prompts = eviction.load(path)
    replays = eviction.replays(prompts, policies=["lru", "lrfu"], fractions=[0.05, 0.2])
    rate = {(r.policy, round(r.fraction, 2)): r.hit_rate for r in replays}
    assert rate["lrfu", 0.05] > rate["lru", 0.05] + 0.005
    assert rate["lru", 0.2] == pytest.approx(0.345, abs=0.001)  # as published with the trace
