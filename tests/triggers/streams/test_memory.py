"""Shared streams keep nothing of what everybody has dealt with."""

from __future__ import annotations

import pytest
from tests.size import sized
from tests.triggers.streams.endless import endless


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["fast", "ack"])
async def test_memory_is_flat_over_very_many_events_with_a_subscriber_that_lags_as_far_as_it_may(mode, long_run):
    events = sized(100_000, 400_000) if long_run else 50_000
    kib = await endless(mode, events)
    # 4 bytes for each event after the first tenth would be too much.
    assert kib[-1] - kib[0] < max(1024, events * 0.9 * 4 / 1024), kib
