"""The script that checks a GPU machine, run as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raykv.errors import ConfigError
from raykv.memory import resolve_device

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"


def gpu_check(*args):
    return subprocess.run(  # noqa: S603 - our own script
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, check=False
    )


def assert_passed(done, device):
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["device"] == device
    assert report["checks"] == "passed"
    assert {"memcpy", "copy_blocks", "gather_blocks", "scatter_blocks"} == set(report["gb_per_s"])
    assert all(speed > 0 for speed in report["gb_per_s"].values())


def test_the_cpu_passes():
    pytest.importorskip("torch")
    assert_passed(gpu_check("--device", "cpu", "--pool-mib", "16"), "cpu")


def test_without_a_gpu_it_says_so_and_exits_2():
    if resolve_device("auto") == "cuda":
        pytest.skip("this machine has a GPU")
    done = gpu_check()
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("gpu_check: memory.device is cuda, but ")


@pytest.mark.gpu
def test_the_gpu_passes():
    try:
        resolve_device("cuda")
    except ConfigError as error:
        pytest.skip(f"no usable GPU: {error}")
    assert_passed(gpu_check("--pool-mib", "256"), "cuda")
