"""README.md beside this file names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMED = sorted(
    set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (HERE / "README.md").read_text(encoding="utf-8")))
)


def test_it_names_many():
    assert len(NAMED) > 80


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_the_map_names_exists(path, name):
    text = (HERE / path).read_text(encoding="utf-8")
    assert not name or re.search(rf"^ *(async )?def {name}\(", text, re.MULTILINE)
