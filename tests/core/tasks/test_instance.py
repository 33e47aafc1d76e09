"""The displayed names of task instances."""

from __future__ import annotations

from tidemill.core.tasks.instance import UNMAPPED, format_instance


def test_only_the_name_of_an_element_has_an_index() -> None:
    assert format_instance("group.load", UNMAPPED) == "group.load"
    assert [format_instance("load", index) for index in (0, 12)] == ["load[0]", "load[12]"]
