"""Shared streams, as users import them: what a producer implements and is given, and how a filter refuses an event.

The names and their module are Airflow's.
"""

from tidemill.triggers.streams.api import (
    AckTimeout,
    AdvanceItem,
    AdvanceOutcome,
    SharedStreamProducer,
    StreamEnded,
    SubscriberOverflow,
)
from tidemill.triggers.streams.manager import (
    DEFAULT_SUBSCRIBER_QUEUE_MAX,
    SharedStreamManager,
    StreamReport,
    reject_shared_stream_event,
)

__all__ = [
    "DEFAULT_SUBSCRIBER_QUEUE_MAX",
    "AckTimeout",
    "AdvanceItem",
    "AdvanceOutcome",
    "SharedStreamManager",
    "SharedStreamProducer",
    "StreamEnded",
    "StreamReport",
    "SubscriberOverflow",
    "reject_shared_stream_event",
]
