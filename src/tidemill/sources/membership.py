"""How an engine is a member of its consumer group: the consumer's configuration, and leaving for good.

A static member that only closes keeps its partitions reserved for its id during the session timeout, which is what a
restart wants. To leave for good it has to unsubscribe and keep polling, and only a member whose join is complete
can; so the end of a pipeline asks the brokers which members are left, and leaves on their behalf.

The group is looked at with ListGroups, never with an admin request that goes to the group's coordinator: librdkafka
ends the whole process if such a request is open when its broker goes (github.com/confluentinc/librdkafka/issues/4605).
A member is known by its client id there, which is its static id too.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient

from tidemill.config.settings import Settings
from tidemill.runtime.kafka_client import LibraryLog, make_client_config

#: How long leaving waits for the group to complete a join, and for the partitions to be given up.
JOIN_SECONDS = 3.0
LEAVE_SECONDS = 5.0
#: How often a member looks for new partitions of the topic. The client's own 5 minutes would leave
#: them unread for as long, or until the driver notices that they have no owner.
TOPIC_REFRESH_MS = 5_000


def make_consumer_config(settings: Settings, instance_id: str) -> dict[str, Any]:
    """Return the consumer's configuration: some of it is fixed, the rest is the user's."""
    kafka = settings.kafka
    return make_client_config(
        kafka,
        kafka.brokers,
        {
            "fetch.wait.max.ms": 50,
            "fetch.queue.backoff.ms": 20,
            "queued.min.messages": 10_000,
            "queued.max.messages.kbytes": 16_384,
            "topic.metadata.refresh.interval.ms": TOPIC_REFRESH_MS,
            **kafka.client_config,
            "group.id": kafka.consumer_group,
            "group.instance.id": instance_id,
            "client.id": instance_id,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": kafka.session_timeout_ms,
            "heartbeat.interval.ms": kafka.heartbeat_interval_ms,
            "max.poll.interval.ms": kafka.max_poll_interval_ms,
        },
    )


def leave_group(
    consumer: ck.Consumer,
    joined: Callable[[], bool],
    seconds: float = JOIN_SECONDS + LEAVE_SECONDS,
    join_seconds: float = JOIN_SECONDS,
) -> None:
    """Leave the group, so that others have the partitions in about a second.

    Args:
        consumer: A subscribed consumer; the caller closes it afterwards.
        joined: Whether its join is complete.
        seconds: How long all of it may take.
        join_seconds: How much of that to wait for the join.
    """
    end = time.monotonic() + seconds
    deadline = min(end, time.monotonic() + join_seconds)
    while not joined() and time.monotonic() < deadline:
        consumer.poll(0.05)
    consumer.unsubscribe()
    deadline = min(end, time.monotonic() + LEAVE_SECONDS)
    while time.monotonic() < deadline:
        consumer.poll(0.05)
        if not consumer.assignment():
            return


def find_present_members(settings: Settings, instance_ids: Collection[str], timeout_seconds: float = 5.0) -> set[str]:
    """Return which of these static members the group still has.

    Raises:
        KafkaException: The brokers do not say.
    """
    found = _describe_group(_make_admin(settings), settings, timeout_seconds)
    return {member.client_id for member in (found.members if found else ())} & set(instance_ids)


def _make_admin(settings: Settings) -> AdminClient:
    return AdminClient(make_client_config(settings.kafka, settings.kafka.brokers, {}), logger=LibraryLog())


def _describe_group(admin: AdminClient, settings: Settings, timeout_seconds: float) -> Any:
    """Return the group (a GroupMetadata), or None if no broker has it: it has no members and no committed offsets."""
    found = admin.list_groups(settings.kafka.consumer_group, timeout=timeout_seconds)
    return found[0] if found else None


def _read_assignment(assignment: bytes) -> Iterator[tuple[str, int]]:
    """Yield the topics and partitions of a member, from Kafka's ConsumerProtocolAssignment (the classic protocol)."""
    if not assignment:
        return  # it is joining
    (topics,) = struct.unpack_from(">i", assignment, 2)  # behind an int16, the version
    at = 6
    for _ in range(topics):
        (length,) = struct.unpack_from(">h", assignment, at)
        topic = assignment[at + 2 : at + 2 + length].decode()
        at += 2 + length
        (count,) = struct.unpack_from(">i", assignment, at)
        for partition in struct.unpack_from(f">{count}i", assignment, at + 4):
            yield topic, partition
        at += 4 + 4 * count


