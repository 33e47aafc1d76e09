"""Runs one attempt of a task or one of its callbacks: everything between the claim and the report.

Processes, timeouts, signals and logs belong to the caller. Whatever the user's code does, the ending is returned as an
`AttemptResult`; only `KeyboardInterrupt` propagates.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from tidemill.core.errors import describe_error, escape_surrogates
from tidemill.core.tasks.endings import AttemptEnding, Deferral, Failure, Idle, Loss, Skip, Success
from tidemill.core.wording import shorten
from tidemill.dags.arguments import check_duration, check_text
from tidemill.dags.attempt.batch_services import BatchServices
from tidemill.dags.attempt.current import is_interrupted, killing, running
from tidemill.dags.attempt.exception_text import rebuild_exception, write_origin
from tidemill.dags.attempt.lazy_context import Context
from tidemill.dags.attempt.lazy_sequence import is_lazy
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.attempt.streaming import AttemptIdle, StreamPlan, StreamRun, StreamTaskEnd, read_cursor, read_plan
from tidemill.dags.attempt.task_services import AttemptClaim, CallbackClaim, EndingEvent, TaskServices
from tidemill.dags.context.context import build_context, open_lists
from tidemill.dags.exceptions import (
    DagError,
    SensorTimeout,
    TaskDeferralError,
    TaskDeferralTimeout,
    TaskDeferred,
    TaskError,
    TaskFailed,
    TaskSkipped,
    TaskTimeout,
)
from tidemill.dags.group_unit import GroupUnit
from tidemill.dags.long_lists import encode_result, is_list_mark
from tidemill.dags.map_sources import LeafItem
from tidemill.dags.params import wrap_params
from tidemill.dags.templates import Renderer, build_environment, find_texts, render_fields
from tidemill.dags.triggers.stream_key import write_key
from tidemill.dags.triggers.trigger_text import write_trigger
from tidemill.dags.xcom_arg import RETURN_VALUE
from tidemill.runtime.json.codec import decode, encode
from tidemill.triggers.base import is_acknowledged

log = logging.getLogger(__name__)

_MICROSECONDS: Final = 1_000_000
#: Longer errors are cut here, before secrets are masked; the text shown to people is cut much shorter later.
_MAX_ERROR: Final = 1_000_000
_MAX_LABEL: Final = 250


def run_attempt(dag: Any, claim: AttemptClaim, services: TaskServices) -> AttemptResult:
    """Run an attempt: start a task, resume it after a deferral, or run a callback.

    Args:
        dag: The DAG, as its file currently defines it.
        claim: The attempt.
        services: Access to XComs, variables, connections and other runs.
    """
    try:
        return _run(dag, claim, services)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Raised outside of the user's task code, for example by a param, or by a claim that cannot be decoded.
        return AttemptResult(_classify(error))


def _run(dag: Any, claim: AttemptClaim, services: TaskServices) -> AttemptResult:
    if not claim.task_id and claim.callback is not None:
        return _run_dag_callback(dag, claim, claim.callback, services)
    original = dag.task_dict.get(claim.task_id)
    if original is None:
        return AttemptResult(Failure(f"DAG {claim.dag_id!r} no longer has a task {claim.task_id!r} ({claim.file})"))
    group = original.mapped_group
    if claim.callback is None and original.has_elements != (claim.map_index >= 0):
        text = "is mapped now" if original.has_elements else "is no longer mapped"
        return AttemptResult(
            Failure(
                f"task {claim.task_id!r} {text}, unlike when the run began ({claim.file}); start a new run",
                may_retry=False,
            )
        )
    # Rendering and executing change the operator, so each attempt works on a copy.
    task = copy.copy(original)
    if claim.stream is not None and claim.callback is None:
        held: Any = BatchServices(services, claim.task_id, claim.map_index)
        services = held
    context = build_context(task, dag, claim, services, _merge_params(dag, task, claim, services))
    if group is not None:
        context["ti"].unit = GroupUnit(group, _list_leaves(claim), context["ti"])
    if claim.callback is not None:
        # There is no current operator: if a callback times out, `on_kill` must not stop the task's work.
        with running(None, context, services):
            if original.is_mapped and claim.map_index >= 0 and not original.is_iterated:
                _find_element(original, claim, context, services)
            return _run_callbacks(task, claim.callback, context)
    if original.is_mapped:
        return _run_element(dag, original, claim, context, services)
    result = _run_task(dag, task, claim, context, services)
    return result if group is None else _add_label(dag, original, result, context, services)


def _run_task(
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
            _render(dag, task, context, texts)
            result = _execute(task, claim, context, services)
            xcoms = _collect_xcoms(task, result)
        except KeyboardInterrupt:
            raise
        except TaskDeferred as deferral:
            return AttemptResult(_defer(task, deferral))
        except AttemptIdle as idle:
            return AttemptResult(idle.ending)
        except StreamTaskEnd as end:
            return _end_by_event(end.ending, task, services)
        except BaseException as error:
            return AttemptResult(_end_late_stream(error, task, claim) or _classify(error, task))
        finally:
            if is_interrupted():  # the task's code may have swallowed the exception, or raised another
                kill(task)
    ti = context["ti"]
    return AttemptResult(Success(), xcoms, tuple(sorted(ti.skipped)), ti.skips_all)


def _list_leaves(claim: AttemptClaim) -> list[LeafItem]:
    return [LeafItem(index, text) for index, text in zip(claim.leaf_indexes, claim.elements, strict=True)]


def _run_element(dag: Any, mapped: Any, claim: AttemptClaim, context: Context, services: TaskServices) -> AttemptResult:
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
            return AttemptResult(_classify(error))
    result = _run_task(dag, task, claim, context, services, find_texts(data))
    return _add_label(dag, mapped, result, context, services)


def _run_elements(
    dag: Any, mapped: Any, claim: AttemptClaim, context: Context, services: TaskServices
) -> AttemptResult:
    """Run all elements of a task in this attempt."""
    # Imported here, because they import asyncio.
    from tidemill.dags.execution.element_runner import ElementRunner
    from tidemill.dags.execution.elements import PlaceLeft
    from tidemill.dags.execution.iterating import Iteration, describe_failures

    def render(operator: Any, of_element: Context, data: Any) -> None:
        _render(dag, operator, of_element, find_texts(data))

    def render_value(value: Any, of_element: Context, data: Any) -> Any:
        return Renderer(partial(build_environment, dag), of_element, (), find_texts(data)).render(value)

    runner = ElementRunner(mapped, context, services, render, render_value)
    with running(None, context, services):
        try:
            _call_all(mapped.on_execute_callback, context, "on_execute")
            counts = Iteration(mapped, runner, services, claim.try_number, claim.max_tries).run()
        except KeyboardInterrupt:
            raise
        except PlaceLeft:
            return AttemptResult(Loss(is_return=True))
        except BaseException as error:
            return AttemptResult(_classify(error))
        finally:
            if is_interrupted():
                for operator in runner.list_operators():
                    kill(operator)
    if counts.failed:
        text = describe_failures(counts)
        log.error("the attempt failed: %s", text)
        return AttemptResult(Failure(_make_storable(text), may_retry=False))
    if counts.skipped and not counts.success:
        return AttemptResult(Skip("all elements were skipped"))
    return AttemptResult(Success())


def _add_label(
    dag: Any, original: Any, result: AttemptResult, context: Context, services: TaskServices
) -> AttemptResult:
    """Return the result of an element's attempt with the label of the element, unless the attempt deferred."""
    if isinstance(result.ending, Deferral | Idle) or not original.map_index_template:
        return result
    return replace(result, label=_render_label(dag, original.map_index_template, context, services))


