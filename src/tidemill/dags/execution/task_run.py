"""Runs the operator of a task: renders its templates, executes or resumes it, and collects what it returned."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from tidemill.core.tasks.endings import Success
from tidemill.dags.arguments import check_text
from tidemill.dags.attempt.continuation import accepts_event, find_method
from tidemill.dags.attempt.current import is_interrupted, running
from tidemill.dags.attempt.lazy_context import Context
from tidemill.dags.attempt.lazy_sequence import is_lazy
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.attempt.streaming import AttemptIdle, StreamRun, StreamTaskEnd, read_cursor, read_plan
from tidemill.dags.attempt.task_services import AttemptClaim, TaskServices
from tidemill.dags.exceptions import (
    TaskDeferred,
    TaskFailed,
)
from tidemill.dags.execution.callbacks import call_all
from tidemill.dags.execution.deferring import defer
from tidemill.dags.execution.endings import classify, end_by_event, end_late_stream, kill
from tidemill.dags.long_lists import encode_result
from tidemill.dags.templates import Renderer, build_environment, render_fields
from tidemill.dags.xcom_arg import RETURN_VALUE
from tidemill.runtime.json.codec import decode, encode


def run_task(
    dag: Any,
    task: Any,
    claim: AttemptClaim,
    context: Context,
    services: TaskServices,
    texts: Mapping[int, str] = MappingProxyType({}),
) -> AttemptResult:
    """Render the templates of a task and execute it.

    Args:
        dag: Its DAG.
        task: Its operator, as made for this attempt.
        claim: The attempt.
        context: The context.
        services: Access to the store.
        texts: The texts, by their `id`, that are data and no templates.
    """
    with running(task, context, services):
        try:
            render(dag, task, context, texts)
            result = _execute(task, claim, context, services)
            xcoms = _collect_xcoms(task, result)
        except KeyboardInterrupt:
            raise
        except TaskDeferred as deferral:
            return AttemptResult(defer(task, deferral))
        except AttemptIdle as idle:
            return AttemptResult(idle.ending)
        except StreamTaskEnd as end:
            return end_by_event(end.ending, task, services)
        except BaseException as error:
            return AttemptResult(end_late_stream(error, task, claim) or classify(error, task))
        finally:
            if is_interrupted():  # the task's code may have swallowed the exception, or raised another
                kill(task)
    ti = context["ti"]
    return AttemptResult(Success(), xcoms, tuple(sorted(ti.skipped)), ti.skips_all)


def render(dag: Any, task: Any, context: Context, texts: Mapping[int, str]) -> None:
    """Render the template fields of a task.

    Raises:
        ValueError: A field cannot be rendered.
    """
    try:
        renderer = Renderer(partial(build_environment, dag), context, task.template_ext, texts)
        for field, value in render_fields(task, task.template_fields, renderer).items():
            setattr(task, field, value)
    except RecursionError:  # its traceback would have thousands of lines
        raise ValueError("a template field contains itself, or is nested too deeply") from None


def _execute(task: Any, claim: AttemptClaim, context: Context, services: TaskServices) -> Any:
    resume = claim.resume
    if resume is None:
        if task.handles_streams or claim.checkpoint is not None:
            context["stream"] = read_cursor(claim.checkpoint)
        call_all(task.on_execute_callback, context, "on_execute")
        task.pre_execute(context)
        result = task.execute(context)
    elif claim.stream is not None:
        # What a task emits becomes its result, unless maps take it as elements.
        lists = task.do_xcom_push and (claim.map_index >= 0 or not task.is_generator)
        result = StreamRun(task, read_plan(resume.kwargs), claim.stream, context, services, lists=lists).run()
    else:
        method = find_method(task, resume.method)
        kwargs = {**(decode(resume.kwargs) or {}), "event": decode(resume.payload)}
        # As in Airflow, a task may resume in its plain `execute(context)`.
        if resume.method == "execute" and not accepts_event(method):
            del kwargs["event"]
        result = method(context, **kwargs)
    if claim.stream is None and task.handles_streams and claim.map_index < 0 and isinstance(result, list | tuple):
        # Imported here, because it imports asyncio.
        from tidemill.dags.attempt.yielding import emit_all

        # Maps over the task take elements, whether a stream or this list has them.
        emit_all((item for item in result), services)
    task.post_execute(context, result)
    return result


def _collect_xcoms(task: Any, result: Any) -> tuple[tuple[str, str], ...]:
    """Return the XComs for the value that an attempt returned.

    Raises:
        EncodingError: The value cannot be serialized.
        TaskFailed: The task has `multiple_outputs`, but did not return a dict with string keys; or a list is too large.
    """
    if not task.do_xcom_push or result is None:
        return ()
    if is_lazy(result):
        result = list(result)
    found = {}
    if task.multiple_outputs:
        if not isinstance(result, Mapping):
            raise TaskFailed(f"multiple_outputs needs a dict; the task returned {type(result).__name__}")
        for key, value in result.items():
            if not isinstance(key, str):
                raise TaskFailed(f"multiple_outputs needs a dict with strings as keys; the task returned key {key!r}")
            check_text("the returned value", "a key", key)
            found[key] = encode(value, f"the returned value[{key!r}]")
    found[RETURN_VALUE] = encode_result(task, result)
    return tuple(found.items())
