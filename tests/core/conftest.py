"""What the core's tests share."""

from __future__ import annotations

import pytest

from raykv.core import BlockManagerImpl, ConcurrentBlockManagerImpl


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
