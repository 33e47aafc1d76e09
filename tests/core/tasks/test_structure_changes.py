from __future__ import annotations

from tidemill.core.tasks.structure import DagStructure, TaskStructure
from tidemill.core.tasks.structure_changes import describe_changes


def test_what_differs_is_named() -> None:
    before = DagStructure("d", (TaskStructure("a"), TaskStructure("b", retries=1), TaskStructure("c")), doc="x")
    now = DagStructure("d", (TaskStructure("a"), TaskStructure("b", retries=2, doc="y"), TaskStructure("e")), doc="z")
    assert describe_changes(before, before) == ""
    assert describe_changes(before, now) == "doc, new task 'e', no task 'c', doc and retries of task 'b'"


def test_only_some_are_named_where_much_differs() -> None:
    now = DagStructure("d", tuple(TaskStructure(f"t{number}") for number in range(7)))
    assert describe_changes(DagStructure("d"), now).endswith("new task 't4' and 2 more")


def test_a_dag_waits_for_the_past_if_one_of_its_tasks_does():
    assert not DagStructure("d", (TaskStructure("a"),)).waits_for_past
    assert DagStructure("d", (TaskStructure("a"), TaskStructure("b", depends_on_past=True))).waits_for_past
    assert DagStructure("d", (TaskStructure("a", wait_for_downstream=True),)).waits_for_past
