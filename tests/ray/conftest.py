"""A local Ray for these tests, and a small model for ranks to load."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray

from raykv import PoolConfig
from raykv.actors import launch

SETTINGS = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8}


@pytest.fixture(scope="package")
def cluster():
    """A local Ray. Its directory has a short name, for sockets lie in it."""
    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    (Path(folder) / "faults").mkdir()
    with pytest.MonkeyPatch.context() as patch:  # what the workers inherit
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "plugins"), prepend=os.pathsep)
        patch.setenv("RAYKV_TEST_FAULTS", str(Path(folder) / "faults"))
        start_ray(folder)
    yield folder
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def start_ray(folder):
    ray.init(
        address="local",
        num_cpus=6,
        num_gpus=0,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )


@pytest.fixture
def faults(cluster):
    """A folder in which orders are left for ``plugins/faulty_policy.py``."""
    folder = Path(cluster) / "faults"
    yield folder
    for order in folder.iterdir():
        order.unlink()


@pytest.fixture
def make_pool(cluster):
    """Launches pools, closes them, and sees that they are gone with all they reserved."""
    with contextlib.ExitStack() as stack:

        def make(**settings):
            options = {
                key: settings.pop(key) for key in ("name", "placement_group") if key in settings
            }
            return stack.enter_context(launch(PoolConfig(**SETTINGS | settings), **options))

        yield make
    assert rank_processes() == []
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Llama on disk, without tokenizer."""
    import torch  # noqa: PLC0415 - seconds, for those who need it
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.15,
    )
    folder = tmp_path_factory.mktemp("tiny")
    with torch.random.fork_rng():
        torch.manual_seed(20)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def rank_processes():
    """Processes of rank actors that this process's Ray runs."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"RankActor" in (entry / "cmdline").read_bytes():
                parents = []
                pid = int(entry.name)
                while pid > 1:
                    parents.append(pid)
                    pid = int((Path("/proc") / str(pid) / "stat").read_text().split()[-49])
                if os.getpid() in parents:
                    found.append(int(entry.name))
    return found


def wait_until(holds, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def run_python(source, **kwargs):
    """A script in a process of its own, in a process group of its own."""
    return subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
        **kwargs,
    )


def session_processes(session):
    """Living processes of a session: what a script started, unless it broke away."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append((int(entry.name), (entry / "cmdline").read_bytes()))
    return found


def run_cluster(script, model, *arguments, bound_s):
    """Run a script that makes a cluster of its own; what its last line says, once all is gone."""
    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    process = subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, script, model, folder, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
    )
    try:
        out, err = process.communicate(timeout=bound_s)
        assert process.returncode == 0, err
        wait_until(lambda: session_processes(process.pid) == [])
    finally:
        for pid, _ in session_processes(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    return json.loads(out.splitlines()[-1])
