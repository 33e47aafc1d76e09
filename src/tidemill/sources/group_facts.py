"""Asks the brokers, before a pipeline starts, what would keep it out of its consumer group.

Joins nothing. Facts that the brokers do not reveal (describing configurations needs a permission of its own) stay
unknown. As in `membership`, no admin request goes to the group's coordinator.
"""

from __future__ import annotations

import time
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.pipeline.group_refusal import GroupFacts
from tidemill.runtime.kafka.client import LibraryLog, make_client_config

_STABLE = "Stable"
#: The pause between two requests to a broker that is still loading its groups.
_LOADING_PAUSE_SECONDS = 0.2


def find_group_facts(kafka: KafkaSettings, own_prefix: str, timeout_seconds: float) -> GroupFacts:
    """Return what the brokers report about the group.

    Args:
        kafka: The `kafka` section.
        own_prefix: The prefix of the names of this pipeline's own members.
        timeout_seconds: The time limit of each request, and of the wait for a broker that has just started and is still
            loading its groups; after that the result lacks the members.

    Raises:
        KafkaException: The brokers do not answer.
    """
    config = make_client_config(kafka, kafka.brokers, {})
    if _is_forbidden(kafka, config, timeout_seconds):
        return GroupFacts(forbidden=True)
    admin = AdminClient(config, logger=LibraryLog())
    try:
        found = _list_group(admin, kafka.consumer_group, timeout_seconds)
    except ck.KafkaException as error:
        if error.args[0].code() != ck.KafkaError.COORDINATOR_LOAD_IN_PROGRESS:
            raise
        return GroupFacts(loading=True)
    names = [str(member.client_id or "") for member in found[0].members] if found else []
    limits = _read_limits(admin, timeout_seconds)
    least, most = limits.get("group.min.session.timeout.ms"), limits.get("group.max.session.timeout.ms")
    return GroupFacts(
        protocol=found[0].protocol if found and found[0].state == _STABLE else "",
        others=tuple(sorted(name for name in names if not name.startswith(own_prefix))),
        members=len(names),
        max_members=limits.get("group.max.size"),
        session_timeouts_ms=None if least is None or most is None else (least, most),
    )


def _list_group(admin: AdminClient, group: str, timeout_seconds: float) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return admin.list_groups(group, timeout=timeout_seconds)
        except ck.KafkaException as error:
            loading = error.args[0].code() == ck.KafkaError.COORDINATOR_LOAD_IN_PROGRESS
            if not loading or time.monotonic() > deadline:
                raise
        time.sleep(_LOADING_PAUSE_SECONDS)


def _is_forbidden(kafka: KafkaSettings, config: dict[str, Any], timeout_seconds: float) -> bool:
    consumer = ck.Consumer({**config, "group.id": kafka.consumer_group}, logger=LibraryLog())
    try:
        consumer.committed([ck.TopicPartition(kafka.source_topic, 0)], timeout=timeout_seconds)
    except ck.KafkaException as raised:
        # Without permission to find the group's coordinator the call times out, and the reason is among the records. It
        # also times out on a new cluster, which first creates the topic of all groups.
        record = consumer.poll(0)
        errors = [raised.args[0], record.error() if record is not None else None]
        return any(error is not None and error.code() == ck.KafkaError.GROUP_AUTHORIZATION_FAILED for error in errors)
    finally:
        consumer.close()
    return False


def _read_limits(admin: AdminClient, timeout_seconds: float) -> dict[str, int]:
    broker = next(iter(admin.list_topics(timeout=timeout_seconds).brokers))
    resource = ConfigResource(ResourceType.BROKER, str(broker))
    try:
        answer = admin.describe_configs([resource], request_timeout=timeout_seconds)[resource]
        found = answer.result(timeout_seconds + 1.0)
    except (ck.KafkaException, TimeoutError):
        return {}
    return {name: int(entry.value) for name, entry in found.items() if name.startswith("group.") and _is_number(entry)}


def _is_number(entry: Any) -> bool:
    return entry.value is not None and entry.value.isdecimal()
