"""The consumer group membership of an engine: the consumer's configuration, and leaving for good.

When a static member only closes, its partitions stay reserved for its id until the session timeout, which is what a
restart needs. To leave for good, a member has to unsubscribe and keep polling, and only a member that has completed its
join can do so. Therefore a pipeline that ends asks the brokers which members are left, and leaves on their behalf.

The group is queried with ListGroups, never with an admin request to the group's coordinator: librdkafka aborts the
process if such a request is open when its broker disappears (github.com/confluentinc/librdkafka/issues/4605). There, a
member is identified by its client id, which equals its static id.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient

from tidemill.config.settings import Settings
from tidemill.runtime.kafka.client import LibraryLog, make_client_config

#: How long leaving waits for the group to complete a join, and for the partitions to be released.
JOIN_SECONDS = 3.0
LEAVE_SECONDS = 5.0
#: How often a member checks for new partitions of the topic. With the client's default of 5 minutes they would be
#: unread for that long, or until the driver notices that they have no owner.
TOPIC_REFRESH_MS = 5_000


def make_consumer_config(settings: Settings, instance_id: str) -> dict[str, Any]:
    """Return the consumer's configuration; some options are fixed, the others are the user's."""
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
    """Leave the group, so that other members get the partitions in about a second.

    Args:
        consumer: A subscribed consumer; the caller closes it afterwards.
        joined: Returns whether its join is complete.
        seconds: The time limit of everything.
        join_seconds: The part of it for the join.
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
    """Return which of these static members are still in the group.

    Raises:
        KafkaException: The brokers do not answer.
    """
    found = _describe_group(_make_admin(settings), settings, timeout_seconds)
    return {member.client_id for member in (found.members if found else ())} & set(instance_ids)


def _make_admin(settings: Settings) -> AdminClient:
    return AdminClient(make_client_config(settings.kafka, settings.kafka.brokers, {}), logger=LibraryLog())


def _describe_group(admin: AdminClient, settings: Settings, timeout_seconds: float) -> Any:
    """Return the group (a GroupMetadata), or None if no broker knows it: it has no members and no committed offsets."""
    found = admin.list_groups(settings.kafka.consumer_group, timeout=timeout_seconds)
    return found[0] if found else None


def _read_assignment(assignment: bytes) -> Iterator[tuple[str, int]]:
    """Yield the topics and partitions of a member, from Kafka's ConsumerProtocolAssignment (the classic protocol)."""
    if not assignment:
        return  # the member is joining
    (topics,) = struct.unpack_from(">i", assignment, 2)  # after an int16, the version
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
    """The state of the group with respect to the source topic.

    Attributes:
        settled: Whether it has members and is not rebalancing.
        partitions: The partitions of the topic.
        owned: The partitions that a member owns.
    """

    settled: bool
    partitions: frozenset[int]
    owned: frozenset[int]


class GroupViewer:
    """Queries the state of the group.

    Args:
        settings: The pipeline's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._admin = _make_admin(settings)

    def look(self, timeout_seconds: float = 5.0) -> GroupView:
        """Return the state of the group.

        Raises:
            KafkaException: The brokers do not answer.
        """
        topic = self._settings.kafka.source_topic
        # First, because the group is requested from every known broker, and new metadata removes brokers that no longer
        # exist.
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
    """Make the group rebalance by joining it for a moment.

    Reads and commits nothing. Other members keep their partitions, except those that this member gets for that moment.

    Raises:
        KafkaException: The brokers refuse the member.
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
    """Leave the group on behalf of a member that exited without leaving, so that others get its partitions at once.

    Subscribes under the member's id, which replaces it, and leaves; reads and commits nothing.

    Raises:
        KafkaException: The brokers refuse; the partitions stay reserved until the session timeout.
    """
    assigned: list[object] = []
    consumer = ck.Consumer(make_consumer_config(settings, instance_id), logger=LibraryLog())
    try:
        consumer.subscribe([settings.kafka.source_topic], on_assign=lambda _, partitions: assigned.append(partitions))
        leave_group(consumer, lambda: bool(assigned), join_seconds + LEAVE_SECONDS, join_seconds)
    finally:
        consumer.close()


def find_other_topics(settings: Settings, own_prefix: str, timeout_seconds: float = 5.0) -> dict[str, list[str]]:
    """Return the topics that members of the group subscribe to instead of the source topic, with the members' names.

    While a group rebalances, or a broker that has just started loads it, the brokers do not return subscriptions, so
    this waits.

    Args:
        settings: The pipeline's settings.
        own_prefix: The prefix of this worker's own members' names; any such members died a moment ago.
        timeout_seconds: The time limit.

    Raises:
        KafkaException: The brokers do not answer.
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
    """Return a member's subscription, from Kafka's ConsumerProtocolSubscription (the classic protocol)."""
    if not metadata:
        return []
    (count,) = struct.unpack_from(">i", metadata, 2)  # after an int16, the version
    topics, at = [], 6
    for _ in range(count):
        (length,) = struct.unpack_from(">h", metadata, at)
        topics.append(metadata[at + 2 : at + 2 + length].decode())
        at += 2 + length
    return topics
