"""Lists that are larger than an XCom, returned by tasks that others are mapped over."""

from __future__ import annotations

from typing import Any

import pytest
from tests.dags.attempts import Services, attempt, value_of

from tidemill.core.tasks.endings import Failure
from tidemill.dags import DAG, task
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.long_lists import MAX_LIST_BYTES
from tidemill.runtime.json.codec import decode, encode


def produce(value: Any, services: Services, *, mapped: bool = True) -> AttemptResult:
    """Make an attempt of a task that returns a value, which another task is mapped over."""
    with DAG("d") as dag:
        values = task(task_id="source")(lambda: value)()
        show = task(task_id="show")(lambda x: x)
        if mapped:
            show.expand(x=values.map(str).zip(values))
        else:
            show(values)
    return attempt(dag, "source", services)


def test_a_large_list_is_stored_in_parts_if_a_task_is_mapped_over_it() -> None:
    services = Services()
    values = [f"{number:04}é" * 200 for number in range(2_500)]

    result = produce(values, services)

    assert dict(result.xcoms)["return_value"] == '{"$tidemill":"items","value":2500}'
    assert [first for first, _ in services.emitted] == [0, 1_000, 2_000]
    assert [decode(text) for _, part in services.emitted for text in part] == values


def test_a_part_has_few_bytes_if_the_items_are_large() -> None:
    services = Services()
    produce(("x" * 900_000,) * 9, services)
    assert [len(part) for _, part in services.emitted] == [4, 4, 1]


@pytest.mark.parametrize("value", [["x"] * 100_000, "x" * 2_000_000, {"x" * 2_000_000: 1}, [] * 10])
def test_other_values_are_plain_xcoms(value: Any) -> None:
    services = Services()
    assert value_of(produce(value, services)) == value
    assert value_of(produce(["x" * 2_000_000], services, mapped=False)) == ["x" * 2_000_000]
    assert services.emitted == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["a", "x" * 2_000_000], "item 1 of the returned list has 2,000,002 bytes; at most 1,048,576"),
        (["x" * 1_000_000] * 68, f"has 68,000,136 bytes; at most {MAX_LIST_BYTES:,} of a list that a task is mapped"),
    ],
)
def test_what_is_too_large_is_refused_by_name(value: Any, text: str) -> None:
    services = Services()
    ending = produce(value, services).ending
    assert isinstance(ending, Failure)
    assert text in ending.error
    assert not ending.may_retry
    assert services.emitted == []


def test_a_task_that_reads_it_gets_a_lazy_sequence() -> None:
    def describe(value: Any) -> Any:
        return [type(value).__name__, value[1], list(value), len(value)]

    def pull(ti: Any, **how: Any) -> Any:
        return describe(ti.xcom_pull("source", **how))

    services = Services(
        xcoms={("source", "return_value"): '{"$tidemill":"items","value":2}'},
        sequences={("source", "return_value"): [(0, encode("a")), (1, encode({"b": 1}))]},
    )
    with DAG("d") as dag:
        values = task(task_id="source")(list)()
        task(task_id="show")(lambda x: x).expand(x=values)
        task(task_id="reads")(describe)(values)
        task(task_id="pulls")(lambda ti: pull(ti))()
        task(task_id="prior")(lambda ti: pull(ti, include_prior_dates=True))()
    expected = ["LazySequence", {"b": 1}, ["a", {"b": 1}], 2]
    assert value_of(attempt(dag, "reads", services)) == expected
    assert value_of(attempt(dag, "pulls", services)) == expected
    prior = attempt(dag, "prior", services).ending
    assert isinstance(prior, Failure)
    assert "include_prior_dates=True) of 'source' is not supported" in prior.error
