"""``raykv bench linear``: what it prints; what it measures is tested in tests/bench."""

import json

import pytest

from raykv.cli.main import run


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"input_length": 700, "output_length": 20, "hash_ids": [0, 1 + number % 3]}
        for number in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.json"
    turns = [[{"text": "hello " * 20}]] * 4
    path.write_text(json.dumps({str(number): {"messages": turns} for number in range(3)}))
    return path


def test_each_part_and_the_picture(trace, chats, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "hits.png"
    files = ["--trace", str(trace), "--chats", str(chats), "--plot", str(plot)]
    assert run(["bench", "linear", "--quick", "--json", *files, "--visits", "9"]) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    assert result.keys() == {"machine", "ops", "hits", "ttft"}
    assert [json.loads(line) for line in lines] == result["ops"] + result["hits"] + result["ttft"]
    assert {(row["workload"], row["num_visits"]) for row in result["hits"]} == {
        ("trace", 9),
        ("chats", 6),
    }
    assert all(0 <= row["hit_rate"] <= 1 for row in result["hits"])
    assert {row["level"] for row in result["ops"]} == {"LinearStatePrefixCache", "RankKV"}
    assert [row["num_prefix_tokens"] for row in result["ttft"]] == [64, 128]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_tables_for_people_and_made_up_conversations(capsys):
    assert run(["bench", "linear", "--quick", "--only", "hits"]) == 0
    captured = capsys.readouterr()
    *text, last = captured.out.strip().splitlines()
    assert {row["workload"] for row in json.loads(last)["hits"]} == {"made up"}
    assert any("K and V alone" in line for line in text)
    assert "hit rate" in captured.err


def test_only_some_parts(capsys):
    assert run(["bench", "linear", "--quick", "--only", "ops"]) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]).keys() == {"machine", "ops"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "nonsense"],
        ["--only", "ops", "--plot", "x.png"],
        ["--trace", "/no/such/trace"],
        ["--chats", "/no/such/chats"],
        ["--visits", "0"],
    ],
)
def test_bad_input_is_one_line(arguments, capsys):
    assert run(["bench", "linear", "--quick", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
