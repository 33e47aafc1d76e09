"""Authoring of DAGs: tasks in Python with dependencies, schedules, and waits for external events.

This module exports everything that a DAG file imports, under the names of `airflow.sdk`. Importing it is cheap: each
name is loaded from its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.lazy_exports import load_export

if TYPE_CHECKING:
    from tidemill.dags.attempt.current import get_current_context
    from tidemill.dags.attempt.lazy_context import Context
    from tidemill.dags.attempt.lazy_sequence import LazySequence
    from tidemill.dags.attempt.streaming import DeliveredEvent, StreamAction
    from tidemill.dags.context.connection import BaseHook, Connection
    from tidemill.dags.context.variable import Variable
    from tidemill.dags.decorators import setup, task, teardown
    from tidemill.dags.definition import DAG, dag
    from tidemill.dags.edges import EdgeModifier, Label, chain, chain_linear, cross_downstream
    from tidemill.dags.exceptions import (
        AirflowException,
        AirflowFailException,
        AirflowSensorTimeout,
        AirflowSkipException,
        AirflowTaskTimeout,
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
    from tidemill.dags.group import TaskGroup
    from tidemill.dags.group_function import task_group
    from tidemill.dags.looping import LoopDecision, LoopState
    from tidemill.dags.operator import BaseOperator
    from tidemill.dags.operators.bash import BashOperator
    from tidemill.dags.operators.empty import EmptyOperator
    from tidemill.dags.operators.http import HttpOperator
    from tidemill.dags.operators.http_stream import GraphStreamOperator, HttpStreamOperator
    from tidemill.dags.operators.python import BranchPythonOperator, PythonOperator, ShortCircuitOperator
    from tidemill.dags.operators.stream import StreamOperator
    from tidemill.dags.operators.subprocess import SubprocessOperator
    from tidemill.dags.params import Param
    from tidemill.dags.sensors.base import BaseSensorOperator, PokeReturnValue
    from tidemill.dags.sensors.file import FileSensor
    from tidemill.dags.sensors.http import HttpSensor
    from tidemill.dags.sensors.process import ProcessExitSensor
    from tidemill.dags.sensors.python import PythonSensor
    from tidemill.dags.sensors.temporal import (
        DateTimeSensor,
        DateTimeSensorAsync,
        TimeDeltaSensor,
        TimeDeltaSensorAsync,
        TimeSensor,
        TimeSensorAsync,
    )
    from tidemill.dags.templates import literal
    from tidemill.dags.xcom_arg import XComArg
    from tidemill.triggers.base import StartTriggerArgs

_MODULES = {
    ".context.connection": ("BaseHook", "Connection"),
    ".attempt.lazy_context": ("Context",),
    ".attempt.lazy_sequence": ("LazySequence",),
    ".looping": ("LoopDecision", "LoopState"),
    ".attempt.current": ("get_current_context",),
    ".definition": ("DAG", "dag"),
    ".decorators": ("setup", "task", "teardown"),
    ".edges": ("EdgeModifier", "Label", "chain", "chain_linear", "cross_downstream"),
    ".exceptions": (
        "AirflowException",
        "AirflowFailException",
        "AirflowSensorTimeout",
        "AirflowSkipException",
        "AirflowTaskTimeout",
        "DagError",
        "SensorTimeout",
        "TaskDeferralError",
        "TaskDeferralTimeout",
        "TaskDeferred",
        "TaskError",
        "TaskFailed",
        "TaskSkipped",
        "TaskTimeout",
    ),
    ".group": ("TaskGroup",),
    ".group_function": ("task_group",),
    ".operator": ("BaseOperator",),
    ".operators.bash": ("BashOperator",),
    ".operators.empty": ("EmptyOperator",),
    ".operators.http": ("HttpOperator",),
    ".operators.http_stream": ("GraphStreamOperator", "HttpStreamOperator"),
    ".operators.python": ("BranchPythonOperator", "PythonOperator", "ShortCircuitOperator"),
    ".operators.stream": ("StreamOperator",),
    ".operators.subprocess": ("SubprocessOperator",),
    ".params": ("Param",),
    ".sensors.base": ("BaseSensorOperator", "PokeReturnValue"),
    ".sensors.file": ("FileSensor",),
    ".sensors.http": ("HttpSensor",),
    ".sensors.process": ("ProcessExitSensor",),
    ".sensors.python": ("PythonSensor",),
    ".sensors.temporal": (
        "DateTimeSensor",
        "DateTimeSensorAsync",
        "TimeDeltaSensor",
        "TimeDeltaSensorAsync",
        "TimeSensor",
        "TimeSensorAsync",
    ),
    ".attempt.streaming": ("DeliveredEvent", "StreamAction"),
    ".templates": ("literal",),
    ".context.variable": ("Variable",),
    ".xcom_arg": ("XComArg",),
    "tidemill.triggers.base": ("StartTriggerArgs",),
}
__all__ = [
    "DAG",
    "AirflowException",
    "AirflowFailException",
    "AirflowSensorTimeout",
    "AirflowSkipException",
    "AirflowTaskTimeout",
    "BaseHook",
    "BaseOperator",
    "BaseSensorOperator",
    "BashOperator",
    "BranchPythonOperator",
    "Connection",
    "Context",
    "DagError",
    "DateTimeSensor",
    "DateTimeSensorAsync",
    "DeliveredEvent",
    "EdgeModifier",
    "EmptyOperator",
    "FileSensor",
    "GraphStreamOperator",
    "HttpOperator",
    "HttpSensor",
    "HttpStreamOperator",
    "Label",
    "LazySequence",
    "LoopDecision",
    "LoopState",
    "Param",
    "PokeReturnValue",
    "ProcessExitSensor",
    "PythonOperator",
    "PythonSensor",
    "SensorTimeout",
    "ShortCircuitOperator",
    "StartTriggerArgs",
    "StreamAction",
    "StreamOperator",
    "SubprocessOperator",
    "TaskDeferralError",
    "TaskDeferralTimeout",
    "TaskDeferred",
    "TaskError",
    "TaskFailed",
    "TaskGroup",
    "TaskSkipped",
    "TaskTimeout",
    "TimeDeltaSensor",
    "TimeDeltaSensorAsync",
    "TimeSensor",
    "TimeSensorAsync",
    "Variable",
    "XComArg",
    "chain",
    "chain_linear",
    "cross_downstream",
    "dag",
    "get_current_context",
    "literal",
    "setup",
    "task",
    "task_group",
    "teardown",
]


def __getattr__(name: str) -> object:
    return load_export(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
