"""A pipeline that a test scripts: what the driver knows of one, without Spark."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError, UserActionError
from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.live_tasks import LiveState
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.runtime.link.probe_report import (
    ProbeAttempt,
    ProbeLetter,
    ProbePayload,
    ProbeReport,
    ProbeStage,
    ProbeStatus,
    ProbeTask,
    ProbeText,
)
from tidemill.runtime.link.progress import EngineProgress, PartitionHead, SinkStats
from tidemill.runtime.link.server import TakeLive
from tidemill.runtime.loop.durations import Durations
from tidemill.spark.live.monitoring import Monitored
from tidemill.spark.live.web_ui import Watched
from tidemill.spark.progress import EngineStatus, PauseStatus, PipelineProgress, sum_progress
from tidemill.spark.run_state import RunPhase, RunState

#: Text that must stay text wherever it is shown.
SCRIPT = "<script>alert(1)</script>"
SECRET = "hunter2-the-secret"

SETTINGS: dict[str, Any] = {
    "kafka": {
        "brokers": "kafka-1:9092",
        "source_topic": "orders",
        "consumer_group": "order-workers",
        "client_config": {"sasl.password": SECRET},
    },
    "sinks": {
        "kafka": {"results": {"topic": "order-results", "ui_url": "https://kafka-ui.example/results"}},
        "postgres": {"db": {"dsn": f"postgresql://app:{SECRET}@db/orders", "ui_url": "javascript:alert(1)"}},
        "filesystem": {"log": {"base_path": "output"}},
    },
    "debug": {"enabled": True, "port": 0, "custom_links": [{"name": "Runbook", "url": "https://wiki.example/orders"}]},
    "executor": {"max_executors": 8, "env": {"API_TOKEN": SECRET}},
}


def make_engine(slot: int, **changes: Any) -> EngineProgress:
    """Return a busy engine with the partitions 2 * slot and 2 * slot + 1."""
    names = [f"orders/{2 * slot}", f"orders/{2 * slot + 1}"]
    progress = EngineProgress(
        consumed=41_250,
        messages_done=41_000,
        tasks_running=7,
        tasks_queued=112,
        tasks_retrying=3,
        tasks_retried=214,
        tasks_done=40_800,
        tasks_failed=37,
        delivered=81_000,
        dead_lettered=37,
        letter_kinds={"task": 30, "delivery": 7},
        skipped=12,
        partitions=names,
        paused=names[1:],
        lag={names[0]: 1_800, names[1]: 950},
        committed={names[0]: 20_400, names[1]: 20_399},
        flow={names[0]: (20_625, 20_400, 3), names[1]: (20_625, 20_399, 0)},
        in_flight=250,
        in_flight_bytes=123_456,
        cpu_seconds=300.0,
        rss_bytes=92 * 1024 * 1024,
        timeouts=5,
        attempts=Durations([0, 0, 5_000, 20_000, 12_000, 3_000, 800, 150, 40, 8, 2, 0, 0, 0, 0], 4_000.0),
        slowest=[(7.25, f"task-{slot}-{SCRIPT}", "invoice"), (6.5, f"orders/{2 * slot}:4711:a", SCRIPT)],
        periodic_runs=88,
        loop_blocks=1,
        sinks={
            "sinks.kafka.results": SinkStats(
                4_000,
                40_500,
                sends=Durations([3_000, 800, 150, 40, 10, *[0] * 10], 9.0),
                last_delivered_at=1_790_000_000.0,
            ),
            "sinks.postgres.db": SinkStats(
                3_900,
                40_300,
                error_count=9,
                refused=7,
                dead_lettered=7,
                breaker_opened=1,
                breaker_state=2,
                sends=Durations([0, 0, 3_000, 800, 90, 10, *[0] * 9], 9.0),
                last_error=f"refused {SCRIPT}: password={SECRET}",
                last_error_at=1_790_000_100.0,
                last_delivered_at=1_790_000_050.0,
            ),
        },
        waits={
            "sinks.postgres.db": "connection refused (db:5432)",
            f"partition {names[0]}": f"offset 20400 {SCRIPT} (key A-17) has been waiting for 75 s: its result waits "
            "for sinks.postgres.db",
        }
        if slot == 0
        else {},
        heads={
            names[0]: PartitionHead(20_400, 1_789_999_000.0, 1_789_998_000.0, "sink", f"its result waits {SCRIPT}", 12)
        }
        if slot == 0
        else {names[0]: PartitionHead(41_000, 1_790_000_000.0, None, "", "", 0)},
    )
    return msgspec.structs.replace(progress, **changes)


NOTHING = ProbeText("")
#: Of a message whose task was tried twice, and whose second hook raised.
PROBE_REPORT = ProbeReport(
    ProbeStatus.FAILED,
    "it would have left 1 dead letter",
    3.25,
    [
        ProbeStage("deserialize_message", "", 0.001, 0.0004, NOTHING),
        ProbeStage("arrange", "", 0.002, 0.03, NOTHING),
        ProbeStage("on_error", f"task-{SCRIPT}", 1.1, 0.002, NOTHING),
        ProbeStage("on_task_complete", f"task-{SCRIPT}", 2.6, 0.1, NOTHING),
        ProbeStage("on_message_complete", "", 2.7, 0.5, ProbeText(f"ValueError: {SCRIPT}\n  handler.py:3", True)),
    ],
    [
        ProbeTask(
            f"task-{SCRIPT}",
            "",
            ["--token", "***", SCRIPT],
            {"tenant": SCRIPT},
            "ok",
            False,
            [
                ProbeAttempt(1, 0.05, 1.0, "exit", 3, 4_711, NOTHING, NOTHING, ProbeText(f"no {SCRIPT}\n")),
                ProbeAttempt(2, 1.5, 1.0, "ok", 0, 4_712, NOTHING, ProbeText(f"result {SCRIPT}", True), NOTHING),
            ],
        )
    ],
    [ProbePayload("sinks.kafka.results", "on_task_complete", f"task-{SCRIPT}", ProbeText('{\n  "data": "***"\n}'))],
    {"sinks.kafka.results": 1},
    [ProbeLetter("hook", ProbeText(f"on_message_complete: ValueError: {SCRIPT}"), "")],
    2,
    7,
)


class ScriptedPipeline:
    """What the driver knows, as a test sets it.

    Attributes:
        engines: The slots.
        run: What the run does.
        actions: What was asked for.
    """

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self.settings = Settings.model_validate(SETTINGS | (settings or {}))
        self.engines = [
            EngineStatus(slot, "running", 4_000 + slot, "node-1", 1 + slot, 0.2, make_engine(slot)) for slot in (0, 1)
        ]
        self.run = RunState(RunPhase.RUNNING, 4_000.0, 4_010.0, work_seconds=4_000.0)
        self.actions: list[str] = []
        self.pauses: list[PauseStatus] = []
        self.orphans: list[int] = []
        self.asked = 0
        self.watches = 0
        self.live: dict[int, LiveState] = {}
        self.probed: list[tuple[SourceMessage, float]] = []
        self.report: ProbeReport | Exception = PROBE_REPORT
        #: Probes go on when it is set.
        self.probe_gate = threading.Event()
        self.probe_gate.set()

    def progress(self) -> PipelineProgress:
        self.asked += 1
        now = [engine.progress for engine in self.engines if engine.progress is not None]
        past = [engine.past for engine in self.engines if engine.past is not None]
        total = sum_progress(past, now, self.engines)
        total.pauses = list(self.pauses)
        return total

    def release(self) -> list[dict[str, Any]]:
        self.actions.append("release")
        return [{"slot": 0, "held": 2}]

    def watch(self, take: TakeLive, seconds: float) -> None:
        self.watches += 1
        for slot, state in self.live.items():
            take(slot, f"engine-{slot}", state)

    def probe(self, message: SourceMessage, seconds: float) -> ProbeReport:
        self.probed.append((message, seconds))
        assert self.probe_gate.wait(60)
        if isinstance(self.report, Exception):
            raise self.report
        return self.report

    def find_message(self, topic: str, partition: int, offset: int) -> OpenMessage | None:
        if offset == 13:
            raise RemoteError("engine 0 is silent")
        if offset not in (11, 4_712):
            return None
        stage = MessageStage(
            stage=OpenStage.BEHIND_KEY if offset == 11 else OpenStage.TASK,
            task_id=f"task-{SCRIPT}",
            attempt=1,
            attempts=4,
            behind=10 if offset == 11 else None,
            pid=None if offset == 11 else 4_242,
            seconds=None if offset == 11 else 75.0,
        )
        return OpenMessage(topic, partition, offset, 0, stage, stage.describe())

    def pause(self, seconds: float, partition: int | None, by: str) -> None:
        if partition == 99:
            raise UserActionError("the source topic has no partition 99")
        self.actions.append(f"pause {seconds:g} {partition} {by}")
        self.pauses.append(PauseStatus(partition, 1_790_000_900.4, 900.0, by))

    def resume(self, partition: int | None) -> int:
        self.actions.append(f"resume {partition}")
        ended = [pause for pause in self.pauses if partition in (None, pause.partition)]
        self.pauses = [pause for pause in self.pauses if pause not in ended]
        return len(ended)

    def restart(self, slot: int) -> None:
        if slot >= len(self.engines):
            raise UserActionError(f"there is no engine {slot}")
        self.actions.append(f"restart {slot}")

    def watched(self, **changes: Any) -> Watched:
        values: dict[str, Any] = {
            "settings": self.settings,
            "configured": self.settings,
            "worker": "worker-1",
            "asked": Monitored(self.progress, lambda: self.run, lambda: self.orphans, lambda: 8),
            "control": self,
            "engines": self,
            "drain": lambda: self.actions.append("drain"),
        }
        return Watched(**values | changes)
