"""Real engines on real Spark and Kafka, as a reader finds them in their recording; one of them is killed."""

from __future__ import annotations

import os
import queue
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from tests.spark.live.handlers import Mixed
from tests.until import wait_until

from tidemill.config.settings import Settings
from tidemill.core.supervision.slot_events import EngineEnding
from tidemill.core.supervision.slot_group import RunFinished
from tidemill.core.supervision.slot_limits import SlotLimits
from tidemill.recorder.format.events import EventKind
from tidemill.recorder.reading.queries import EventQuery, MessageQuery, TaskQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.link.frames import LinkAddress
from tidemill.runtime.link.progress import EngineProgress
from tidemill.spark.engine.process import EngineJob
from tidemill.spark.live import run_recorder
from tidemill.spark.live.recording import record_run
from tidemill.spark.live.supervisor import Supervisor
from tidemill.spark.session.packaging import pack_handler
from tidemill.spark.session.session import Spark

pytestmark = pytest.mark.spark

COUNT = 3_000


@pytest.fixture
def settings(embedded_kafka: EmbeddedBroker, tmp_path: Path) -> Settings:
    topic = f"recorded-{uuid.uuid4().hex[:8]}"
    embedded_kafka.create_topic(topic, 2)
    return Settings.model_validate(
        {
            "kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": topic, "consumer_group": topic},
            "executor": {"drain_timeout_seconds": 5},
            "metrics": {"enabled": False},
            "debug": {"enabled": True, "db_dir": str(tmp_path / "recordings")},
        }
    )


@pytest.fixture
def supervised(spark: Spark, settings: Settings) -> Iterator[Callable[..., tuple[Supervisor, Any]]]:
    made: list[Supervisor] = []

    def start(open_link: Any) -> tuple[Supervisor, queue.SimpleQueue[RunFinished]]:
        ends: queue.SimpleQueue[RunFinished] = queue.SimpleQueue()
        packed = pack_handler(Mixed())

        def make_job(slot: int, job_token: int, address: LinkAddress) -> EngineJob:
            return EngineJob(slot, job_token, "w", address, settings, packed, {})

        live = Supervisor(spark, "w", 1, make_job, ends.put, SlotLimits())
        live.start(open_link=open_link)
        made.append(live)
        return live, ends

    yield start
    for live in made:
        live.exit_now()
        live.close()
        spark.context.cancelAllJobs()


def feed(settings: Settings, start: int, count: int) -> None:
    producer = ck.Producer({"bootstrap.servers": settings.kafka.brokers})
    for n in range(start, start + count):
        producer.produce(settings.kafka.source_topic, b"%d" % n, key=b"key %d" % n, partition=n % 2)
    assert producer.flush(30) == 0


@pytest.mark.long  # tests/pipeline/recording has it without Spark
def test_every_message_is_found_once_per_time_it_was_done_also_after_a_kill(
    settings: Settings, supervised: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_recorder, "LOST_SECONDS", 0.1)
    reader = Reader(Path(settings.debug.db_dir))
    with record_run(settings, "w", EngineProgress) as recorder:
        assert recorder is not None
        live, ends = supervised(recorder.open_link)

        def engine() -> Any:
            return live.progress().engines[0]

        feed(settings, 0, COUNT)
        wait_until(lambda: sum(live.progress().committed.values()) == COUNT, what="all is committed")
        # Live, from the growing files: nothing is sealed yet.
        wait_until(lambda: find_all(reader).total() == COUNT, what="all is recorded")
        first = engine().pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: engine().progress is not None and engine().pid not in (None, first), what="another engine")
        feed(settings, COUNT, COUNT)
        wait_until(lambda: sum(live.progress().committed.values()) == 2 * COUNT, what="the rest is committed")
        live.drain()
        assert ends.get(timeout=60) == RunFinished(EngineEnding.DRAINED)
        progress = live.progress()
    found = find_all(reader)
    assert set(found) == {(n % 2, n // 2) for n in range(2 * COUNT)}
    assert found.total() == progress.messages_done
    assert progress.recorder_dropped == 0
    check_one_message(reader, settings.kafka.source_topic)
    events = reader.find_events(EventQuery(), limit=1000).rows
    kinds = Counter(event.event.kind for event in events)
    assert kinds[EventKind.ENGINE_STARTED] == 2
    assert (kinds[EventKind.ENGINE_LOST], kinds[EventKind.ENGINE_ENDED]) == (1, 1)
    assert kinds[EventKind.TASK_FAILED] == 2 * COUNT // 1000
    assert kinds[EventKind.ASSIGNED] >= 2


def find_all(reader: Reader) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    cursor = None
    while True:
        page = reader.find_messages(MessageQuery(), cursor, limit=5000)
        found.update((row.partition, row.offset) for row in page.rows)
        cursor = page.cursor
        if cursor is None:
            return found


def check_one_message(reader: Reader, topic: str) -> None:
    (row,) = reader.find_messages(MessageQuery(topic=topic, partition=0, offset=500)).rows
    assert (row.key, row.status, row.error, row.tasks, row.precomputed) == (b"key 1000", "failed", "no luck", 1, 0)
    stages = [row.record_at, row.consumed_at, row.arranged_at, row.tasks_done_at, row.resolved_at]
    assert None not in stages
    assert stages[1:] == sorted(stages[1:])  # type: ignore[type-var]
    (task,) = reader.find_tasks(TaskQuery(task_id="task-1000")).rows
    assert (task.offsets, task.kind, task.exit_code, task.stderr) == ([500], "exit", 3, b"no luck\n")
