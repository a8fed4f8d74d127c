"""Prompts from a file, outputs to a file, and the script around it."""

import contextlib
import io
import os
import runpy
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from raykv import BlockManagerPool, PoolConfig, SamplingParams
from raykv.cli import job, main
from raykv.cli.console import Steps
from raykv.cli.job import JobOptions, run_job
from raykv.cli.job_output import OutputFile
from raykv.errors import RankUnavailableError

from .json_lines import read, write
from .pair_tokenizer import PairTokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "job.py"
DEFAULTS = {"max_tokens": 4, "temperature": 0.0, "seed": None}


# -- the job ---------------------------------------------------------------------------------------


@pytest.fixture
def pool(tiny_folder, monkeypatch):
    """A pool in this process in place of what the command line asks for."""
    config = PoolConfig(num_blocks=400, block_size=4, dp_size=2, model={"path": str(tiny_folder)})
    with BlockManagerPool.local(config) as pool:
        pool._tokenizer = PairTokenizer()
        monkeypatch.setattr(job, "_open_pool", lambda *_: contextlib.nullcontext(pool))
        yield pool
        assert pool.num_used_blocks() == [0, 0]
        pool.check_integrity()


@pytest.fixture
def command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["job.py"])
    app = runpy.run_path(str(SCRIPT))["app"]

    def run_command(*arguments):
        status = main.run([str(each) for each in arguments], app, "job.py")
        return status, *capsys.readouterr()

    return run_command


def run(source, output, **options):
    """Whether every line got its output, and what was said."""
    console = Console(file=io.StringIO(), width=200)
    with Steps(console) as steps:
        done = run_job(JobOptions(source, output, defaults=DEFAULTS, **options), steps)
    return done, console.file.getvalue()


