"""``raykv bench``: what it prints; what it measures is tested in tests/bench."""

import json

import pytest

from raykv.bench.timing import Row
from raykv.cli import bench_command
from raykv.cli.main import run


def last_json(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i, "hash_ids": [0, i % 3, 5 + i % 2]} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("command", ["managers", "growth", "memory", "eviction"])
def test_each_benchmark_has_a_help(command, capsys):
    assert run(["bench", command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_rows_come_as_lines_and_together(capsys):
    rows = [Row("w", "l", 1.5, 1.0, 2.0, 30, 4), Row("v", "k", 2.5, 1.0, 2.0, 30)]
    bench_command._run_rows(rows, as_json=True)
    *lines, last = capsys.readouterr().out.strip().splitlines()
    assert [json.loads(line) for line in lines] == [row.as_json() for row in rows]
    assert json.loads(last)["rows"] == [row.as_json() for row in rows]
    assert json.loads(last)["machine"].keys() == {"cpu", "python", "numpy"}
    bench_command._run_rows(rows, as_json=False)
    text = capsys.readouterr().out
    assert "workload" in text
    assert json.loads(text.strip().splitlines()[-1])["rows"]


def test_the_policies_on_a_trace(trace, capsys):
    assert run(["bench", "eviction", str(trace), "--json"]) == 0
    rows = last_json(capsys)["rows"]
    assert {row["policy"] for row in rows} >= {"lru", "lrfu", "priority"}
    assert all(0 <= row["hit_rate"] <= 1 for row in rows)
    assert run(["bench", "eviction", str(trace)]) == 0
    assert "hit rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["eviction", "/no/such/trace"], ["managers", "--runs", "1"], ["memory", "x"]]
)
def test_bad_input_is_one_line(arguments, capsys):
    assert run(["bench", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
