"""scripts/bench_peers: what it prints of rows, and that our own side and the peers' run."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from raykv.bench import managers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "bench_peers.d"


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_peers_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = load("report")
environment = load("environment")


def row(median_us, **more):
    return {"median_us": median_us, **more}


def hello(**sides):
    said = {"version": "1.0", "includes": {"admit": "all of it"}, "split_of": "hashing"}
    return {side: said | more for side, more in sides.items()}


def line(**medians):
    return report.Line("admit", {side: row(median) for side, median in medians.items()})


@pytest.mark.parametrize(
    ("medians", "expected"), [([3], 3), ([9, 1], 1), ([5, 1, 9], 5), ([4, 1, 9, 5], 4)]
)
def test_the_middle_of_several_rounds_counts(medians, expected):
    assert report.middle([row(median) for median in medians]) == row(expected)


def test_the_speed_up_is_against_the_faster_peer():
    assert line(raykv=10, vllm=1000, sglang=50).speed_up() == 5
    assert line(raykv=100, vllm=1000, sglang=50).speed_up() == 0.5
    assert line(raykv=10).speed_up() is None


@pytest.mark.parametrize(
    ("figure", "text"), [(2.94, "2.9"), (19.96, "20.0"), (226.4, "226"), (20008, "20,008")]
)
def test_figures_are_short(figure, text):
    assert report.figure(figure) == text


@pytest.mark.parametrize(("factor", "text"), [(None, "-"), (0.55, "0.6x"), (1426.4, "1,426x")])
def test_factors_are_short(factor, text):
    assert report.times(factor) == text


def test_a_side_without_the_workload_has_a_dash():
    cells = report.cells(line(raykv=8, vllm=80), ["raykv", "vllm", "sglang"])
    assert cells == ["8.0", "80", "-", "10x"]


def test_the_markdown_has_a_row_per_workload_and_says_what_is_included():
    machine = {"cpu": "2 x CPU", "python": "3.11", "numpy": "2.4"}
    result = {
        "hello": hello(raykv={"machine": machine}, vllm={}),
        "num_runs": 50, "num_rounds": 3, "load_before": 1.0, "load_after": 2.0,
    }  # fmt: skip
    lines = [report.Line("admit", {"raykv": row(8.0), "vllm": row(80.0, part_us=70.0)})]
    text = report.markdown(lines, result)
    assert "| median us | raykv 1.0 | vLLM 1.0 | speed-up |\n| --- | ---: | ---: | ---: |" in text
    assert "| admit | 8.0 | 80 | 10x |" in text
    assert "- vLLM: admit: all of it." in text
    assert "- vLLM, hashing (us): admit 70." in text
    assert "2 x CPU, Python 3.11, NumPy 2.4; median of 50 runs" in text


def test_the_table_fits_100_columns():
    console = Console(width=100, file=io.StringIO())
    sides = ("raykv", "vllm", "sglang")
    longest = report.Line("admit a cached 8k conversation of 16 turns", {})
    console.print(report.table([longest], hello(**{side: {} for side in sides})))
    assert longest.workload in console.file.getvalue()


def test_a_folder_that_is_no_environment_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(environment.SetupError, match="is not an environment"):
        environment.ensure(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_every_requirement_of_the_peers_is_pinned_once():
    lines = environment.REQUIREMENTS.read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins)
    assert len({name for name, _ in pins}) == len(pins)
    assert {"vllm", "sglang", "torch"} <= {name for name, _ in pins}


def bench(*arguments):
    done = subprocess.run(  # noqa: S603 - our own command line
        [sys.executable, FOLDER / "main.py", "--json", "--rounds=1", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_our_side_runs_without_the_peers(tmp_path):
    names = ["admit_cached", "finish", "decode_step"]
    env = tmp_path / "absent"
    result = bench("--sides", "raykv", "--runs=3", f"--env={env}", "--only", *names)
    assert not env.exists()
    expected = [getattr(managers, name)(1).workload for name in names]
    assert [each["workload"] for each in result["lines"]] == expected
    for each in result["lines"]:
        assert each["rows"]["raykv"]["num_runs"] == 3
        assert each["rows"]["raykv"]["median_us"] >= each["rows"]["raykv"]["min_us"] > 0


@pytest.mark.skipif(
    not environment.is_ready(ROOT / ".peers-venv"),
    reason="the peers are not installed: scripts/bench_peers --setup-only",
)
def test_every_workload_runs_on_every_side():
    result = bench("--runs=2")
    assert len(result["lines"]) == len(managers.WORKLOADS)
    for each in result["lines"]:
        assert {side: row["workload"] for side, row in each["rows"].items()} == dict.fromkeys(
            ("raykv", "vllm", "sglang"), each["workload"]
        )
