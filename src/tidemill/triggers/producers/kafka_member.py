"""The member id of a shared stream over Kafka in its consumer group, and the claim for its trigger list.

One host at a time runs a list, so the member id is derived from the list rather than the host: a host that takes over a
list fences the previous one. Outside of lists, the host name distinguishes members.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from tidemill.config.settings import Settings
from tidemill.runtime.identity import find_worker_name
from tidemill.triggers.stream_api import LIST_NAME


def kafka_claim(topic: str, group: str) -> str:
    """Return the value for `BaseEventTrigger.upstream_claim` of a trigger over Kafka.

    If two lists read one topic in one group, each would see only a part of the messages, and each would commit events
    of the other. The host therefore refuses to start a second list with the same claim.

    Example:
        >>> kafka_claim("orders", "order-triggers")
        'kafka orders/order-triggers'
    """
    return f"kafka {topic}/{group}"


def build_member_id(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Return the static member id for a new stream: at most 249 letters, digits, '.', '_' and '-'.

    Raises:
        ConfigError: There is no list, and the host name cannot be part of a Kafka id.
    """
    kafka = settings.kafka
    group, topic, listed = kafka.consumer_group, kafka.source_topic, LIST_NAME.get()
    if not listed:
        return f"{group}.{find_worker_name(settings, environ)}.triggers-{_digest(topic)[:8]}"
    return f"{group}.triggers-{_digest(listed, group, topic)[:32]}"


def _digest(*parts: str) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        found.update(b"%d:%s" % (len(data), data))
    return found.hexdigest()
