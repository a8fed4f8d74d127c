"""Processes killed while they write: what they had confirmed is there, and right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = Path(__file__).with_name("crash_rounds.py")


def crash(folder, seconds, *options):
    done = subprocess.run(  # noqa: S603 - our own command line
        [sys.executable, str(ROUNDS), str(folder), str(seconds), "1", *options],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_was_confirmed_before_a_kill_is_there_and_right(tmp_path):
    result = crash(tmp_path, 6)
    assert result["rounds"] >= 5
    assert result["confirmed"] > 0
    assert result["lost"] == 0


def test_the_test_finds_what_was_confirmed_too_early(tmp_path):
    assert crash(tmp_path, 3, "--lie")["lost"] > 0


@pytest.mark.nightly
def test_many_more_kills(tmp_path):
    result = crash(tmp_path, 120)
    assert result["torn"] > 0
    assert result["lost"] == 0
