"""Runs an element of a mapped task, or all of its elements in one attempt."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any, Final

from tidemill.core.errors import describe_error, escape_surrogates
from tidemill.core.tasks.endings import Deferral, Failure, Idle, Loss, Skip, Success
from tidemill.core.wording import shorten
from tidemill.dags.attempt.current import is_interrupted, running
from tidemill.dags.attempt.lazy_context import Context
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.attempt.task_services import AttemptClaim, TaskServices
from tidemill.dags.exceptions import (
    TaskError,
    TaskTimeout,
)
from tidemill.dags.execution.callbacks import call_all
from tidemill.dags.execution.endings import classify, kill, make_storable
from tidemill.dags.execution.task_run import render, run_task
from tidemill.dags.map_sources import LeafItem
from tidemill.dags.templates import Renderer, build_environment, find_texts

log = logging.getLogger(__name__)
_MAX_LABEL: Final = 250


def list_leaves(claim: AttemptClaim) -> list[LeafItem]:
    return [LeafItem(index, text) for index, text in zip(claim.leaf_indexes, claim.elements, strict=True)]


def run_element(dag: Any, mapped: Any, claim: AttemptClaim, context: Context, services: TaskServices) -> AttemptResult:
    """Create the operator of an element, and run it."""
    if mapped.is_iterated:
        return _run_elements(dag, mapped, claim, context, services)
    # The functions of `.map` are the user's code, as is the operator's constructor.
    with running(None, context, services):
        try:
            task, data = _make_element(mapped, claim, context, services)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return AttemptResult(classify(error))
    result = run_task(dag, task, claim, context, services, find_texts(data))
    return add_label(dag, mapped, result, context, services)


def _run_elements(
    dag: Any, mapped: Any, claim: AttemptClaim, context: Context, services: TaskServices
) -> AttemptResult:
    """Run all elements of a task in this attempt."""
    # Imported here, because they import asyncio.
    from tidemill.dags.execution.element_runner import ElementRunner
    from tidemill.dags.execution.elements import PlaceLeft
    from tidemill.dags.execution.iterating import Iteration, describe_failures

    def render_operator(operator: Any, of_element: Context, data: Any) -> None:
        render(dag, operator, of_element, find_texts(data))

    def render_value(value: Any, of_element: Context, data: Any) -> Any:
        return Renderer(partial(build_environment, dag), of_element, (), find_texts(data)).render(value)

    runner = ElementRunner(mapped, context, services, render_operator, render_value)
    with running(None, context, services):
        try:
            call_all(mapped.on_execute_callback, context, "on_execute")
            counts = Iteration(mapped, runner, services, claim.try_number, claim.max_tries).run()
        except KeyboardInterrupt:
            raise
        except PlaceLeft:
            return AttemptResult(Loss(is_return=True))
        except BaseException as error:
            return AttemptResult(classify(error))
        finally:
            if is_interrupted():
                for operator in runner.list_operators():
                    kill(operator)
    if counts.failed:
        text = describe_failures(counts)
        log.error("the attempt failed: %s", text)
        return AttemptResult(Failure(make_storable(text), may_retry=False))
    if counts.skipped and not counts.success:
        return AttemptResult(Skip("all elements were skipped"))
    return AttemptResult(Success())


def add_label(
    dag: Any, original: Any, result: AttemptResult, context: Context, services: TaskServices
) -> AttemptResult:
    """Return the result of an element's attempt with the label of the element, unless the attempt deferred."""
    if isinstance(result.ending, Deferral | Idle) or not original.map_index_template:
        return result
    return replace(result, label=_render_label(dag, original.map_index_template, context, services))


def _make_element(mapped: Any, claim: AttemptClaim, context: Context, services: TaskServices) -> tuple[Any, Any]:
    """Create the operator of an element, which the context gets, and return it with its values that are data."""
    if mapped.chunking is None:
        values, data = mapped.evaluate(list_leaves(claim), context["ti"])
    else:
        values, data = _join_items(mapped, context, services)
    task = mapped.unmap(values)
    context["task"] = context["ti"].task = task
    return task, data


def _join_items(mapped: Any, context: Context, services: TaskServices) -> tuple[dict[str, Any], Any]:
    """Return the list of the items of a chunk as the mapped argument, and the items that are data."""
    (name,) = mapped.expand_input.sources
    values, data, after = [], [], -1
    while page := services.get_chunk_items(after):
        for item in page:
            leaves = [LeafItem(*leaf) for leaf in zip(item.leaf_indexes, item.elements, strict=True)]
            found, known = mapped.evaluate(leaves, context["ti"])
            values.append(found[name])
            data += known
        after = page[-1].number
    if not values:
        raise TaskError("the items of this element are not stored any more; clear the task, or start a new run")
    return {name: values}, data


def find_element(mapped: Any, claim: AttemptClaim, context: Context, services: TaskServices) -> None:
    """Give the context of a callback the operator of its element; without it, the callback sees the mapped task."""
    try:
        _make_element(mapped, claim, context, services)
    except (KeyboardInterrupt, TaskTimeout):
        raise
    except BaseException as error:  # the cause of the failure that the callback is told of, perhaps
        log.warning(
            "the arguments of element %d are not known to its callbacks: %s", claim.map_index, describe_error(error)
        )


def _render_label(dag: Any, template: str, context: Context, services: TaskServices) -> str | None:
    """Return the label of an element; None, with a warning in the log, if its template cannot be rendered."""
    try:
        with running(None, context, services):
            label = str(Renderer(partial(build_environment, dag), context).render(template))
    except Exception as error:
        log.warning("map_index_template %r cannot be rendered: %s", template, describe_error(error))
        return None
    return make_storable(shorten(escape_surrogates(label), _MAX_LABEL - 3))
