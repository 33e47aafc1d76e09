from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.structure import DagStructure, ParamStructure, ScheduleStructure, TaskStructure
from tidemill.dags.structure.structures import read_structure, write_structure

names = st.text("abc", min_size=1, max_size=3)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
ids = st.lists(names, unique=True, max_size=3).map(lambda found: tuple(sorted(found)))
numbers = st.integers(0, 1 << 62)
tasks = st.builds(
    TaskStructure,
    id=names,
    upstream=ids,
    setups=ids,
    doc=texts,
    priority=numbers,
    edge_labels=st.dictionaries(names, texts, max_size=2),
    execution_timeout_us=st.none() | numbers,
    is_setup=st.booleans(),
    template_fields=ids,
)
structures = st.builds(
    DagStructure,
    id=names,
    tasks=st.lists(tasks, max_size=3).map(tuple),
    schedule=st.builds(ScheduleStructure, kind=names, cron=texts, interval_us=st.none() | numbers),
    params=st.lists(st.builds(ParamStructure, name=names, default=st.none() | texts), max_size=2).map(tuple),
    groups=st.dictionaries(names, texts, max_size=2),
    tags=ids,
    doc=texts,
    max_active_tasks=st.none() | numbers,
)


@given(structures)
def test_what_is_read_is_what_was_written(structure: DagStructure) -> None:
    text = write_structure(structure)
    assert read_structure(text) == structure
    assert write_structure(read_structure(text)) == text


def test_what_is_as_usual_takes_no_room() -> None:
    assert write_structure(DagStructure("a", (TaskStructure("t"),))) == b'{"format":1,"id":"a","tasks":[{"id":"t"}]}'


def test_another_format_is_not_read() -> None:
    text = write_structure(dataclasses.replace(DagStructure("a"), format=2))
    with pytest.raises(ValueError, match="the structure of DAG 'a' has format 2, not 1"):
        read_structure(text)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"tasks":[]}', b'{"id":1,"format":1}'])
def test_what_is_not_a_structure_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|object|truncated|Expected|required"):
        read_structure(text)
