"""Host tiers of two nodes: what one computed serves the other, and the copy is chosen."""

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

import pytest

from .conftest import session_processes, wait_until

SCRIPT = Path(__file__).with_name("two_tiers.py")
BOUND_S = 200


@pytest.mark.parametrize("transport", ["tcp", "object_store"])
def test_kv_of_one_node_serves_the_other(tiny_model, transport):
    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    process = subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, SCRIPT, tiny_model, folder, transport],
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
    assert found["equal"], found
    # All full blocks, with one token left to compute; of the other prompt 22 blocks are the same.
    assert found["cached"] == [0, 396, 88], found
    assert found["from_host"] == 396, found
    assert found["num_tiers"] == 2
    assert found["pinned"] == [0, 0]
