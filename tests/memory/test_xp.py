"""The choice of the array module, with CuPy absent, broken, without a GPU, and usable."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from raykv.errors import ConfigError
from raykv.memory.xp import array_module, resolve_device


def run_python(code):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_needs_numpy_alone():
    code = (
        "import sys\n"
        "for name in ('torch', 'cupy', 'ray', 'pydantic', 'yaml'): sys.modules[name] = None\n"
        "import raykv.memory as m\n"
        "print(m.KVBuffers(m.KVSpec.uniform(1, 1, 1, 1, 'float32'), 2).device)\n"
    )
    assert run_python(code) == "cpu\n"


def test_importing_the_package_imports_no_array_library_but_numpy():
    code = "import sys, raykv.memory; print(sorted({'torch', 'cupy', 'ray'} & set(sys.modules)))"
    assert run_python(code) == "[]\n"


def test_cpu_never_asks_for_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert resolve_device("cpu") == "cpu"
    assert array_module("cpu") is np


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"not installed.*cuda12.*cuda13.*memory\.device: cpu"):
        resolve_device("cuda")
    with pytest.raises(ConfigError, match=r"cannot be imported.*memory\.device: cpu"):
        array_module("cuda")


def test_with_real_cupy_and_no_gpu():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if cupy.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"no CUDA device or driver.*memory\.device: cpu"):
        resolve_device("cuda")


def test_with_a_usable_gpu(fake_cupy):
    assert resolve_device("auto") == "cuda"
    assert resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"
    assert array_module("cuda") is fake_cupy


def raiser(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"cuda": SimpleNamespace(is_available=lambda: False)}, "no CUDA device or driver"),
        ({"cuda": SimpleNamespace(is_available=raiser(OSError("no lib")))}, "loaded.*no lib"),
        ({"cuda": SimpleNamespace()}, "cannot be loaded.*is_available"),
        ({"zeros": raiser(RuntimeError("driver too old"))}, "allocation.*driver too old"),
        ({"zeros": raiser(MemoryError("busy"))}, "allocation.*busy"),
    ],
)
def test_with_an_unusable_gpu(fake_cupy, fault, message):
    vars(fake_cupy).update(fault)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=message):
        resolve_device("cuda")


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError, match="'gpu': choose one of auto, cpu, cuda"):
        resolve_device("gpu")
    with pytest.raises(ConfigError, match="'auto', not cpu or cuda"):
        array_module("auto")
