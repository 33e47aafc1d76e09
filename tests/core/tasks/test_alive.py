"""Which services are missing, in words."""

from __future__ import annotations

from dataclasses import replace

from tidemill.core.tasks.alive import SILENT_US, SeenService, find_alive

SCHEDULER, WORKER = SeenService("scheduler", (), 0), SeenService("worker", ("default",), 5_000_000)


def test_what_is_alive_is_not_missing() -> None:
    alive = find_alive([SCHEDULER, WORKER])
    assert alive.explain_all() == ""
    assert alive.explain_missing("scheduler") == ""
    assert alive.explain_missing("worker", "default") == ""


def test_a_service_that_was_not_heard_of_for_long_does_nothing() -> None:
    alive = find_alive([replace(each, quiet_us=SILENT_US) for each in (SCHEDULER, WORKER)])
    assert alive.explain_all() == "no scheduler and no worker is alive; start `tidemill dev`"
    assert alive.explain_missing("triggerer") == "no triggerer is alive; start `tidemill dev`"
    assert find_alive([SCHEDULER]).explain_all() == "no worker is alive; start `tidemill dev`"


def test_workers_of_other_queues_are_named() -> None:
    assert "takes tasks from queue 'gpu'" in find_alive([WORKER]).explain_missing("worker", "gpu")
