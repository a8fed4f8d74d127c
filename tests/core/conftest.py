"""What the core's tests share. Nightly tests are skipped, visibly, unless ``-m`` asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raykv.core import BlockManagerImpl, ConcurrentBlockManagerImpl

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    if "nightly" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="long: run with -m nightly")
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("nightly"):
            item.add_marker(skip)


@pytest.fixture(params=[BlockManagerImpl, ConcurrentBlockManagerImpl])
def make_manager(request):
    """Makes managers whose books are checked when the test is over."""
    made = []

    def make(*args, **kwargs):
        made.append(request.param(*args, **kwargs))
        return made[-1]

    yield make
    for manager in made:
        manager.check_integrity()
