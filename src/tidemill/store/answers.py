"""Answers named calls: which function of `queries` answers which call.

Invariants: every call of `calls` has one function here; a call runs in a transaction, or in a savepoint of one, that is
rolled back if it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection

from tidemill.core.errors import InvariantError
from tidemill.store import calls
from tidemill.store.call import Call
from tidemill.store.context import CallContext
from tidemill.store.queries import (
    callbacks,
    dags,
    new_runs,
    people,
    pools,
    progress,
    reserved_triggers,
    runs,
    scheduler_turns,
    services,
    task_logs,
    task_triggers,
    task_values,
    trigger_abouts,
    worker_turns,
    xcoms,
)

T = TypeVar("T")

Function = Callable[[Connection, Any, CallContext], Any]


def answer(connection: Connection, request: Call[T], context: CallContext) -> T:
    """Answer a call.

    Args:
        connection: In a transaction.
        request: The call.
        context: The time, and what the transaction leaves besides rows.

    Raises:
        CallRefusedError: It is refused; the transaction has to be rolled back to where the call began.
    """
    function = FUNCTIONS.get(type(request))
    if function is None:
        raise InvariantError(f"no function answers the call {type(request).__name__}")
    result: T = function(connection, request, context)
    return result


FUNCTIONS: dict[type[Call[Any]], Function] = {
    calls.BeginService: services.begin_service,
    calls.BeatService: lambda c, r, x: services.beat_service(c, r.service, x),
    calls.EndService: lambda c, r, x: services.end_service(c, r.service, None, x),
    calls.LoseService: lambda c, r, x: services.end_service(c, r.service, r.by, x),
    calls.LoseOthers: services.lose_others,
    calls.ListServices: services.list_services,
    calls.StoreFile: dags.store_file,
    calls.RemoveFile: lambda c, r, x: dags.remove_file(c, r.path, x),
    calls.ListFiles: lambda c, r, x: dags.list_files(c, r),
    calls.SchedulerTurn: scheduler_turns.take_scheduler_turn,
    calls.WorkerTurn: worker_turns.take_worker_turn,
    calls.ClaimTriggers: task_triggers.claim_task_triggers,
    calls.StoreEvents: task_triggers.store_task_events,
    calls.FailTrigger: task_triggers.fail_trigger,
    calls.ReleaseTriggers: task_triggers.release_triggers,
    calls.ListOwnedTriggers: lambda c, r, x: reserved_triggers.list_owned(c, r),
    calls.ReserveTriggers: reserved_triggers.reserve_triggers,
    calls.HeldTriggers: lambda c, r, x: task_triggers.find_stopped(c, r),
    calls.GetEarlierRun: lambda c, r, x: runs.get_earlier_run(c, r),
    calls.GetXCom: lambda c, r, x: xcoms.get_xcoms(c, r),
    calls.PushXCom: task_values.push_xcom,
    calls.GetVariable: lambda c, r, x: task_values.get_variable(c, r.key, x),
    calls.SetVariable: task_values.set_variable,
    calls.DeleteVariable: lambda c, r, x: task_values.delete_variable(c, r.key),
    calls.ListVariables: task_values.list_variables,
    calls.GetConnection: lambda c, r, x: task_values.get_connection(c, r.id, x),
    calls.SetConnection: task_values.set_connection,
    calls.DeleteConnection: lambda c, r, x: task_values.delete_connection(c, r.id),
    calls.ListConnections: lambda c, r, x: task_values.list_connections(c, r),
    calls.GetTaskState: lambda c, r, x: task_values.get_task_state(c, r.task, r.epoch, r.key),
    calls.SetTaskState: task_values.set_task_state,
    calls.DeleteTaskState: lambda c, r, x: bool(task_values.delete_task_state(c, r.task, r.epoch, r.key)),
    calls.ClearTaskState: lambda c, r, x: task_values.delete_task_state(c, r.task, r.epoch, None),
    calls.AppendLog: lambda c, r, x: task_logs.append_logs(c, r.parts),
    calls.ListDags: lambda c, r, x: dags.list_dags(c, r),
    calls.GetDag: lambda c, r, x: dags.get_dag(c, r),
    calls.PauseDag: dags.pause_dag,
    calls.CreateRun: new_runs.create_run,
    calls.CancelRun: runs.cancel_run,
    calls.ListRuns: lambda c, r, x: runs.list_runs(c, r),
    calls.GetRun: lambda c, r, x: runs.get_run(c, r),
    calls.WatchRuns: lambda c, r, x: progress.watch_runs(c, r),
    calls.ListTasks: lambda c, r, x: people.list_tasks(c, r),
    calls.DescribeTriggers: trigger_abouts.describe_triggers,
    calls.TaskHistory: lambda c, r, x: people.list_history(c, r),
    calls.ReadLog: lambda c, r, x: people.read_task_log(c, r),
    calls.ListCallbacks: lambda c, r, x: callbacks.list_callbacks(c, r),
    calls.ReadCallbackLog: lambda c, r, x: callbacks.read_callback_log(c, r),
    calls.ListXComs: lambda c, r, x: people.list_task_xcoms(c, r),
    calls.ClearTasks: people.clear_tasks,
    calls.MarkTasks: people.mark_tasks,
    calls.CountStore: lambda c, r, x: people.count_store(c),
    calls.ListPools: lambda c, r, x: pools.list_pools(c),
    calls.SetPool: pools.set_pool,
    calls.DeletePool: lambda c, r, x: pools.delete_pool(c, r.name),
}
