"""Why a mapped task waits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidemill.core.tasks.alive import SeenService, find_alive
from tidemill.core.tasks.structure import MapSource, MapStructure, TaskStructure
from tidemill.store.calls.instance_calls import MapCounts, TaskRecord
from tidemill.store.calls.run_calls import RunRecord
from tidemill.web.dags.waiting import Around, describe_wait

RUN = RunRecord(1, "d", "r", "manual", "running", None, 1, None, None, None, "{}", "me", 0, 0, None)
AROUND = Around({}, {}, find_alive([SeenService("scheduler", (), 0)]))


def describe(state: str, source: str, counts: MapCounts | None = None, **limits: Any) -> tuple[str, str]:
    """Return kind and text of the reason why a task waits that is mapped over the values of `g`."""
    factors = (MapSource(limits.pop("kind", "generator"), "g"),)
    mapped = MapStructure(("x",), factors, limits.pop("max_outstanding", None))
    structure = TaskStructure("m", "Operator", upstream=("g",), mapped=mapped, **limits)
    task = TaskRecord(
        1, 1, "d", "r", "m", -1, state, 1, 0, 1, "Operator", "q", "p", 1, 1, 0, 0, None, None, None, None, None, counts
    )
    wait = describe_wait(task, structure, {"g": source, "m": state}, RUN, AROUND)
    assert wait is not None
    return wait.kind, wait.text


def count(
    arrived: int,
    created: int,
    unfinished: int,
    *,
    closed: bool = False,
    stop: str | None = None,
    retrying: int = 0,
) -> MapCounts:
    return MapCounts(arrived, closed, created, unfinished, 0, created - unfinished, 0, 0, 0, stop, retrying)


@pytest.mark.parametrize(
    ("given", "limits", "kind", "text"),
    [
        (("none", "running"), {}, "source", "its source g"),
        (("mapped", "running", count(0, 0, 0)), {}, "source", "an item of its source g"),
        (("mapped", "running", count(9, 9, 2)), {}, "elements", "2 of 9 so far are open; its source g gives more"),
        (("mapped", "success", count(9, 9, 2, closed=True)), {}, "elements", "its elements: 2 of 9 are open"),
        (
            ("mapped", "success", count(1200, 130, 128, closed=True)),
            {},
            "elements",
            "128 of 1,200 are open; its window of 128 is full, 1,070 follow",
        ),
        (("mapped", "running", count(9, 5, 3)), {"max_outstanding": 3}, "elements", "window of 3 is full, 4 follow"),
        (("mapped", "running", count(9, 5, 2)), {"max_active_per_run": 2}, "elements", "window of 2 is full, 4 follow"),
        (("mapped", "success", count(9, 5, 3, closed=True, stop="cancelled")), {}, "elements", "3 of 9 are open"),
        (("ending", "success", count(9, 5, 1, closed=True)), {}, "ending", "the end of 1 element"),
        (("mapped", "mapped", count(0, 0, 0)), {"kind": "map"}, "source", "an element of g to end"),
        (("mapped", "mapped", count(3, 3, 2)), {"kind": "map"}, "elements", "open; it follows the elements of g"),
        (
            ("mapped", "success", count(3, 3, 2)),
            {"kind": "map", "max_outstanding": 2},
            "elements",
            "its elements: 2 of 3 so far are open; its window of 2 is full",
        ),
        (
            ("mapped", "success", count(90, 20, 14, closed=True, retrying=9)),
            {"max_outstanding": 10},
            "elements",
            "open; 9 wait for a retry, of which 5 count in its window of 10; its window of 10 is full, 70 follow",
        ),
        (
            ("mapped", "success", count(90, 20, 13, closed=True, retrying=9)),
            {"max_outstanding": 10},
            "elements",
            "open; 9 wait for a retry, of which 5 count in its window of 10",
        ),
        (
            ("mapped", "mapped", count(0, 0, 0)),
            {"kind": "map", "rule": "all_done"},
            "source",
            "the end of all elements of g",
        ),
    ],
)
def test_a_mapped_task_says_what_it_waits_for(given: Any, limits: dict[str, Any], kind: str, text: str) -> None:
    found = describe(*given, **limits)
    assert found[0] == kind
    assert text in found[1]


def test_elements_that_are_about_to_be_removed_do_not_follow() -> None:
    counts = count(5, 9, 3, closed=True)
    found = describe("mapped", "success", counts, max_outstanding=3)
    assert found == ("elements", "its elements: 3 of 5 are open")


@pytest.mark.parametrize(("retrying", "more"), [(0, ""), (400, "; 400 of them wait for a retry")])
def test_a_task_whose_attempt_runs_all_elements_has_no_window(retrying: int, more: str) -> None:
    counts = msgspec.structs.replace(count(900, 900, 500, closed=True, retrying=retrying), iterated=True)
    assert describe("mapped", "success", counts) == ("elements", f"its elements: 500 of 900 are open{more}")


def describe_in_group(task_id: str, state: str, index: int, counts: MapCounts | None = None) -> tuple[str, str] | None:
    """Return kind and text of the reason why a task of the group `g`, or the group, waits; `g.b` follows `g.a`."""
    mapped = MapStructure((), (MapSource("group", task="g"),))
    structure = TaskStructure(task_id, "Operator", upstream=("o", "g.a"), mapped=mapped, mapped_group="g")
    if task_id == "g":
        structure = TaskStructure("g", "TaskGroup", mapped=mapped, is_group=True)
    more = (None, None, None, None, None, counts)
    task = TaskRecord(1, 1, "d", "r", task_id, index, state, 1, 0, 1, "Operator", "q", "p", 1, 1, 0, 0, *more)
    states = {"o": "running", "g.a": "mapped", "g.b": state}
    wait = describe_wait(task, structure, states, RUN, AROUND, ["g.a", "g.b"])
    return None if wait is None else (wait.kind, wait.text)


def test_a_task_of_a_mapped_group_waits_for_tasks_outside_as_a_whole_and_inside_by_element() -> None:
    assert describe_in_group("g.b", "none", -1) == ("upstream", "upstream o")
    assert describe_in_group("g.b", "none", 3) == ("upstream", "upstream g.a in this element")
    assert describe_in_group("g", "none", 3) == ("elements", "room among the open elements of its group")
    assert describe_in_group("g", "mapped", 3) is None
    assert describe_in_group("g.b", "mapped", -1, count(1200, 130, 128)) == (
        "elements",
        "its elements: 128 of 1,200 so far are open",
    )


@pytest.mark.parametrize(
    ("block", "kind", "text"),
    [
        (1, "elements", "elements to be created from what it has yielded"),
        (2, "slots", "pool p, which does not exist; create it, to go on after its yield"),
        (3, "worker", "a free slot of its worker, to go on after its yield"),
    ],
)
def test_a_generator_that_is_far_ahead_says_what_it_waits_for(block: int, kind: str, text: str) -> None:
    plain = TaskRecord(
        1, 1, "d", "r", "g", -1, "running", 1, 1, 1, "Operator", "q", "p", 1, 1, 0, 0, None, None, None, None, None
    )
    assert describe_wait(plain, None, {}, RUN, AROUND) is None
    wait = describe_wait(msgspec.structs.replace(plain, block=block), None, {}, RUN, AROUND)
    assert wait is not None
    assert (wait.kind, wait.text) == (kind, text)