def _make_element(mapped: Any, claim: AttemptClaim, context: Context, services: TaskServices) -> tuple[Any, Any]:
    """Create the operator of an element, which the context gets, and return it with its values that are data."""
    if mapped.chunking is None:
        values, data = mapped.evaluate(_list_leaves(claim), context["ti"])
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


def _find_element(mapped: Any, claim: AttemptClaim, context: Context, services: TaskServices) -> None:
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
    return _make_storable(shorten(escape_surrogates(label), _MAX_LABEL - 3))


def _render(dag: Any, task: Any, context: Context, texts: Mapping[int, str]) -> None:
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


def _merge_params(dag: Any, task: Any, claim: AttemptClaim, services: TaskServices) -> dict[str, Any]:
    """Return the params of the run, and the task's params that the run does not set.

    Raises:
        ParamValidationError: A value of the run does not match the task's schema, or the task lacks a value.
    """
    given: dict[str, Any] = open_lists(decode(claim.params) or {}, services)
    own = wrap_params(f"task {task.task_id!r}", task.params) if task is not None else {}
    conf = decode(claim.conf) or {}
    values = dict(given)
    for name, param in own.items():
        if is_list_mark(conf.get(name)):
            continue  # the list was checked when the run was created
        if name in conf:
            values[name] = param.resolve(conf[name], name)
        elif param.has_default or name not in given:
            values[name] = param.resolve(name=name)
    return values


