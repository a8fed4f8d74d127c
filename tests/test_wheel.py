"""The built wheel: what it holds, and that it works where the checkout cannot be seen."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
NOT_SOURCES = shutil.ignore_patterns(
    ".*", "__pycache__", "*.pyc", "*.egg-info", "build", "dist", "shared"
)

SMOKE = """
import sys
import raykv
from raykv import BlockManagerPool, PoolConfig, Sequence

with BlockManagerPool.local(PoolConfig(dp_size=2, num_blocks=9, block_size=4)) as pool:
    first, again = Sequence(range(9)), Sequence(range(9))
    assert pool.allocate(first)
    first.kv_state.num_computed_tokens = 9
    pool.deallocate(first)
    assert pool.allocate(again)
    assert again.kv_state.num_computed_tokens == 8, again.kv_state
    pool.deallocate(again)
    assert pool.num_used_blocks() == [0, 0]
    pool.check_integrity()
assert not {"ray", "torch", "transformers"} & sys.modules.keys()
print(raykv.__file__)
"""


def run(*command, cwd):
    done = subprocess.run(  # noqa: S603 - our own command line
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy: the checkout stays clean, and its leftovers stay out."""
    tmp = tmp_path_factory.mktemp("wheel")
    source = tmp / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_SOURCES)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp, cwd=source)
    (built,) = tmp.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return [PurePosixPath(name) for name in archive.namelist()]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python of a fresh environment: the wheel, and this one's packages except the checkout."""
    place = tmp_path_factory.mktemp("installed") / "env"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python,
        "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=place)  # fmt: skip
    # A path in a .pth file is searched last, and the .pth files in it (the checkout's) do not run.
    (site,) = place.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def test_its_top_level_is_raykv_alone(names):
    tops = {name.parts[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"raykv"}
    assert len(tops) == 2


def test_it_holds_every_file_of_the_package_once(names):
    package = ROOT / "raykv"
    sources = [
        path
        for folder in (package, package / "actors")  # rglob does not follow the link
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    expected = sorted(path.relative_to(ROOT).as_posix() for path in sources)
    assert sorted(str(name) for name in names if name.parts[0] == "raykv") == expected
    assert {"raykv/py.typed", "raykv/actors/__init__.py", "raykv/cli/main.py"} <= set(expected)
    assert any(name.startswith("raykv/cli/data/") for name in expected)


def test_its_actors_are_files_and_no_link(wheel):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            kind = member.external_attr >> 16 & 0o170000
            assert kind in {0, 0o100000}, f"{member.filename} is no plain file: {kind:o}"
        actors = archive.read("raykv/actors/__init__.py")
    assert actors == (ROOT / "actors" / "__init__.py").read_bytes()


def test_it_carries_licence_and_requirements(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    assert {f"Provides-Extra: {extra}" for extra in ("model", "serve", "cuda12", "cuda13")} <= set(
        text.splitlines()
    )


def test_a_pool_works_outside_the_checkout(installed, tmp_path):
    home = run(installed, "-W", "error", "-c", SMOKE, cwd=tmp_path).strip()
    assert Path(home).is_relative_to(installed.parents[1])


def test_its_actors_import_outside_the_checkout(installed, tmp_path):
    home = run(installed, "-c", "import raykv.actors as a; print(a.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(installed.parents[1])


def test_its_command_works_outside_the_checkout(installed, tmp_path):
    command = installed.with_name("raykv")
    assert "demo" in run(command, "--help", cwd=tmp_path)
    assert "--quick" in run(command, "demo", "--help", cwd=tmp_path)
