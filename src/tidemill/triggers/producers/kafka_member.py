"""The identity of a shared stream over Kafka in its consumer group, and its claim for its list of triggers.

A list is run by one host at a time, so its member id is that of the list, not of the host: a host that takes over a
list fences the one that had it. Without a list, only the host distinguishes members.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from tidemill.config.settings import Settings
from tidemill.runtime.identity import find_worker_name
from tidemill.triggers.stream_api import LIST_NAME


def kafka_claim(topic: str, group: str) -> str:
    """Return what `BaseEventTrigger.upstream_claim` is to return for a trigger over Kafka.

    Two lists that read one topic as one group would each see a part of the messages, and the events of one would be
    committed by the other; of two lists with the same claim the host refuses to start the second.

    Example:
        >>> kafka_claim("orders", "order-triggers")
        'kafka orders/order-triggers'
    """
    return f"kafka {topic}/{group}"


def build_member_id(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Return the static member id of a stream that is created now: at most 249 letters, digits, '.', '_' and '-'.

    Raises:
        ConfigError: There is no list, and the name of the host cannot be part of a Kafka id.
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
