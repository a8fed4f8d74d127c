"""A job's output: continued after an interruption, never mixed with what others wrote."""

import resource
from pathlib import Path

import pytest

from raykv.cli.job_output import OutputFile
from raykv.errors import ConfigError

from .json_lines import read


def test_an_output_is_continued_without_torn_line_and_errors(tmp_path):
    path = tmp_path / "out"
    with OutputFile(path) as output:
        output.write({"id": 1, "text": "é\u2028"})
        output.write({"id": "a", "error": "no"})
        output.write({"id": "1", "text": ""})
    whole = path.read_bytes()
    path.chmod(0o640)
    for torn in (b'{"i', b'{"id": 3, "text": "ha'):
        path.write_bytes(whole + torn)
        with OutputFile(path) as output:
            assert output.done == {"1", '"1"'}
            assert (output.num_torn_bytes, output.num_dropped) == (len(torn), 1)
            output.write({"id": 4})
        assert [entry["id"] for entry in read(path)] == [1, "1", 4]
        assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "content", [b"my diary", b"[1]\n", b'{"prompt": "a"}\n', b'{"id": 1}\nmine\n', b'{"x": 1}']
)
def test_a_file_that_holds_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"something else at line [12]"):
        OutputFile(path)
    assert path.read_bytes() == content


def test_one_job_at_a_time_writes_an_output(tmp_path):
    path = tmp_path / "out"
    with OutputFile(path) as first:
        first.write({"id": 1, "error": "no"})
        with pytest.raises(ConfigError, match="in use by another job"):
            OutputFile(path)
    with OutputFile(path), pytest.raises(ConfigError, match="in use"):  # replaced in between
        OutputFile(path)
    OutputFile(path).__exit__(None, None, None)


def test_an_output_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        OutputFile(tmp_path / "no" / "out")
    with pytest.raises(ConfigError, match="no file"):
        OutputFile(Path("/dev/full"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OutputFile(tmp_path / "out") as output:
        output.write({"id": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))  # in place of a full disk
        try:
            with pytest.raises(ConfigError, match=r"cannot write .*free the disk"):
                output.write({"id": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
