"""Tasks whose elements get lists of values: what their file says, and their attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.dags.attempts import Services, attempt, value_of

from tidemill.core.tasks.endings import Failure
from tidemill.core.tasks.structure import ChunkStructure, MapSource
from tidemill.dags import DAG, BashOperator, DagError, task, task_group
from tidemill.dags.structure.building import build_structure, serialize_dag
from tidemill.dags.structure.structures import read_structure


@task
def stream() -> Iterator[int]:
    yield 1


@task
def rows() -> list[str]:
    return []


@task
def join(values: list[Any], end: str = "") -> str:
    return "-".join(map(str, values)) + end


def test_the_structure_says_how_values_are_put_into_lists() -> None:
    with DAG("d") as dag:
        join.chunk(3, max_wait=1.5).expand(values=stream())
        BashOperator.partial(task_id="b").chunk(max_items=2).expand(bash_command=["a", "b", "c"])
    structure = read_structure(serialize_dag(dag))
    assert structure == build_structure(dag)
    found = {one.id: one.mapped for one in structure.tasks if one.mapped is not None}
    assert found["join"].chunk == ChunkStructure(3, 1_500_000)
    assert found["join"].factors == (MapSource("generator", "stream", "return_value"),)
    assert found["b"].chunk == ChunkStructure(2)


def test_a_task_over_lists_of_the_results_of_a_map_needs_all_of_them() -> None:
    with DAG("d") as dag:
        results = join.expand(values=[["a"], ["b"]])
        join.override(task_id="chunked").partial(end=results).chunk(2).expand(values=results)
    structure = {one.id: one for one in build_structure(dag).tasks}
    assert structure["chunked"].follows is None


def test_an_element_gets_the_list_of_its_values() -> None:
    with DAG("d") as dag:
        join.partial(end="{{ run_id }}").chunk(2).expand(values=rows().map(lambda text: text + "!"))
    services = Services(items=[((4,), ('"{{ a }}"',)), ((5,), ('"b"',))], page_values=1)
    # Values of other tasks are data and no templates.
    assert value_of(attempt(dag, "join", services, map_index=2)) == "{{ a }}!-b!run"


def test_values_in_the_file_are_put_into_lists_too() -> None:
    with DAG("d") as dag:
        join.chunk(2).expand(values=["{{ run_id }}", "b", "c"])
    assert value_of(attempt(dag, "join", Services(items=[((0,), (None,)), ((1,), (None,))]), map_index=0)) == "run-b"


def test_an_element_without_stored_values_fails() -> None:
    with DAG("d") as dag:
        join.chunk(2).expand(values=rows())
    assert isinstance(attempt(dag, "join", map_index=0).ending, Failure)


@pytest.mark.parametrize(
    "define",
    [
        lambda: join.chunk(0),
        lambda: join.chunk(1_000_001),
        lambda: join.chunk(True),
        lambda: join.chunk(2).chunk(3),
        lambda: BashOperator.partial(task_id="b").chunk(2).chunk(3),
        lambda: join.chunk(2, max_wait=0),
        lambda: join.chunk(2)(values=[]),
        lambda: join.chunk(2).expand(values=[1], end=["a"]),
        lambda: join.chunk(2).expand_kwargs([{"values": 1}]),
        lambda: BashOperator(task_id="b", bash_command="true").chunk(2),
        lambda: BashOperator.partial(task_id="b").chunk(2),
        lambda: task_group(lambda x: None, group_id="g").chunk(2),
    ],
)
def test_what_cannot_be_put_into_lists_is_refused(define: Callable[[], Any]) -> None:
    with pytest.raises(DagError), DAG("d") as dag:
        define()
        dag.validate()
