"""``raykv bench tiers``: what it prints; what it measures is tested in tests/bench."""

import json

import pytest

from raykv.bench import tier_ttft
from raykv.cli.main import run

SIZES = tier_ttft.Sizes(4, 64, 8, 4, 1)


@pytest.fixture(autouse=True)
def _small(monkeypatch, tiny_folder):
    monkeypatch.setattr(tier_ttft, "QUICK", SIZES)
    monkeypatch.setattr(tier_ttft, "MODEL", str(tiny_folder))


def test_each_part_and_the_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "tiers.png"
    assert run(["bench", "tiers", "--quick", "--json", "--plot", str(plot)]) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    assert result.keys() == {"machine", "copies", "costs", "messages", "ttft"}
    told = result["copies"] + result["costs"] + result["messages"] + result["ttft"]
    assert [json.loads(line) for line in lines] == told
    assert {row["batch_mib"] for row in result["copies"]} == {1, 4}
    assert [row["variant"] for row in result["ttft"]][:2] == ["device only", "host memory"]
    assert all(row["outputs_equal"] for row in result["ttft"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_tables_for_people(capsys):
    assert run(["bench", "tiers", "--quick"]) == 0
    captured = capsys.readouterr()
    for words in (
        "plain copy",
        "owns the rank",
        "rank to tier",
        "host memory",
        "answers are equal",
    ):
        assert words in captured.out
    assert "variant device only" in captured.err


def test_answers_that_differ_are_status_1(monkeypatch, capsys):
    monkeypatch.setattr(tier_ttft, "_tokens", id)  # no two variants' answers are the same object
    assert run(["bench", "tiers", "--quick", "--only", "ttft"]) == 1
    assert "ANSWERS DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "nonsense"],
        ["--only", "ttft", "--plot", "x.png"],
        ["--only", "copies", "--only", "costs", "--plot", "x.png"],
    ],
)
def test_bad_input_is_one_line(arguments, capsys):
    assert run(["bench", "tiers", "--quick", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
