"""A member that the brokers will never admit says why, within seconds; and doctor says it before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, AdminClient, ResourcePatternType
from confluent_kafka.admin import ResourceType as AclResource
from tests.sources.test_kafka import Events, scripted
from tests.until import until

from tidemill.cli.doctor.checks import check_group
from tidemill.config.settings import Settings
from tidemill.core.pipeline.group_refusal import GroupTerms, find_refusal
from tidemill.sources.group_facts import find_group_facts
from tidemill.sources.kafka import KafkaSource
from tidemill.testing.kafka import unique_name


def make_settings(broker: Any, **kafka: Any) -> Settings:
    topic = broker.create_topic(unique_name("in"), partitions=1)
    config = {"brokers": broker.bootstrap, "source_topic": topic, "consumer_group": topic}
    return Settings.model_validate({"kafka": {**config, "session_timeout_ms": 6000, **kafka}})


def find_before(settings: Settings) -> str:
    """Return what is known before the start."""
    kafka = settings.kafka
    terms = GroupTerms(kafka.consumer_group, kafka.source_topic, kafka.session_timeout_ms)
    return find_refusal(find_group_facts(kafka, f"{kafka.consumer_group}.me.", 5.0), terms) or ""


async def find_while_running(settings: Settings) -> str:
    source = KafkaSource(settings, f"{settings.kafka.consumer_group}.me.0")
    source.start(Events())
    try:
        await until(source.describe_refusal)
        return source.describe_refusal() or ""
    finally:
        await source.close(leave=True)


@contextmanager
def member(settings: Settings, name: str, assignor: str) -> Iterator[ck.Consumer]:
    """Be a member of the group until the end of the block."""
    config = {"bootstrap.servers": settings.kafka.brokers, "group.id": settings.kafka.consumer_group}
    consumer = ck.Consumer({**config, "client.id": name, "partition.assignment.strategy": assignor})
    assigned: list[Any] = []
    consumer.subscribe([settings.kafka.source_topic], on_assign=lambda _, partitions: assigned.append(partitions))
    deadline = time.monotonic() + 30
    while not assigned:
        assert time.monotonic() < deadline
        consumer.poll(0.1)
    try:
        yield consumer
    finally:
        consumer.close()


async def test_a_session_timeout_that_the_brokers_do_not_allow_is_named(embedded_kafka: Any) -> None:
    settings = make_settings(embedded_kafka, session_timeout_ms=1500, heartbeat_interval_ms=500)
    assert "session_timeout_ms is 1500, but the brokers allow 2000 to" in find_before(settings)
    assert "session_timeout_ms 1500" in await find_while_running(settings)


async def test_members_of_another_program_are_named_and_the_engine_joins_once_they_are_gone(
    embedded_kafka: Any,
) -> None:
    settings = make_settings(embedded_kafka)
    source = KafkaSource(settings, f"{settings.kafka.consumer_group}.me.0")
    events = Events()
    try:
        with member(settings, "billing-7", "range"):
            assert "(billing-7) that use the range assignor" in find_before(settings)
            source.start(events)
            await until(source.describe_refusal)
            assert "kafka.consumer_group" in (source.describe_refusal() or "")
        await until(lambda: source.describe_refusal() is None)
        assert ("on_assigned", [(settings.kafka.source_topic, 0)]) in events.told
    finally:
        await source.close(leave=True)


@pytest.mark.long
async def test_a_group_that_is_forbidden_or_full_is_named(own_kafka: Any) -> None:
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "group.max.size": "1",
    }
    broker = own_kafka(properties=properties)
    forbidden, full = make_settings(broker), make_settings(broker)
    forbid(broker, AclResource.GROUP, forbidden.kafka.consumer_group)
    assert "grant Read" in find_before(forbidden)
    assert "grant Read" in await find_while_running(forbidden)

    with member(full, "other", "cooperative-sticky"):
        assert "group.max.size" in find_before(full)
        assert "group.max.size" in await find_while_running(full)

    secret = make_settings(broker)
    forbid(broker, AclResource.TOPIC, secret.kafka.source_topic)
    assert "do not allow reading topic" in await find_while_running(secret)


def forbid(broker: Any, kind: Any, name: str) -> None:
    acl = AclBinding(
        kind, name, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*", AclOperation.READ, AclPermissionType.DENY
    )
    client = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in client.create_acls([acl]).values():
        future.result(30)


@pytest.mark.parametrize("code", ["GROUP_MAX_SIZE_REACHED", "GROUP_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"])
async def test_a_refusal_among_the_records_is_kept_and_messages_end_it(code: str) -> None:
    source, consumer, _ = scripted()
    consumer.records = [SimpleNamespace(error=lambda: ck.KafkaError(getattr(ck.KafkaError, code)))]
    source._fetch()
    assert source.describe_refusal() is not None
    assert source.statistics().errors == 1
    source._brokers.on_messages()
    assert source.describe_refusal() is None


def answer_loading(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """Make a broker that has just started of the real one: so many times it says that it loads its groups."""
    ask, left = AdminClient.list_groups, [times]

    def list_groups(self: AdminClient, *args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError.COORDINATOR_LOAD_IN_PROGRESS))
        return ask(self, *args, **kwargs)

    monkeypatch.setattr(AdminClient, "list_groups", list_groups)


def test_a_broker_that_is_loading_its_groups_is_asked_again(
    embedded_kafka: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = make_settings(embedded_kafka).kafka
    answer_loading(monkeypatch, times=2)
    facts = find_group_facts(kafka, "me.", 10.0)
    assert (facts.loading, facts.members) == (False, 0)


def test_a_group_that_is_still_being_loaded_refuses_nobody(
    embedded_kafka: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(embedded_kafka)
    answer_loading(monkeypatch, times=float("inf"))
    monkeypatch.setattr("tidemill.cli.doctor.checks._ASK_SECONDS", 2.0)
    assert "still loading" in check_group(settings)
