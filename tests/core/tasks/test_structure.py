from __future__ import annotations

from tidemill.core.tasks.structure import (
    DagStructure,
    MapSource,
    MapStructure,
    StartStructure,
    TaskStructure,
    hide_arguments,
)

NUMBERS, LINES = MapSource("literal", length=2), MapSource("generator", "lines", "return_value")
PAIRS = MapSource("zip", parts=(MapSource("xcom", "ids", "return_value"), MapSource("param", key="names")))


def test_the_sources_of_a_map_are_the_tasks_that_give_its_items() -> None:
    one = MapStructure(("x", "y", "z"), (NUMBERS, LINES, PAIRS))
    assert one.sources == ("ids", "lines")
    assert [leaf.kind for leaf in one.leaves] == ["literal", "generator", "xcom", "param"]
    assert MapStructure(("x",), (NUMBERS,)).sources == ()


def test_a_generator_varies_slowest_whatever_its_place() -> None:
    assert MapStructure(("x", "y"), (NUMBERS, LINES)).slowest == 1
    assert MapStructure(("x", "y"), (NUMBERS, PAIRS)).slowest == 0


def test_the_first_tasks_of_a_mapped_group_are_shown_behind_it() -> None:
    tasks = (
        TaskStructure("a"),
        TaskStructure("g", upstream=("a",), is_group=True),
        TaskStructure("g.x", mapped_group="g", upstream=("a",)),
        TaskStructure("g.y", mapped_group="g", upstream=("g.x",)),
        TaskStructure("z", upstream=("g.y",)),
    )
    assert DagStructure("d", tasks).list_upstream() == {
        "a": (),
        "g": ("a",),
        "g.x": ("g", "a"),
        "g.y": ("g.x",),
        "z": ("g.y",),
    }
    assert DagStructure("d", tasks).list_groups() == {"g": ["g.x", "g.y"]}


def test_a_task_follows_the_map_that_is_its_only_source_if_all_must_succeed() -> None:
    over = MapSource("map", "s", "return_value")
    one = MapStructure(("x",), (over,))
    two = MapStructure(("x", "y"), (over, MapSource("literal", length=2)))
    assert TaskStructure("f", mapped=one).follows == "s"
    assert TaskStructure("f", mapped=one, rule="all_done").follows is None
    assert TaskStructure("f", mapped=two).follows is None
    assert TaskStructure("f", mapped=MapStructure(("x",), (MapSource("xcom", "s"),))).follows is None
    assert TaskStructure("f").follows is None
    assert two.maps == {"s"}


def test_the_arguments_of_triggers_are_not_shown() -> None:
    start = StartStructure("a.Trigger", '{"token":"secret"}', "go_on", '{"a":"secret"}', 5, elements=("secret",))
    shown = hide_arguments(DagStructure("d", (TaskStructure("a", start=start), TaskStructure("b"))))
    assert shown.tasks[0].start == StartStructure("a.Trigger", method="go_on", timeout_us=5)
    assert shown.tasks[1] == TaskStructure("b")
    assert "secret" not in str(shown)
