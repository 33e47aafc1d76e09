"""Hypothesis on a machine that is busy with other tests: how long an example takes says nothing."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from tests.core.examples import FULL, LONG, SHORT
from tests.size import sized


def pytest_configure(config: pytest.Config) -> None:
    """Choose the examples before any test is imported: many random ones with `--long`, without it always the same few.

    Whether every branch of the core is covered must not depend on chance.
    """
    full = bool(config.getoption("--long"))
    settings.register_profile(
        "core",
        max_examples=sized(LONG, FULL) if full else SHORT,
        derandomize=not full,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("core")
