"""Which calls change nothing: they are answered beside the transactions that write."""

from __future__ import annotations

from typing import Any

from tidemill.store import calls
from tidemill.store.call import Call

READS: frozenset[type[Call[Any]]] = frozenset(
    {
        calls.CountStore,
        calls.DescribeTriggers,
        calls.GetConnection,
        calls.GetDag,
        calls.GetEarlierRun,
        calls.GetRun,
        calls.GetVariable,
        calls.GetXCom,
        calls.HeldTriggers,
        calls.ListConnections,
        calls.ListDags,
        calls.ListFiles,
        calls.ListOwnedTriggers,
        calls.ListPools,
        calls.ListRuns,
        calls.ListServices,
        calls.ListTasks,
        calls.ListVariables,
        calls.ListXComs,
        calls.ReadLog,
        calls.ListCallbacks,
        calls.ReadCallbackLog,
        calls.TaskHistory,
        calls.WatchRuns,
    }
)
