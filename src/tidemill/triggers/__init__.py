"""Triggers: small asynchronous waiters that can share one poll of their upstream.

This module exports everything that you need to write a trigger, and all built-in triggers. Each name is loaded from its
module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.lazy_exports import load_export

if TYPE_CHECKING:
    from tidemill.triggers.base import (
        BaseEventTrigger,
        BaseTaskEndEvent,
        BaseTrigger,
        StartTriggerArgs,
        TaskFailedEvent,
        TaskSkippedEvent,
        TaskSuccessEvent,
        TriggerEvent,
    )
    from tidemill.triggers.builtin.directory import DirectoryTrigger
    from tidemill.triggers.builtin.file import FileTrigger
    from tidemill.triggers.builtin.http import HttpTrigger
    from tidemill.triggers.builtin.kafka import KafkaTrigger
    from tidemill.triggers.builtin.process import ProcessExitTrigger
    from tidemill.triggers.builtin.sqs import SqsTrigger
    from tidemill.triggers.builtin.temporal import DateTimeTrigger, TimeDeltaTrigger
    from tidemill.triggers.producers.kafka import kafka_stream
    from tidemill.triggers.producers.kafka_member import kafka_claim
    from tidemill.triggers.producers.sqs import sqs_stream
    from tidemill.triggers.shared_stream import reject_shared_stream_event
    from tidemill.triggers.stream_api import (
        AckTimeout,
        AdvanceItem,
        AdvanceOutcome,
        SharedStreamProducer,
        StreamEnded,
        SubscriberOverflow,
    )

_MODULES = {
    ".base": (
        "BaseEventTrigger",
        "BaseTaskEndEvent",
        "BaseTrigger",
        "StartTriggerArgs",
        "TaskFailedEvent",
        "TaskSkippedEvent",
        "TaskSuccessEvent",
        "TriggerEvent",
    ),
    ".builtin.directory": ("DirectoryTrigger",),
    ".builtin.file": ("FileTrigger",),
    ".builtin.http": ("HttpTrigger",),
    ".builtin.kafka": ("KafkaTrigger",),
    ".builtin.process": ("ProcessExitTrigger",),
    ".builtin.sqs": ("SqsTrigger",),
    ".builtin.temporal": (
        "DateTimeTrigger",
        "TimeDeltaTrigger",
    ),
    ".producers.kafka": ("kafka_stream",),
    ".producers.kafka_member": ("kafka_claim",),
    ".producers.sqs": ("sqs_stream",),
    ".stream_api": (
        "AckTimeout",
        "AdvanceItem",
        "AdvanceOutcome",
        "SharedStreamProducer",
        "StreamEnded",
        "SubscriberOverflow",
    ),
    ".shared_stream": ("reject_shared_stream_event",),
}

__all__ = [
    "AckTimeout",
    "AdvanceItem",
    "AdvanceOutcome",
    "BaseEventTrigger",
    "BaseTaskEndEvent",
    "BaseTrigger",
    "DateTimeTrigger",
    "DirectoryTrigger",
    "FileTrigger",
    "HttpTrigger",
    "KafkaTrigger",
    "ProcessExitTrigger",
    "SharedStreamProducer",
    "SqsTrigger",
    "StartTriggerArgs",
    "StreamEnded",
    "SubscriberOverflow",
    "TaskFailedEvent",
    "TaskSkippedEvent",
    "TaskSuccessEvent",
    "TimeDeltaTrigger",
    "TriggerEvent",
    "kafka_claim",
    "kafka_stream",
    "reject_shared_stream_event",
    "sqs_stream",
]


def __getattr__(name: str) -> object:
    return load_export(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
