import os
import subprocess
import sys
from pathlib import Path

import pytest

from raykv.cli import main

REPOSITORY = Path(__file__).parents[2]


def run(capsys, *arguments):
    """Exit status, stdout, stderr."""
    status = main.run(list(arguments))
    output = capsys.readouterr()
    return status, output.out, output.err


def assert_refused(result, *words):
    """One clear line on stderr, nothing on stdout, status 2."""
    status, out, err = result
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("done")]
    assert len(lines) == 1, err
    assert lines[0].startswith("raykv: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["demo", "model", "--version"]),
        (["--help"], ["demo", "model", "--version"]),
        (
            ["demo", "--help"],
            ["--quick", "--model", "--conversations", "--ranks", "--num-blocks", "--block-size",
             "--max-tokens", "--config", "--json", "--profile", "JSON", "exit status"],
        ),
        (["model"], ["pull"]),
        (["model", "--help"], ["pull"]),
        (["model", "pull", "--help"], ["NAME", "smollm2", "folder"]),
    ],
)  # fmt: skip
def test_help(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    for word in words:
        assert word.lower() in out.lower()


def test_version(capsys):
    assert run(capsys, "--version") == (0, "raykv 0.1.0\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--bogus"], ["--bogus"]),
        (["bogus"], ["bogus"]),
        (["demo", "--ranks", "many"], ["--ranks", "integer"]),
        (["demo", "--ranks", "0"], ["--ranks", "0"]),
        (["demo", "--block-size", "0"], ["--block-size", "0"]),
        (["demo", "--num-blocks", "1"], ["--num-blocks", "1"]),
        (["demo", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["demo", "--model", "/no/such/folder"], ["/no/such/folder", "smollm2"]),
        (["demo", "--profile", "--model", "/no/such/folder"], ["/no/such/folder"]),
        (["demo", "--conversations", "/no/such/file"], ["/no/such/file"]),
        (["demo", "--config", "/no/such/file"], ["/no/such/file"]),
        (["model", "pull", "gpt-17"], ["gpt-17", "smollm2"]),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    assert_refused(run(capsys, *arguments), *words)


def test_a_folder_that_is_no_model(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert_refused(run(capsys, "demo", "--model", str(tmp_path)), str(tmp_path), "weights")


def test_a_model_without_tokenizer(capsys, tiny_folder):
    assert_refused(run(capsys, "demo", "--model", str(tiny_folder)), "tokenizer", str(tiny_folder))


def test_a_bad_conversation_names_its_line(capsys, tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text('{"turns": ["hello"]}\n\n{"turns": []}\n')
    assert_refused(run(capsys, "demo", "--conversations", str(file)), f"{file}:3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_blocks: 64\nbogus: 1\n", ["bogus", "unknown setting"]),
        ("num_blocks: 64\nmemory: {dtype: bfloat16}\nmodel: {path: smollm2}\n", ["bfloat16"]),
    ],
)
def test_a_bad_configuration(capsys, tmp_path, text, words):
    file = tmp_path / "pool.yaml"
    file.write_text(text)
    assert_refused(run(capsys, "demo", "--config", str(file)), *words)


@pytest.mark.model
def test_a_pool_too_small_for_a_conversation(capsys):
    result = run(capsys, "demo", "--num-blocks", "10")
    assert_refused(result, "conversations.jsonl:1", "144", "--num-blocks")


def test_interruption_is_quiet(capsys, monkeypatch):
    monkeypatch.setattr("raykv.cli.settings.quiet_libraries", _interrupt)
    status, out, err = run(capsys, "demo")
    assert (status, out) == (130, "")
    assert not err.strip()


def test_a_bug_is_one_line_too(capsys, monkeypatch):
    monkeypatch.setattr("raykv.cli.settings.quiet_libraries", _stumble)
    status, out, err = run(capsys, "demo")
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "ZeroDivisionError: over easy" in err


def test_a_bug_raises_for_those_who_look_for_it(monkeypatch):
    monkeypatch.setattr("raykv.cli.settings.quiet_libraries", _stumble)
    monkeypatch.setenv("RAYKV_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main.run(["demo"])


def test_importing_loads_neither_torch_nor_ray():
    code = "import sys, raykv.cli.main; print({'torch', 'ray', 'transformers'} & {*sys.modules})"
    assert _python("-c", code).stdout == "set()\n"


def test_python_dash_m():
    result = _python("-m", "raykv", "demo", "--ranks", "0")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


def _python(*arguments):
    return subprocess.run(  # noqa: S603
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=os.environ,
        timeout=120,
    )


def _interrupt():
    raise KeyboardInterrupt


def _stumble():
    raise ZeroDivisionError("over easy")