def test_every_line_gets_the_output_that_the_pool_gives(pool, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    source = write(
        tmp_path / "in",
        {"prompt": "the tone"},
        {"id": "c", "messages": messages, "max_tokens": 2},
        {"id": "t", "token_ids": [3, 4, 5], "logprobs": 2},
    )
    assert run(source, tmp_path / "out")[0]
    found = {entry["id"]: entry for entry in read(tmp_path / "out")}
    assert found.keys() == {1, "c", "t"}
    [expected] = pool.generate("the tone", SamplingParams(max_tokens=4))
    assert found[1]["token_ids"] == list(expected.token_ids)
    assert found[1]["text"] == expected.text
    assert found[1]["stop_reason"] == "length"
    assert found[1]["num_prompt_tokens"] == len(
        pool.tokenizer.encode("the tone", add_special_tokens=False)
    )
    assert found[1]["num_cached_tokens"] == 0
    assert found[1]["dp_rank"] in {0, 1}
    assert len(found["c"]["token_ids"]) == 2
    assert "text" not in found["t"], "who speaks in tokens is answered in tokens"
    assert len(found["t"]["log_probs"]) == len(found["t"]["top_log_probs"]) == 4


def test_bad_lines_are_reported_and_tried_again(pool, tmp_path):
    lines = [
        {"id": "a", "prompt": "the"},
        "nonsense",
        {"id": "a", "prompt": "twice"},
        {"id": "v", "token_ids": [500]},
        {"id": "e", "token_ids": []},
        {"id": "z", "prompt": "a", "temperature": -1},
        {"id": "b", "prompt": "on"},
    ]
    source, output = write(tmp_path / "in", *lines), tmp_path / "out"
    done, said = run(source, output)
    assert not done
    assert "7/7 done, 5 failed" in said
    entries = read(output)
    assert {entry["line"] for entry in entries if "error" in entry} == {2, 3, 4, 5, 6}
    assert {entry["id"] for entry in entries if "text" in entry} == {"a", "b"}
    again, said = run(source, output)
    assert not again
    assert "2 lines have their output, 5 lines with an error are tried again" in said
    assert sorted(map(str, read(output))) == sorted(map(str, entries))
    write(source, lines[0], {"id": "n", "prompt": "new"}, lines[-1])
    assert run(source, output)[0]
    assert [entry["id"] for entry in read(output)[2:]] == ["n"]


def test_a_job_that_is_done_needs_no_pool(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_open_pool", lambda *_: 1 // 0)
    source, output = write(tmp_path / "in", {"prompt": "a"}), tmp_path / "out"
    output.write_text('{"id": 1, "text": "b"}\n')
    assert run(source, output)[0]
    assert output.read_text() == '{"id": 1, "text": "b"}\n'


def test_no_more_prompts_than_wanted_are_under_way_and_order_is_that_of_completion(pool, tmp_path):
    lines = [{"id": 0, "token_ids": [1, 2], "max_tokens": 60, "ignore_eos": True}]
    lines += [{"id": i, "token_ids": [1, 2, i], "ignore_eos": True} for i in range(1, 6)]
    most, start = 0, pool.generations.start

    def watch(batch):
        nonlocal most
        start(batch)
        most = max(most, sum(map(len, pool.generations._pending)))

    pool.generations.start = watch
    assert run(write(tmp_path / "in", *lines), tmp_path / "out", concurrency=2)[0]
    assert most == 2
    assert [entry["id"] for entry in read(tmp_path / "out")][-1] == 0


def test_an_interruption_keeps_what_is_done_and_gives_all_back(pool, tmp_path, monkeypatch):
    lines = [{"token_ids": [1, 2, i], "ignore_eos": True} for i in range(20)]
    lines[3] |= {"max_tokens": 1500}
    source, output = write(tmp_path / "in", *lines), tmp_path / "out"
    count, record = 0, OutputFile.write

    def write_some(self, entry):
        nonlocal count
        count += 1
        record(self, entry)
        if count == 5:
            os.kill(os.getpid(), signal.SIGINT)  # as a terminal does

    monkeypatch.setattr(OutputFile, "write", write_some)
    with pytest.raises(KeyboardInterrupt):
        run(source, output, concurrency=4)
    monkeypatch.undo()
    assert 5 <= len(read(output)) < 19
    while pool.num_used_blocks() != [0, 0]:  # the interrupted ones are given up behind its back
        time.sleep(0.02)
    monkeypatch.setattr(job, "_open_pool", lambda *_: contextlib.nullcontext(pool))
    write(source, *lines[:3], {"token_ids": [9]}, *lines[4:])
    assert run(source, output)[0]
    assert sorted(entry["id"] for entry in read(output)) == list(range(1, 21))


def test_a_lost_pool_ends_the_job_and_a_lost_rank_only_its_lines(
    command, pool, tmp_path, monkeypatch
):
    source, output = write(tmp_path / "in", {"prompt": "a"}, {"prompt": "b"}), tmp_path / "out"
    is_lost = False

    async def fail(*_, **__):
        raise RankUnavailableError("rank 0 is gone")

    monkeypatch.setattr(job._Job, "_is_hopeless", lambda _: is_lost)
    monkeypatch.setattr(type(pool.aio), "generate", fail)
    assert not run(source, output)[0]
    assert [entry["error"] for entry in read(output)] == ["rank 0 is gone"] * 2
    is_lost = True
    status, _, err = command("--input", source, "--output", output, "--config", "x")
    assert status == 1, "nothing was wrong with the arguments"
    assert err.splitlines()[-1] == "job.py: rank 0 is gone"
    assert read(output) == []


def test_without_a_terminal_progress_is_a_line_now_and_then(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_LINE_S", 0.01)
    line = {"token_ids": [1, 2], "max_tokens": 200, "ignore_eos": True}
    said = run(write(tmp_path / "in", line), tmp_path / "out")[1].splitlines()
    assert said[0].startswith("0/1 done, ")
    assert "1/1 done, " in said[-1]
    assert "tokens/s, hit rate 0.0%" in said[-1]


# -- the script ------------------------------------------------------------------------------------


def test_the_script_ends_with_1_if_a_line_failed(command, pool, tmp_path):
    source = write(tmp_path / "in", {"prompt": "a"})
    files = ("--input", source, "--output", tmp_path / "out", "--config", "x")
    status, out, _ = command(*files, "--max-tokens", 3)
    assert (status, out) == (0, "")
    assert len(read(tmp_path / "out")[0]["token_ids"]) == 3
    write(source, {"prompt": "a"}, "nonsense")
    assert command(*files)[:2] == (1, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--input"]),
        (["--config", "x", "--attach", "y"], ["--config", "--attach"]),
        (["--input", "{in}", "--output", "{out}"], ["--config", "--attach"]),
        (["--namespace", "n", "--config", "x"], ["--namespace", "--attach"]),
        (["--config", "x", "--concurrency", "0"], ["--concurrency", "1"]),
        (["--config", "x", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["--config", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["--config", "/no/such/file"], ["/no/such/file"]),
        (["--config", "x", "--input", "/no/such/file"], ["/no/such/file"]),
        (["--config", "x", "--input", "/dev/null"], ["/dev/null", "no file"]),
        (["--config", "x", "--input", "{empty}"], ["empty"]),
        (["--config", "x", "--output", "{in}"], ["same file"]),
        (["--config", "x", "--output", "/no/such/folder/out"], ["/no/such/folder/out"]),
        (["--attach", "nobody"], ["connected to no Ray"]),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(command, tmp_path, monkeypatch, arguments, words):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    source = write(tmp_path / "in", {"prompt": "a"})
    if arguments:
        arguments = ["--input", "{in}", "--output", "{out}", *arguments]
    names = {"{in}": source, "{out}": tmp_path / "out", "{empty}": write(tmp_path / "empty")}
    status, out, err = command(*(names.get(each, each) for each in arguments))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1, err
    assert err.startswith("job.py: ")
    assert all(word in err for word in words), err


def test_in_a_ray_job_the_output_must_outlive_the_working_directory(command, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", {"prompt": "a"})
    status, _, err = command("--input", "in", "--output", "out", "--config", "x")
    assert status == 2
    assert "absolute path" in err
    assert os.listdir(tmp_path) == ["in"]  # noqa: PTH208
