"""The Python scripts start: what they import and define at the top still fits the library."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.mark.parametrize("name", ["bench_engine", "gpu_check"])
def test_a_script_says_how_to_use_it(name):
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, SCRIPTS / name, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout
