"""The public API of shared streams: the interface for producers, and how a filter rejects an event.

The names and the module path are the same as in Airflow.
"""

from __future__ import annotations

import structlog

from tidemill.core.streams.members import RejectOutcome
from tidemill.triggers.stream_api import (
    AckTimeout,
    AdvanceItem,
    AdvanceOutcome,
    SharedStreamProducer,
    StreamEnded,
    SubscriberObserver,
    SubscriberOverflow,
)
from tidemill.triggers.streams.manager import DEFAULT_SUBSCRIBER_QUEUE_MAX, SharedStreamManager
from tidemill.triggers.streams.report import StreamReport
from tidemill.triggers.streams.routing import EventRoute, route
from tidemill.triggers.streams.stream_counts import StreamCounts
from tidemill.triggers.streams.subscription import find_current

__all__ = [
    "DEFAULT_SUBSCRIBER_QUEUE_MAX",
    "AckTimeout",
    "AdvanceItem",
    "AdvanceOutcome",
    "EventRoute",
    "SharedStreamManager",
    "SharedStreamProducer",
    "StreamCounts",
    "StreamEnded",
    "StreamReport",
    "SubscriberObserver",
    "SubscriberOverflow",
    "reject_shared_stream_event",
    "route",
]

#: Airflow's name, used by its tests.
_SubscriberOverflow = SubscriberOverflow

log = structlog.get_logger(__name__)


def reject_shared_stream_event() -> None:
    """Reject the raw event that the calling filter is processing, permanently.

    Call this in `filter_shared_stream` of an acknowledged stream, or in a task started by the filter, before the next
    event is requested. The event is resolved for this subscriber at once, regardless of events derived from it. The
    producer learns of the reject and is expected to dead-letter the event. A second call for the same event does
    nothing; a call outside of a filter logs a warning and does nothing.
    """
    current = find_current()
    if current is None:
        log.warning(
            "reject_shared_stream_event called outside an ack-mode binding window; ignored: call it in "
            "filter_shared_stream while the event is being processed"
        )
        return
    subscription, sent = current
    if subscription.reject(sent) is RejectOutcome.STALE:
        log.warning(
            "reject_shared_stream_event called outside an ack-mode binding window; ignored: the filter has moved past "
            "the event, or no longer holds it",
            trigger_id=subscription.member.name,
            position=sent.position,
        )
