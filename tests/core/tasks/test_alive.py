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


def test_triggerers_without_queues_take_all_triggers_and_others_only_those_of_their_queues() -> None:
    every = find_alive([SeenService("triggerer", (), 0)])
    assert every.explain_missing("triggerer", "gpu") == every.explain_missing("triggerer") == ""
    some = find_alive([SeenService("triggerer", ("gpu",), 0)])
    assert some.explain_missing("triggerer", "gpu") == ""
    assert "takes triggers from queue 'other'; add it to triggerer.queues" in some.explain_missing("triggerer", "other")
    assert "takes triggers without a queue" in some.explain_missing("triggerer")
    assert some.explain_missing("triggerer", any_queue=True) == ""


def test_services_are_full_if_none_of_their_queue_has_a_place() -> None:
    one, two = (replace(WORKER, session=number, capacity=2, held=2) for number in (1, 2))
    assert find_alive([one, two]).explain_full("worker", "default") == "2 live workers with 4 places, none free"
    assert find_alive([one, replace(two, held=1)]).explain_full("worker", "default") == ""
    assert find_alive([one, WORKER]).explain_full("worker", "default") == "", "its capacity is not known"
    assert find_alive([one]).explain_full("worker", "gpu") == ""
