"""Shared streams, as users import them: what a producer implements and is given, and how a filter rejects an event.

The names and their module are Airflow's.
"""

from __future__ import annotations

import structlog

from tidemill.core.streams.members import Refusal
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
from tidemill.triggers.streams.routing import Routed, route
from tidemill.triggers.streams.stream_counts import StreamCounts
from tidemill.triggers.streams.subscription import find_current

__all__ = [
    "DEFAULT_SUBSCRIBER_QUEUE_MAX",
    "AckTimeout",
    "AdvanceItem",
    "AdvanceOutcome",
    "Routed",
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

#: Its name in Airflow, whose tests use it.
_SubscriberOverflow = SubscriberOverflow

log = structlog.get_logger(__name__)


def reject_shared_stream_event() -> None:
    """Refuse the raw event that the calling filter is on, for good.

    Call it in `filter_shared_stream` of a stream that is acknowledged, or in a task that the filter has started, before
    the next event is requested. The event is resolved for this subscriber at once, whatever was derived from it; the
    producer is told that it was rejected and is expected to make a dead letter of it. Anywhere else it logs a warning
    and does nothing; a second time it does nothing.
    """
    current = find_current()
    if current is None:
        log.warning(
            "reject_shared_stream_event called outside an ack-mode binding window; ignored: call it in "
            "filter_shared_stream, while it is on the event"
        )
        return
    subscription, sent = current
    if subscription.reject(sent) is Refusal.STALE:
        log.warning(
            "reject_shared_stream_event called outside an ack-mode binding window; ignored: the filter has moved past "
            "the event, or does not hold it any more",
            trigger_id=subscription.member.name,
            position=sent.position,
        )
