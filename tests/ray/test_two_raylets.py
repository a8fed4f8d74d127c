"""Ranks on two nodes: one node goes, and another one takes over its rank."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from .conftest import session_processes, wait_until

SCRIPT = Path(__file__).with_name("two_raylets.py")
BOUND_S = 240


def test_a_rank_and_a_node_may_go_and_a_new_node_takes_the_rank_over(tiny_model):
    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    process = subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, SCRIPT, tiny_model, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
    )
    try:
        out, err = process.communicate(timeout=BOUND_S)
        assert process.returncode == 0, err
        wait_until(lambda: session_processes(process.pid) == [])
    finally:
        for pid, _ in session_processes(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    found = json.loads(out.splitlines()[-1])
    far = found.pop("far")
    near = 1 - far
    went_on = {
        "outputs": [near], "failed_over": [1], "near_failed_over": [0], "sequence_went_to": near,
    }  # fmt: skip
    assert found == {
        "local": [0, 1],
        "killed": went_on,
        "restarted": [far],
        "removed": went_on,
        "alone": [near],
        "far_is_lost": True,
        "moved": [far],
        "moved_to_the_new_node": True,
        "used_blocks": [0, 0],
    }
