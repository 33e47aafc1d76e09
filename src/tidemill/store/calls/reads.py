"""The calls that change nothing; they are answered outside the write transactions."""

from __future__ import annotations

from typing import Any

from tidemill.store.calls import all_calls
from tidemill.store.calls.call import Call

READS: frozenset[type[Call[Any]]] = frozenset(
    {
        all_calls.CountStore,
        all_calls.DescribeTriggers,
        all_calls.GetConnection,
        all_calls.GetDag,
        all_calls.GetEarlierRun,
        all_calls.GetRun,
        all_calls.GetVariable,
        all_calls.GetXCom,
        all_calls.HeldTriggers,
        all_calls.ListConnections,
        all_calls.ListDags,
        all_calls.ListFiles,
        all_calls.ListOwnedTriggers,
        all_calls.ListPools,
        all_calls.ListRuns,
        all_calls.ListSessions,
        all_calls.ListTasks,
        all_calls.ListVariables,
        all_calls.ListXComs,
        all_calls.ReadLog,
        all_calls.ListCallbacks,
        all_calls.ReadCallbackLog,
        all_calls.TaskHistory,
        all_calls.WatchRuns,
    }
)
