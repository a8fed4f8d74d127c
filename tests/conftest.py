"""What all tests share: how hard Hypothesis works, here and at night.

Nightly tests are left out by pyproject.toml's ``-m 'not nightly'``. Run them, with more examples:
``scripts/test -m nightly --hypothesis-profile=nightly``. A test's own settings win over a profile.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Time on a busy box says nothing about a test, so neither deadlines nor slow data fail one.
settings.register_profile(
    "ci", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("ci"), max_examples=2000)
settings.load_profile("ci")
