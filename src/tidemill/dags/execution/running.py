"""Runs one attempt of a task or one of its callbacks: everything between the claim and the report.

Processes, timeouts, signals and logs belong to the caller. Whatever the user's code does, the ending is returned as an
`AttemptResult`; only `KeyboardInterrupt` propagates.
"""

from __future__ import annotations

import copy
from typing import Any

from tidemill.core.tasks.endings import Failure, Success
from tidemill.dags.attempt.batch_services import BatchServices
from tidemill.dags.attempt.current import running
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.attempt.task_services import AttemptClaim, CallbackClaim, TaskServices
from tidemill.dags.context.context import build_context
from tidemill.dags.context.dag_run import open_lists
from tidemill.dags.execution.callbacks import call_all, explain_callback, run_callbacks
from tidemill.dags.execution.element import add_label, find_element, list_leaves, run_element
from tidemill.dags.execution.endings import classify
from tidemill.dags.execution.task_run import run_task
from tidemill.dags.group_unit import GroupUnit
from tidemill.dags.long_lists import is_list_mark
from tidemill.dags.params import wrap_params
from tidemill.runtime.json.codec import decode


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
        return AttemptResult(classify(error))


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
        context["ti"].unit = GroupUnit(group, list_leaves(claim), context["ti"])
    if claim.callback is not None:
        # There is no current operator: if a callback times out, `on_kill` must not stop the task's work.
        with running(None, context, services):
            if original.is_mapped and claim.map_index >= 0 and not original.is_iterated:
                find_element(original, claim, context, services)
            return run_callbacks(task, claim.callback, context)
    if original.is_mapped:
        return run_element(dag, original, claim, context, services)
    result = run_task(dag, task, claim, context, services)
    return result if group is None else add_label(dag, original, result, context, services)


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


def _run_dag_callback(dag: Any, claim: AttemptClaim, callback: CallbackClaim, services: TaskServices) -> AttemptResult:
    """Run a callback of the DAG run, which has no task."""
    context = build_context(None, dag, claim, services, _merge_params(dag, None, claim, services))
    context = context.extend(explain_callback(callback))
    with running(None, context, services):
        failed = call_all(getattr(dag, f"{callback.name}_callback", ()), context, callback.name)
    return AttemptResult(Failure(failed, may_retry=False) if failed else Success())