class GroupView(NamedTuple):
    """The state of the group, as far as the source topic is concerned.

    Attributes:
        settled: It has members, and is not rebalancing.
        partitions: Those of the topic.
        owned: Those that a member has.
    """

    settled: bool
    partitions: frozenset[int]
    owned: frozenset[int]


class GroupViewer:
    """Asks the brokers for the state of the group.

    Args:
        settings: Of the pipeline.
    """

    def __init__(self, settings: Settings) -> None:
        """Connect at the first look."""
        self._settings = settings
        self._admin = _make_admin(settings)

    def look(self, timeout_seconds: float = 5.0) -> GroupView:
        """Return the state of the group.

        Raises:
            KafkaException: The brokers do not say.
        """
        topic = self._settings.kafka.source_topic
        # First: every broker is asked for the group, and after new metadata the client forgets those that are gone.
        partitions = self._admin.list_topics(topic, timeout=timeout_seconds).topics[topic].partitions
        found = _describe_group(self._admin, self._settings, timeout_seconds)
        owned = {
            partition
            for member in (found.members if found else ())
            for assigned, partition in _read_assignment(member.assignment)
            if assigned == topic
        }
        return GroupView(found is not None and found.state == "Stable", frozenset(partitions), frozenset(owned))


def distribute_again(settings: Settings, join_seconds: float = 10.0) -> None:
    """Make the group rebalance, by being a member of it for a moment.

    Reads and commits nothing. Others keep what they have, except what this member is assigned for that moment.

    Raises:
        KafkaException: The brokers refuse.
    """
    assigned: list[object] = []
    config = make_consumer_config(settings, "")
    del config["group.instance.id"]
    config["client.id"] = "tidemill-distribute"
    consumer = ck.Consumer(config, logger=LibraryLog())
    try:
        consumer.subscribe([settings.kafka.source_topic], on_assign=lambda _, partitions: assigned.append(partitions))
        leave_group(consumer, lambda: bool(assigned), join_seconds + LEAVE_SECONDS, join_seconds)
    finally:
        consumer.close()


def reap_member(settings: Settings, instance_id: str, join_seconds: float = 10.0) -> None:
    """Leave the group on behalf of a member that ended without leaving, so that others get its partitions at once.

    Subscribes under its id, which replaces it, and leaves; reads and commits nothing.

    Raises:
        KafkaException: The brokers refuse; the partitions stay reserved for the session timeout.
    """
    assigned: list[object] = []
    consumer = ck.Consumer(make_consumer_config(settings, instance_id), logger=LibraryLog())
    try:
        consumer.subscribe([settings.kafka.source_topic], on_assign=lambda _, partitions: assigned.append(partitions))
        leave_group(consumer, lambda: bool(assigned), join_seconds + LEAVE_SECONDS, join_seconds)
    finally:
        consumer.close()


def find_other_topics(settings: Settings, own_prefix: str, timeout_seconds: float = 5.0) -> dict[str, list[str]]:
    """Return the topics that members of the group subscribe to instead of the source topic, with those members' names.

    While a group rebalances, or a broker that has just started loads it, the brokers do not say what its members
    subscribe to, so this waits.

    Args:
        settings: Of the pipeline.
        own_prefix: How the names of this worker's own members begin: any that are left died a moment ago.
        timeout_seconds: How long to ask.

    Raises:
        KafkaException: The brokers do not say.
    """
    admin = _make_admin(settings)
    deadline = time.monotonic() + timeout_seconds
    while True:
        late = time.monotonic() > deadline
        try:
            found = _describe_group(admin, settings, timeout_seconds)
            if found is None or found.state not in _JOINING or late:
                break
        except ck.KafkaException as error:
            if late or error.args[0].code() != ck.KafkaError.COORDINATOR_LOAD_IN_PROGRESS:
                raise
        time.sleep(0.2)
    others: dict[str, list[str]] = {}
    for member in found.members if found else ():
        topics = _read_subscription(member.metadata)
        if settings.kafka.source_topic not in topics and not member.client_id.startswith(own_prefix):
            for topic in topics:
                others.setdefault(topic, []).append(member.client_id)
    return others


_JOINING = ("PreparingRebalance", "CompletingRebalance")


def _read_subscription(metadata: bytes) -> list[str]:
    """Return what a member subscribes to, from Kafka's ConsumerProtocolSubscription (the classic protocol)."""
    if not metadata:
        return []
    (count,) = struct.unpack_from(">i", metadata, 2)  # behind an int16, the version
    topics, at = [], 6
    for _ in range(count):
        (length,) = struct.unpack_from(">h", metadata, at)
        topics.append(metadata[at + 2 : at + 2 + length].decode())
        at += 2 + length
    return topics