def _execute(task: Any, claim: AttemptClaim, context: Context, services: TaskServices) -> Any:
    resume = claim.resume
    if resume is None:
        if task.handles_streams or claim.checkpoint is not None:
            context["stream"] = read_cursor(claim.checkpoint)
        _call_all(task.on_execute_callback, context, "on_execute")
        task.pre_execute(context)
        result = task.execute(context)
    elif claim.stream is not None:
        # Only what a task emits that is no source of elements itself becomes its result.
        lists = task.do_xcom_push and (claim.map_index >= 0 or not task.is_generator)
        result = StreamRun(task, read_plan(resume.kwargs), claim.stream, context, services, lists=lists).run()
    else:
        method = _find_method(task, resume.method)
        kwargs = {**(decode(resume.kwargs) or {}), "event": decode(resume.payload)}
        # As in Airflow, a task may resume in its plain `execute(context)`.
        if resume.method == "execute" and not _accepts_event(method):
            del kwargs["event"]
        result = method(context, **kwargs)
    if claim.stream is None and task.handles_streams and claim.map_index < 0 and isinstance(result, list | tuple):
        # Imported here, because it imports asyncio.
        from tidemill.dags.attempt.yielding import emit_all

        # Maps over the task take elements, whether a stream or this list has them.
        emit_all((item for item in result), services)
    task.post_execute(context, result)
    return result


def _find_method(task: Any, name: object) -> Callable[..., Any]:
    method = getattr(task, name, None) if isinstance(name, str) else None
    if name == "":
        raise TaskFailed("the trigger fired an event that does not end the task, and next_method is not set; set it")
    if not callable(method):
        raise DagError(f"task {task.task_id!r}: {type(task).__name__} has no method {name!r} to resume with")
    found: Callable[..., Any] = method
    return found


