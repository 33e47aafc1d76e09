"""Loops: what their file says, and the attempts of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.dags.attempts import Services, attempt, value_of

from tidemill.core.tasks.endings import Failure
from tidemill.core.tasks.structure import LoopStructure, MapSource
from tidemill.dags import DAG, DagError, LoopDecision, task, task_group
from tidemill.dags.structure.building import build_structure, serialize_dag
from tidemill.dags.structure.structures import read_structure


@task
def train(rate: float, *, loop: Any) -> float:
    return rate / loop.index if loop.previous is None else loop.previous / 2


@task
def show(loss: float) -> dict[str, float]:
    return {"loss": loss}


@task
def collect(values: Any) -> list[Any]:
    return list(values)


@task_group
def epochs(rate: float = 1.0) -> Any:
    return show(train(rate))


def good_enough(*, loop: Any) -> Any:
    loss = loop.result["loss"]
    return LoopDecision(loss < 0.1, f"the loss is {loss}")


def build(**options: Any) -> DAG:
    with DAG("d") as dag:
        given = {"max_iterations": 3, "until": good_enough} | options
        collect(epochs.partial(rate=8.0).loop(**given))
    dag.validate()
    return dag


def test_the_structure_has_the_loop_and_its_gate() -> None:
    dag = build()
    structure = read_structure(serialize_dag(dag))
    assert structure == build_structure(dag)
    found = {one.id: one for one in structure.tasks}
    group = found["epochs"]
    assert group.is_group
    assert group.mapped is not None
    assert group.mapped.loop == LoopStructure(3, "epochs.loop_gate")
    assert group.mapped.factors == (MapSource("loop"),)
    assert group.mapped.max_outstanding == 1
    assert found["epochs.loop_gate"].upstream == ("epochs.show",)
    assert found["epochs.loop_gate"].mapped_group == "epochs"
    # What takes the results waits for the decision, which may fail.
    assert found["collect"].upstream == ("epochs.loop_gate", "epochs.show")


def test_the_gate_is_tried_again_as_the_other_tasks_are() -> None:
    with DAG("d", default_args={"retries": 2}) as dag:
        epochs.loop(max_iterations=2)
    found = {one.id: one.retries for one in read_structure(serialize_dag(dag)).tasks}
    assert (found["epochs.loop_gate"], found["epochs.show"]) == (2, 2)


def run(dag: DAG, task_id: str, index: int, results: dict[int, str] | None = None) -> Any:
    services = Services(sequences={("epochs.show", "return_value"): list((results or {}).items())})
    return attempt(dag, task_id, services, map_index=index, elements=(None,), leaf_indexes=(-1,))


def test_a_task_sees_its_iteration_and_the_result_of_the_one_before() -> None:
    assert value_of(run(build(), "epochs.train", 0)) == 8.0
    with DAG("d") as dag:
        task_group(lambda: train(1.0), group_id="g").loop(max_iterations=2)
    services = Services(sequences={("g.train", "return_value"): [(0, "3.0")]})
    found = attempt(dag, "g.train", services, map_index=1, elements=(None,), leaf_indexes=(-1,))
    assert value_of(found) == 1.5


@pytest.mark.parametrize(
    ("loss", "index", "options", "done"),
    [
        (0.05, 0, {}, True),
        (0.5, 0, {}, False),
        (0.5, 2, {"on_max": "succeed"}, True),
        (0.5, 0, {"until": None}, False),
        (0.5, 2, {"until": None}, True),
        (0.5, 0, {"until": lambda *, loop: loop.index == 1}, True),
    ],
)
def test_the_gate_decides(loss: float, index: int, options: dict[str, Any], done: bool) -> None:
    results = {index: f'{{"loss": {loss}}}'}
    found = run(build(**options), "epochs.loop_gate", index, results)
    assert value_of(found)["done"] is done
    assert found.label.startswith("ends" if done else "goes on")
    assert str(loss) in found.label


def test_a_loop_that_does_not_end_fails_at_its_last_iteration() -> None:
    ending = run(build(), "epochs.loop_gate", 2, {2: '{"loss": 0.5}'}).ending
    assert isinstance(ending, Failure)
    assert not ending.may_retry


@pytest.mark.parametrize("decision", [None, 1, "yes", LoopDecision(None), LoopDecision("no")])  # type: ignore[arg-type]
def test_until_has_to_return_a_decision(decision: Any) -> None:
    assert isinstance(run(build(until=lambda *, loop: decision), "epochs.loop_gate", 0).ending, Failure)


async def decide(*, loop: Any) -> bool:
    return loop.index == 1


def test_until_may_be_a_coroutine_function() -> None:
    assert value_of(run(build(until=decide), "epochs.loop_gate", 0, {0: '{"loss": 0.5}'}))["done"] is True


@pytest.mark.parametrize("reason", ["a\0b\ud800", "x" * 10_000_000, 5, None])
def test_any_reason_can_be_stored(reason: Any) -> None:
    found = run(build(until=lambda *, loop: LoopDecision(True, reason)), "epochs.loop_gate", 0)
    stored = value_of(found)["reason"]
    assert len(stored) < 2_000
    assert "\0" not in stored
    assert "\ud800" not in stored


@task_group
def nested_result() -> Any:
    @task_group
    def inside() -> Any:
        losses = show(1.0)
        collect(losses)
        return losses

    return inside()


def test_the_result_of_a_nested_group_is_what_its_function_returns() -> None:
    with DAG("d") as dag:
        nested_result.loop(max_iterations=2)
    assert dag.groups["nested_result"].result_id == "nested_result.inside.show"


@task_group
def returns_item() -> Any:
    return show(1.0)["loss"]


@task_group
def returns_number() -> Any:
    show(1.0)
    return 5


@task_group
def returns_dict() -> Any:
    return {"a": show(1.0)}


def takes_more(*, loop: Any, other: Any) -> bool:
    return True


@task_group
def two() -> None:
    show.override(task_id="one")(1.0)
    show.override(task_id="other")(1.0)


@task_group
def mapped() -> None:
    show.expand(loss=[1.0])


@task_group
def outer() -> None:
    epochs.loop(max_iterations=2)


@task_group
def inner(x: int) -> None:
    epochs.loop(max_iterations=2)


@task_group
def yields() -> Any:
    @task
    def numbers() -> Iterator[int]:
        yield 1

    return numbers()


@pytest.mark.parametrize(
    "define",
    [
        lambda: yields.loop(max_iterations=2),
        lambda: epochs.loop(max_iterations=0),
        lambda: epochs.loop(max_iterations=100_000),
        lambda: epochs.loop(max_iterations=2, on_max="stop"),
        lambda: epochs.loop(max_iterations=2, until=3),
        lambda: epochs.loop(max_iterations=2, until=lambda: True),
        lambda: epochs.partial(max_outstanding=2).loop(max_iterations=2),
        lambda: two.loop(max_iterations=2),
        lambda: mapped.loop(max_iterations=2),
        lambda: outer.loop(max_iterations=2),
        lambda: task_group(lambda: None, group_id="g").loop(max_iterations=2),
        lambda: inner.expand(x=[1]),
        lambda: epochs.loop(max_iterations=2, until=takes_more),
        lambda: epochs.loop(max_iterations=2, until=task(good_enough)),
        lambda: epochs.loop(max_iterations=2, until=max),
        lambda: returns_item.loop(max_iterations=2),
        lambda: returns_number.loop(max_iterations=2),
        lambda: returns_dict.loop(max_iterations=2),
        lambda: train(1.0),
        lambda: train.expand(rate=[1.0]),
    ],
)
def test_what_cannot_be_looped_is_refused(define: Callable[[], Any]) -> None:
    with pytest.raises(DagError), DAG("d") as dag:
        define()
        dag.validate()
