"""The peers' own environment: vLLM and SGLang as published, and what their managers import."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import venv
from collections import deque
from pathlib import Path

from rich.console import Console

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_STAMP = "bench_peers.stamp"


class SetupError(Exception):
    """The environment could not be made; the message says why and what to do."""


def key() -> str:
    """What an environment was made from."""
    text = platform.python_version().encode() + REQUIREMENTS.read_bytes()
    return hashlib.sha256(text).hexdigest()


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def is_ready(folder: Path) -> bool:
    """Whether nothing has to be installed."""
    stamp = folder / _STAMP
    return stamp.exists() and stamp.read_text() == key() and python_of(folder).exists()


def ensure(folder: Path) -> None:
    """Make the environment, or bring it up to date; does nothing if it is ready.

    Raises:
        SetupError: the folder holds something else, or pip failed.
    """
    if is_ready(folder):
        return
    if sys.version_info[:2] != (3, 11):
        raise SetupError(
            f"the peers' tested versions are for Python 3.11, this is {platform.python_version()}; "
            "run scripts/setup with PYTHON=/path/to/python3.11"
        )
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise SetupError(f"{folder} is not an environment; name another folder with --env")
    console = Console(stderr=True)
    console.print(f"bench_peers: installing vLLM and SGLang in {folder} (3.5 GB, minutes)")
    if not python_of(folder).exists():
        venv.create(folder, with_pip=True)
    (folder / ".gitignore").write_text("*\n")
    (folder / _STAMP).unlink(missing_ok=True)
    _install(folder, console)
    (folder / _STAMP).write_text(key())


def _install(folder: Path, console: Console) -> None:
    """Run pip, showing its current line; each package by its pin alone, without dependencies."""
    log = folder / "bench_peers.log"
    command = [python_of(folder), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--requirement", REQUIREMENTS]
    last: deque[str] = deque(maxlen=12)
    with (
        log.open("w") as copy,
        console.status("pip") as status,
        subprocess.Popen(  # noqa: S603 - our own command line
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            copy.write(line)
            last.append(line)
            status.update(line.strip()[:78].replace("[", "("))
    if pip.returncode:
        raise SetupError(
            f"pip failed:\n{''.join(last)}all of it: {log}\ncheck the network and the free disk, "
            "then run this again"
        )


def variables(root: Path) -> dict[str, str]:
    """What every side's process runs with: one thread, no GPU, no network, no build."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root),
        "PYTHONWARNINGS": "ignore",
        "SGLANG_RUST_BUILD_MODE": "never",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
    }
