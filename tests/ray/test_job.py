"""scripts/job.py on a cluster: submitted as README.md prints it, and on a pool that runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from raykv import SamplingParams
from raykv.cli import main

from .conftest import session_processes, wait_until

ROOT = Path(__file__).parents[2]
START_S, JOB_S = 60, 150


@pytest.fixture(scope="module")
def spoken_model(tiny_model, tmp_path_factory):
    """The small model with a tokenizer of words, w0 to w127, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - seconds
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("spoken") / "model"
    shutil.copytree(tiny_model, folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))  # noqa: S106 - a word
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")  # noqa: S106
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkout(spoken_model, tmp_path_factory):
    """The project as a clone has it, but serving the small model, beside heavy things."""
    folder = tmp_path_factory.mktemp("checkout") / "raykv"
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(  # noqa: S603 - git
        command, cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # deleted, but not committed yet
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    path = folder / "configs" / "local.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"]["path"] = spoken_model
    path.write_text(yaml.safe_dump(config))
    for name in (".venv", ".peers-venv", ".mypy_cache", ".git"):
        (folder / name).mkdir()
        (folder / name / "heavy").write_bytes(os.urandom(2**20))
    return folder


@pytest.fixture
def head():
    """A Ray head with its jobs server in processes of its own, its folder, and how to find it."""
    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    names = (
        "port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port",
    )  # fmt: skip
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env.pop("PYTHONPATH", None)  # raykv comes with the job
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    options = (
        "--head", "--block", "--num-cpus=4", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}",
        "--dashboard-host=127.0.0.1", "--object-store-memory=100000000", "--disable-usage-stats",
        *(f"--{name}={port}" for name, port in ports.items()),
    )  # fmt: skip
    log = Path(folder) / "start.log"
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - Ray
            ["ray", "start", *options],  # noqa: S607 - of the environment under test
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    env["RAY_ADDRESS"] = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        deadline = time.monotonic() + START_S
        while not answers(env["RAY_ADDRESS"]):
            text = log.read_text()
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.2)
        yield SimpleNamespace(env=env, folder=Path(folder))
    finally:
        process.terminate()  # it ends all that it started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for pid, _ in session_processes(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def answers(address):
    try:
        urllib.request.urlopen(f"{address}/api/version", timeout=5)  # noqa: S310 - our own head
    except urllib.error.HTTPError:
        return True  # it wants the token
    except OSError:
        return False
    return True


def printed_command():
    """The command that README.md prints for a Ray job."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    [command] = re.findall(r"^\$ (ray job submit .*)$", text, re.MULTILINE)
    return command


def read(path):
    return {entry["id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


def test_the_command_in_the_readme_serves_prompts_and_is_resumed(head, checkout):
    prompts = [
        {"id": "text", "prompt": "w5 w6 w7", "max_tokens": 3},
        {"id": "chat", "messages": [{"role": "user", "content": "w9"}]},
        {"token_ids": [1, 2, 3], "max_tokens": 4},
        {"id": "long", "token_ids": list(range(100)), "max_tokens": 5},
    ]
    (checkout / "prompts.jsonl").write_text("".join(f"{json.dumps(p)}\n" for p in prompts))
    output = checkout / "outputs.jsonl"
    output.write_text('{"id": "long", "text": "of an earlier run"}\n{"id": "text", "te')
    done = subprocess.run(  # noqa: S603 - as printed
        ["bash", "-c", printed_command()],  # noqa: S607
        cwd=checkout,
        env=head.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=JOB_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "4/4 done" in done.stdout
    assert "1 lines have their output, 18 bytes of a torn last line were cut off" in done.stdout
    found = read(output)
    assert next(iter(found)) == "long", "what was there stays where it was"
    assert found.keys() == {"long", "text", "chat", 3}
    assert found["long"]["text"] == "of an earlier run"
    assert found["text"]["text"].split() == [f"w{token}" for token in found["text"]["token_ids"]]
    assert found["text"]["num_prompt_tokens"] == 3
    assert found["chat"]["num_prompt_tokens"] == 3, "w1 w9 w2"
    assert [len(found[key]["token_ids"]) for key in ("text", 3)] == [3, 4]
    # What was uploaded: the project with its link, and nothing heavy.
    [copy] = head.folder.glob("session_latest/runtime_resources/working_dir_files/*/")
    assert (copy / "raykv" / "actors" / "launch.py").is_file()
    assert not list(copy.rglob("heavy"))
    assert sum(path.stat().st_size for path in copy.rglob("*") if path.is_file()) < 4 * 2**20


def test_a_job_uses_a_pool_that_runs_and_leaves_it_running(make_pool, spoken_model, tmp_path):
    pool = make_pool(dp_size=2, num_blocks=200, model={"path": spoken_model}, name="served")
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text('{"token_ids": [1, 2, 3]}\n{"prompt": "w4 w5"}\n')
    app = runpy.run_path(str(ROOT / "scripts" / "job.py"))["app"]
    arguments = ["--input", str(source), "--output", str(output), "--max-tokens", "6"]
    assert main.run([*arguments, "--attach", "served"], app) == 0
    expected = pool.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=6))
    found = read(output)
    assert [found[i + 1]["token_ids"] for i in range(2)] == [list(e.token_ids) for e in expected]
    wait_until(lambda: pool.num_used_blocks() == [0, 0])
    pool.check_integrity()


def test_an_unknown_pool_is_bad_input(cluster, tmp_path, capsys):
    (tmp_path / "in").write_text('{"token_ids": [1]}\n')
    app = runpy.run_path(str(ROOT / "scripts" / "job.py"))["app"]
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert main.run([*arguments, "--attach", "nobody", "--namespace", "none"], app) == 2
    assert "no pool 'nobody' in Ray namespace 'none'" in capsys.readouterr().err
