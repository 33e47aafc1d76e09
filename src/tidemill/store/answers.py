"""Dispatches named calls to the functions of `queries`.

Invariants: every call of `calls` has exactly one function here. A call runs inside a transaction or a savepoint, which
is rolled back if the function raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection

from tidemill.core.errors import InvariantError
from tidemill.store.calls import all_calls
from tidemill.store.calls.call import Call
from tidemill.store.context import CallContext
from tidemill.store.queries.dags import (
    callbacks,
    dags,
    new_runs,
    pools,
    progress,
    runs,
    task_admin,
    task_logs,
    task_values,
    trigger_abouts,
    xcoms,
)
from tidemill.store.queries.sessions import reserved_triggers, scheduler_turns, services, task_triggers, worker_turns

T = TypeVar("T")

Function = Callable[[Connection, Any, CallContext], Any]


def answer(connection: Connection, request: Call[T], context: CallContext) -> T:
    """Answer a call.

    Args:
        connection: A connection inside a transaction.
        request: The call.
        context: The transaction's time, cipher and side effects.

    Raises:
        CallRefusedError: The call was refused; the caller must roll back to the state before the call.
    """
    function = FUNCTIONS.get(type(request))
    if function is None:
        raise InvariantError(f"no function answers the call {type(request).__name__}")
    result: T = function(connection, request, context)
    return result


FUNCTIONS: dict[type[Call[Any]], Function] = {
    all_calls.BeginSession: services.begin_service_session,
    all_calls.BeatSession: lambda c, r, x: services.beat_service_session(c, r.session, x),
    all_calls.EndSession: lambda c, r, x: services.end_service_session(c, r.session, None, x),
    all_calls.LoseSession: lambda c, r, x: services.end_service_session(c, r.session, r.by, x),
    all_calls.LoseOtherSessions: services.lose_other_sessions,
    all_calls.ListSessions: services.list_sessions,
    all_calls.StoreFile: dags.store_file,
    all_calls.RemoveFile: lambda c, r, x: dags.remove_file(c, r.path, x),
    all_calls.ListFiles: lambda c, r, x: dags.list_files(c, r),
    all_calls.SchedulerTurn: scheduler_turns.take_scheduler_turn,
    all_calls.WorkerTurn: worker_turns.take_worker_turn,
    all_calls.ClaimTriggers: task_triggers.claim_task_triggers,
    all_calls.StoreEvents: task_triggers.store_task_events,
    all_calls.FailTrigger: task_triggers.fail_trigger,
    all_calls.ReleaseTriggers: task_triggers.release_triggers,
    all_calls.ListOwnedTriggers: lambda c, r, x: reserved_triggers.list_owned(c, r),
    all_calls.ReserveTriggers: reserved_triggers.reserve_triggers,
    all_calls.HeldTriggers: lambda c, r, x: task_triggers.find_stopped(c, r),
    all_calls.GetEarlierRun: lambda c, r, x: runs.get_earlier_run(c, r),
    all_calls.GetXCom: lambda c, r, x: xcoms.get_xcoms(c, r),
    all_calls.PushXCom: task_values.push_xcom,
    all_calls.GetVariable: lambda c, r, x: task_values.get_variable(c, r.key, x),
    all_calls.SetVariable: task_values.set_variable,
    all_calls.DeleteVariable: lambda c, r, x: task_values.delete_variable(c, r.key),
    all_calls.ListVariables: task_values.list_variables,
    all_calls.GetConnection: lambda c, r, x: task_values.get_connection(c, r.id, x),
    all_calls.SetConnection: task_values.set_connection,
    all_calls.DeleteConnection: lambda c, r, x: task_values.delete_connection(c, r.id),
    all_calls.ListConnections: lambda c, r, x: task_values.list_connections(c, r),
    all_calls.GetTaskState: lambda c, r, x: task_values.get_task_state(c, r.task, r.epoch, r.key),
    all_calls.SetTaskState: task_values.set_task_state,
    all_calls.DeleteTaskState: lambda c, r, x: bool(task_values.delete_task_state(c, r.task, r.epoch, r.key)),
    all_calls.ClearTaskState: lambda c, r, x: task_values.delete_task_state(c, r.task, r.epoch, None),
    all_calls.AppendLog: lambda c, r, x: task_logs.append_logs(c, r.parts),
    all_calls.ListDags: lambda c, r, x: dags.list_dags(c, r),
    all_calls.GetDag: lambda c, r, x: dags.get_dag(c, r),
    all_calls.PauseDag: dags.pause_dag,
    all_calls.CreateRun: new_runs.create_run,
    all_calls.CancelRun: runs.cancel_run,
    all_calls.ListRuns: lambda c, r, x: runs.list_runs(c, r),
    all_calls.GetRun: lambda c, r, x: runs.get_run(c, r),
    all_calls.WatchRuns: lambda c, r, x: progress.watch_runs(c, r),
    all_calls.ListTasks: lambda c, r, x: task_admin.list_tasks(c, r),
    all_calls.DescribeTriggers: trigger_abouts.describe_triggers,
    all_calls.TaskHistory: lambda c, r, x: task_admin.list_history(c, r),
    all_calls.ReadLog: lambda c, r, x: task_admin.read_task_log(c, r),
    all_calls.ListCallbacks: lambda c, r, x: callbacks.list_callbacks(c, r),
    all_calls.ReadCallbackLog: lambda c, r, x: callbacks.read_callback_log(c, r),
    all_calls.ListXComs: lambda c, r, x: task_admin.list_task_xcoms(c, r),
    all_calls.ClearTasks: task_admin.clear_tasks,
    all_calls.MarkTasks: task_admin.mark_tasks,
    all_calls.CountStore: lambda c, r, x: task_admin.count_store(c),
    all_calls.ListPools: lambda c, r, x: pools.list_pools(c),
    all_calls.SetPool: pools.set_pool,
    all_calls.DeletePool: lambda c, r, x: pools.delete_pool(c, r.name),
}
