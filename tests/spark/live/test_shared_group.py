"""A consumer group belongs to one pipeline: members that read other topics are found before Spark starts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka as ck
import pytest
import structlog.testing
from tests.until import wait_until

from tidemill.config.settings import Settings
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.files.lock import GroupInUseError
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.spark.foreground import Foreground
from tidemill.spark.pipeline import Pipeline
from tidemill.spark.preflight import refuse_shared_group, warn_without_topic

pytestmark = pytest.mark.kafka
Join = Callable[..., None]


class Nothing(Handler[bytes, bytes]):
    async def arrange(self, messages: Any, pending: Any) -> Any:
        return []


@pytest.fixture
def settings(embedded_kafka: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Settings:
    mine, other = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("mine", "other"))
    for topic in (mine, other):
        embedded_kafka.create_topic(topic, partitions=1)
    monkeypatch.setenv("WORKER_ID", mine)
    return Settings.model_validate(
        {
            "kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": mine, "consumer_group": f"{mine}-{other}"},
            "sinks": {"filesystem": {"out": {"base_path": str(tmp_path)}}},
            "metrics": {"enabled": False},
            "debug": {"enabled": False},
        }
    )


def other_topic(settings: Settings) -> str:
    return settings.kafka.consumer_group.removeprefix(f"{settings.kafka.source_topic}-")


@pytest.fixture
def join(settings: Settings) -> Iterator[Join]:
    members: list[ck.Consumer] = []

    def join(topic: str, *names: str) -> None:
        joined: list[str] = []
        new = []
        for name in names:
            config = {
                "bootstrap.servers": settings.kafka.brokers,
                "group.id": settings.kafka.consumer_group,
                "group.instance.id": name,
                "client.id": name,
                "partition.assignment.strategy": "cooperative-sticky",
            }
            new.append(ck.Consumer(config))
            new[-1].subscribe([topic], on_assign=lambda *_, name=name: joined.append(name))
        members.extend(new)

        def joined_by_now() -> bool:
            for member in members:
                member.poll(0.05)
            return set(joined) == set(names)

        wait_until(joined_by_now, pause_seconds=0.0)

    yield join
    for member in members:
        member.unsubscribe()
        member.close()


def test_a_group_with_a_member_on_another_topic_is_refused_with_the_line_that_helps(
    settings: Settings, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.spark.session.session.Spark.start", lambda *_: pytest.fail("Spark was started"))
    # The second one has no partition, so only its subscription tells what it reads.
    join(other_topic(settings), "elsewhere.0", "elsewhere.1")
    pipeline = Pipeline(Nothing, settings=settings)
    assert pipeline.run() is ExitCode.CONFIG
    assert isinstance(pipeline.error, GroupInUseError)
    said = str(pipeline.error)
    assert f"which reads topic {other_topic(settings)!r}" in said
    assert f"\n  consumer_group: tidemill-{settings.kafka.source_topic}" in said


def test_members_on_the_same_topic_and_own_ones_that_died_are_let_be(settings: Settings, join: Join) -> None:
    worker = find_worker_name(settings)
    join(settings.kafka.source_topic, "elsewhere.0")
    join(other_topic(settings), f"{settings.kafka.consumer_group}.{worker}.0")
    refuse_shared_group(settings, worker)


def test_brokers_that_do_not_tell_about_groups_stop_nobody(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ck.KafkaException(ck.KafkaError(ck.KafkaError.GROUP_AUTHORIZATION_FAILED))

    monkeypatch.setattr("tidemill.sources.membership._describe_group", refuse)
    with structlog.testing.capture_logs() as logs:
        refuse_shared_group(settings, "w")
    assert "cannot look up the members" in logs[0]["event"]


def test_brokers_that_are_loading_their_groups_are_asked_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [ck.KafkaException(ck.KafkaError(ck.KafkaError.COORDINATOR_LOAD_IN_PROGRESS))]

    def load(*_: Any) -> Any:
        if answers:
            raise answers.pop()

    monkeypatch.setattr("tidemill.sources.membership._describe_group", load)
    with structlog.testing.capture_logs() as logs:
        refuse_shared_group(settings, "w")
    assert (answers, logs) == ([], [])


def test_a_topic_that_does_not_exist_yet_is_what_is_waited_for_and_not_the_brokers(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreground, steps = Foreground("pipeline"), []

    def look_up(_: Settings) -> int:
        steps.append(foreground.states.now().step)
        return 4

    monkeypatch.setattr("tidemill.spark.foreground.look_up_partitions", look_up)
    for known in (True, False):
        monkeypatch.setattr("tidemill.spark.foreground.has_source_topic", lambda _, known=known: known)
        assert foreground.look_up_partitions(settings) == 4
    brokers, topic = settings.kafka.brokers, settings.kafka.source_topic
    assert steps == [f"connecting to {brokers}", f"topic {topic} does not exist yet"]


def test_a_pipeline_whose_topic_nobody_named_is_warned_of() -> None:
    unnamed = Settings()
    with structlog.testing.capture_logs() as logs:
        warn_without_topic(unnamed, unnamed)
    assert "no kafka.source_topic is configured, so a pipeline reads the topic 'input-events'" in logs[0]["event"]
    named = Settings.model_validate({"kafka": {"source_topic": "input-events"}})
    changed = Settings.model_validate({"kafka": {"source_topic": "orders"}})
    with structlog.testing.capture_logs() as logs:
        warn_without_topic(named, named)
        warn_without_topic(unnamed, changed)
    assert logs == []
