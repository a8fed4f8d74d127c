"""The project itself: what importing costs, what every file keeps to, what must exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import raykv

ROOT = Path(__file__).parents[1]
HEAVY = ("ray", "torch", "transformers", "cupy")

# Over 400 lines, each with its reason.
LONG_FILES = {
    "tests/core/test_block_manager.py": "all of a manager's contract, shared by two classes",
    "tests/core/test_state_machine.py": "one machine, whose rules lean on one another",
    "tests/engine/test_engine.py": "all that an engine promises its users, on one toy model",
    "tests/core/test_explain.py": "each reason on each kind of neighbour, over one set of prompts",
    "tests/engine/test_samples.py": "forked samples through engine, pool and model",
    "tests/rank/test_fork.py": "one simulated memory, and all orders of what may happen to it",
    "tests/engine/test_scheduler.py": "admission, chunks and growth, over one set of fakes",
    "tests/pool/test_conformance.py": "one suite, run over every kind of rank",
    "tests/pool/test_faults_machine.py": "one machine, whose rules lean on one another",
    "tests/rank/test_rank.py": "all that a rank promises, over one set of configurations",
}


def run(*command, cwd=ROOT, stdin="", status=0):
    done = subprocess.run(  # noqa: S603 - our own command line
        [str(part) for part in command],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def project_files():
    """All files that git knows or would add."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in files if path.is_file() and not path.is_symlink()]


# -- importing -------------------------------------------------------------------------------------


def loaded_by(code):
    """Which of the heavy packages a fresh interpreter holds after running the code."""
    return run(
        sys.executable,
        "-c",
        f"import sys\n{code}\nprint(*[name for name in {HEAVY} if name in sys.modules])",
    ).split()


@pytest.mark.parametrize(
    "code",
    [
        "import raykv",
        "from raykv import *",  # every public name: the actors alone know Ray
        "import raykv.cli.main",  # so that --help is quick
        "import raykv.testing",
    ],
)
def test_importing_is_light(code):
    assert loaded_by(code) == []


def test_the_light_import_test_can_fail():
    assert loaded_by("import ray") == ["ray"]


@pytest.mark.parametrize("name", raykv.__all__)
def test_every_public_name_is_there(name):
    assert getattr(raykv, name).__name__ == name
    assert name in dir(raykv)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = raykv.nonsense


# -- actors ----------------------------------------------------------------------------------------


def test_raykv_actors_is_a_link_to_actors():
    link = ROOT / "raykv" / "actors"
    assert link.is_symlink()
    assert link.readlink() == Path("../actors")
    assert "actors" in run(sys.executable, "-c", "import raykv.actors as a; print(a.__file__)")


@pytest.mark.parametrize(
    "statement", ["import actors", "import actors.launch", "from actors import launch"]
)
def test_importing_actors_directly_is_banned(statement):
    ruff = (sys.executable, "-m", "ruff", "check", "--select=TID", "--stdin-filename=x.py", "-")
    assert "TID251" in run(*ruff, stdin=f"{statement}\n", status=1)
    run(*ruff, stdin=f"{statement.replace('actors', 'raykv.actors', 1)}\n")


# -- every file ------------------------------------------------------------------------------------

# Written so that they do not match themselves.
FORBIDDEN = re.compile(
    r"pypi[.]org|pythonhosted[.]|download[.]pytorch[.]|(?:deb|registry)[.](?:debian|npmjs)[.]"
    r"|(?<![\w.])/(?:[w]ork|[h]ome|[r]oot|[o]pt/wheels|[o]pt/pypi)/"
)


def test_no_file_names_a_package_host_or_a_path_of_this_machine():
    found = []
    for path in project_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {hit[0]}" for hit in FORBIDDEN.finditer(text)]
    assert found == []


@pytest.mark.parametrize("text", ["https://pypi." + "org/simple", "cd /wor" + "k/main"])
def test_the_search_for_hosts_and_paths_can_fail(text):
    assert FORBIDDEN.search(text)


def test_every_python_file_is_short_or_has_its_reason():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in project_files()
        if path.suffix == ".py"
    }
    long_files = {name for name, lines in lengths.items() if lines > 400}
    assert sorted(long_files - LONG_FILES.keys()) == []


def test_every_script_is_executable_and_says_what_it_does():
    scripts = [ROOT / ".ci" / "run", *(path for path in project_files() if is_script(path))]
    assert {"setup", "run", "test", "check"} <= {path.name for path in scripts}
    for path in scripts:
        assert os.access(path, os.X_OK), f"{path} is not executable"
        shebang, second, *_ = path.read_text(encoding="utf-8").splitlines()
        assert shebang.startswith("#!/usr/bin/env ")
        assert second.startswith(("# ", '"""')), f"{path} does not say what it does"


def is_script(path):
    return path.parent == ROOT / "scripts" and not path.suffix


@pytest.mark.parametrize("script", ["setup", "check"])
def test_a_script_without_arguments_takes_none(script):
    assert f"Usage: scripts/{script}" in run(ROOT / "scripts" / script, "--help")
    assert f"Usage: scripts/{script}" in run(ROOT / "scripts" / script, "--nonsense", status=2)


# -- metadata and documents ------------------------------------------------------------------------


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_said_once_more_and_alike():
    assert pyproject()["project"]["version"] == raykv.__version__


def test_every_requirement_has_its_tested_version():
    project = pyproject()["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned)
    assert pinned == sorted(pinned, key=lambda line: line.split("==")[0].lower())
    names = {normal(line) for line in pinned}
    assert {normal(each) for each in wanted} <= names


def normal(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert pyproject()["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_the_document_exists_and_its_links_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    assert [target for target in targets if not (ROOT / target).exists()] == []


def readme_example():
    """The first Python block below a heading that says "example"."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(
        r"^#+[^\n]*example.*?^```python\n(.*?)^```",
        readme,
        re.IGNORECASE | re.DOTALL | re.MULTILINE,
    )
    assert found, "README.md has no ```python block below a heading with the word example"
    return found[1]


@pytest.mark.model
def test_the_readme_example_runs_as_printed(tmp_path):
    run(sys.executable, "-c", readme_example(), cwd=tmp_path)


def test_the_readme_example_has_ten_lines():
    code = [line for line in readme_example().splitlines() if re.match(r"\s*[^#\s]", line)]
    assert len(code) <= 10