def _accepts_event(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters
    return "event" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


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


def _defer(task: Any, deferral: TaskDeferred) -> AttemptEnding:
    """Check and serialize a deferral."""
    try:
        given = {} if deferral.kwargs is None else deferral.kwargs
        streams = task.handles_streams if deferral.streaming is None else deferral.streaming
        if deferral.method_name or not (streams and task.handles_streams):
            _check_deferral(task, deferral.method_name, given)
        idle_us = _read_duration(task, "idle_timeout", deferral.idle_timeout)
        kwargs = (
            StreamPlan(deferral.method_name, given, idle_us).write()
            if streams
            else encode(given, "kwargs of the deferral")
        )
        timeout = deferral.timeout
        timeout_us = _read_duration(task, "timeout", timeout)
        classpath, trigger_kwargs = write_trigger(deferral.trigger)
    except Exception as error:
        return _classify(error, task)
    try:
        find_key = getattr(deferral.trigger, "shared_stream_key", None)
        key = None if find_key is None else find_key()
        stream_key = None if key is None else write_key(key)
    except Exception as error:
        return Failure(_make_storable(f"shared_stream_key() of the trigger failed: {describe_error(error)}"))
    return Deferral(
        classpath,
        trigger_kwargs,
        deferral.method_name,
        kwargs,
        timeout_us,
        stream_key,
        streams=streams,
        idle_us=idle_us,
        acked=streams and stream_key is not None and is_acknowledged(type(deferral.trigger)),
    )


def _read_duration(task: Any, name: str, value: Any) -> int | None:
    """Return a duration in microseconds."""
    if value is None:
        return None
    duration = check_duration(f"task {task.task_id!r}", f"{name} of the deferral", value)
    return int(duration.total_seconds() * _MICROSECONDS)


def _check_deferral(task: Any, name: object, kwargs: object) -> None:
    """Check the method that a deferral names, and its arguments.

    Raises:
        DagError: There is no such method, or it does not accept the arguments.
    """
    if not name:
        raise DagError(
            f"task {task.task_id!r}: defer needs method_name, the method that resumes the task; only an operator with "
            "handle_trigger_events may leave it out"
        )
    check_continuation(task, name, kwargs)


def check_continuation(task: Any, name: object, kwargs: object) -> None:
    """Check that a method can resume the task with these arguments, before anything waits for the trigger.

    Raises:
        DagError: The method does not exist, or does not accept the arguments.
    """
    method = _find_method(task, name)
    owner = f"task {task.task_id!r}: the kwargs of the deferral"
    if not isinstance(kwargs, Mapping):
        raise DagError(f"{owner} must be a dict with the arguments of {name}, not {type(kwargs).__name__}")
    for key in kwargs:
        if not isinstance(key, str):
            raise DagError(f"{owner} have the key {key!r}; argument names must be strings")
        if key in ("context", "event"):
            raise DagError(f"{owner} have {key!r}, which tidemill passes to {name} itself; use another name")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return  # the method has no signature, for example because it is written in C
    event = {} if name == "execute" and not _accepts_event(method) else {"event": None}
    try:
        signature.bind(None, **kwargs, **event)
    except TypeError as error:
        raise DagError(
            f"task {task.task_id!r}: {type(task).__name__}.{name} does not accept the arguments of the deferral "
            f"(context, {', '.join([*kwargs, *event])}): {error}"
        ) from None


def _end_late_stream(error: BaseException, task: Any, claim: AttemptClaim) -> AttemptEnding | None:
    """Return the ending of an attempt whose stream has exceeded its time limit; None: it was interrupted for another
    reason.
    """
    stream = claim.stream
    if type(error) is not TaskTimeout or stream is None or stream.due_us is None or stream.due_us != claim.deadline_us:
        return None
    kill(task)
    # As if it had been too late while no attempt ran.
    text = f"the stream did not end before the timeout of the {'sensor' if task.is_sensor else 'deferral'}"
    if task.soft_fail or task.never_fail:
        return _classify(TaskSkipped(text), task)
    return _classify(SensorTimeout(text) if task.is_sensor else TaskDeferralTimeout(text), task)


def _end_by_event(ending: EndingEvent, task: Any, services: TaskServices) -> AttemptResult:
    """Return the result of an attempt that an event of its stream ends."""
    if ending.state == "success":
        return AttemptResult(Success(), ending.xcoms)
    for key, value in ending.xcoms:
        services.push_xcom(key, value)
    if ending.state == "skipped":
        return AttemptResult(Skip())
    error = ending.error.strip() or "the trigger fired a TaskFailedEvent"
    return AttemptResult(_classify(TaskDeferralError(error), task))


def _classify(error: BaseException, task: Any = None) -> AttemptEnding:
    """Return the ending for an exception, and log the exception with its traceback."""
    if isinstance(error, TaskSkipped):
        reason = str(error)
        log.info("skipped: %s", reason or "TaskSkipped was raised")
        return Skip(_make_storable(reason))
    if isinstance(error, TaskTimeout) and task is not None:
        kill(task)
    # The frames of this module would only distract in the traceback.
    shown = error.with_traceback(_skip_own_frames(error))
    log.error("the attempt failed: %s", describe_error(error), exc_info=(type(error), shown, shown.__traceback__))
    if isinstance(error, SystemExit):
        return Failure(_make_storable(f"the task called sys.exit({error.code!r})"))
    return Failure(_make_storable(describe_error(error)), not isinstance(error, TaskFailed), write_origin(shown))


def _make_storable(text: str) -> str:
    """Return a text that every database accepts: without NUL and lone surrogates, and cut at the limit."""
    return shorten(escape_surrogates(text).replace("\0", "\\x00"), _MAX_ERROR)


def _skip_own_frames(error: BaseException) -> Any:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and frame.tb_frame.f_globals.get("__name__") == __name__:
        frame = frame.tb_next
    return frame


def kill(task: Any) -> None:
    """Call `on_kill` of a task that is stopped from outside, at most once; exceptions are logged."""
    try:
        with killing(task) as first:
            if first:
                task.on_kill()
    except KeyboardInterrupt:
        raise
    except BaseException:  # including `SystemExit`: the cause of the kill decides the ending
        log.exception("on_kill of task %r failed", task.task_id)


def _explain_callback(callback: CallbackClaim) -> dict[str, Any]:
    """Return the context keys that describe the event to a callback."""
    error = callback.error
    return {"exception": None if error is None else rebuild_exception(error, callback.origin), "reason": error}


def _run_callbacks(task: Any, callback: CallbackClaim, context: Context) -> AttemptResult:
    context = context.extend(_explain_callback(callback))
    failed = _call_all(getattr(task, f"{callback.name}_callback", ()), context, callback.name)
    return AttemptResult(Failure(failed, may_retry=False) if failed else Success())


def _run_dag_callback(dag: Any, claim: AttemptClaim, callback: CallbackClaim, services: TaskServices) -> AttemptResult:
    """Run a callback of the DAG run, which has no task."""
    context = build_context(None, dag, claim, services, _merge_params(dag, None, claim, services))
    context = context.extend(_explain_callback(callback))
    with running(None, context, services):
        failed = _call_all(getattr(dag, f"{callback.name}_callback", ()), context, callback.name)
    return AttemptResult(Failure(failed, may_retry=False) if failed else Success())


def _call_all(callbacks: tuple[Callable[..., Any], ...], context: Context, name: str) -> str:
    """Call all callbacks in order; return the first error, or an empty string."""
    failed = ""
    for callback in callbacks:
        try:
            callback(context)
        except (KeyboardInterrupt, TaskTimeout):
            raise
        except BaseException as error:  # including `SystemExit`
            log.exception("the %s callback failed", name)
            failed = failed or _make_storable(f"the {name} callback failed: {describe_error(error)}")
    return failed
