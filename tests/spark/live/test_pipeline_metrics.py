"""The metrics of a pipeline agree with its progress; an endpoint over a scripted pipeline, without Spark."""

from __future__ import annotations

import subprocess
import sys

import msgspec
from structlog.testing import capture_logs
from tests.runtime.metrics.asking import ask, parse, scrape

from tidemill.config.settings import Settings
from tidemill.core.supervision.slot_limits import SlotLimits
from tidemill.runtime.link.frames import HelloFrame
from tidemill.runtime.link.progress import EngineProgress, PartitionHead, SinkStats
from tidemill.runtime.loop.durations import Durations
from tidemill.runtime.metrics.exposition import write_families
from tidemill.spark.live.monitoring import Monitored, serve_metrics
from tidemill.spark.live.pipeline_metrics import DEFINITIONS, PipelineMetrics
from tidemill.spark.live.readiness import find_unready
from tidemill.spark.live.supervised_slot import SupervisedSlot
from tidemill.spark.progress import EngineStatus, PipelineProgress, sum_progress
from tidemill.spark.run_state import RunPhase, RunState

STARTING = RunState(step="Spark is starting", step_seconds=3.0)
RUNNING = RunState(RunPhase.RUNNING, 60.0, 65.0)
BUSY = EngineProgress(
    consumed=40,
    messages_done=30,
    tasks_running=2,
    tasks_done=25,
    tasks_failed=3,
    tasks_retried=4,
    letter_kinds={"task": 3},
    dead_lettered=3,
    letters_dropped=1,
    recorder_dropped=4,
    partitions=["t/0", "t/1"],
    paused=["t/1"],
    lag={"t/0": 5},
    in_flight=10,
    in_flight_bytes=11,
    timeouts=2,
    attempts=Durations([1] * 15, 99.0),
    queue_waits=Durations([2] * 15, 98.0),
    spawns=Durations([3] * 15, 97.0),
    hooks={"arrange": Durations([4] * 15, 96.0)},
    loop_lags=Durations([5] * 15, 95.0),
    batches=Durations([6] * 15, 93.0),
    heads={"t/1": PartitionHead(3, 990.0, 940.0, "task", "task a has been running for 10 s", 12)},
    consumer_errors=94,
    recreated_partitions=89,
    flow={"t/0": (40, 30, 4), "t/7": (5, 3, 2)},
    waits={"partition t/1": "offset 3", "kafka": "no broker"},
    cache_hits=7,
    cache_misses=8,
    sinks={"sinks.kafka.out": SinkStats(20, 20, 2, 0, 1, 6, 1, 2, Durations([1] * 15, 9.0), 5)},
)


def collected(*engines: EngineStatus) -> dict[str, dict[tuple[str, ...], float]]:
    past = [engine.past for engine in engines if engine.past]
    now = [engine.progress for engine in engines if engine.progress]
    return collect(lambda: sum_progress(past, now, engines))


def collect(progress) -> dict[str, dict[tuple[str, ...], float]]:
    metrics = PipelineMetrics(
        ("w", "1.0", "g"), lambda: 8, progress, ["sinks.kafka.out", "sinks.http.api"], lambda: 1000.0
    )
    return parse(write_families(metrics.collect()).decode())


def test_each_metric_has_the_number_of_the_progress() -> None:
    found = collected(EngineStatus(0, "running", starts=1, progress=BUSY), EngineStatus(1, "waiting", starts=2))

    def of(name: str, *labels: str) -> float:
        return found[f"tidemill_{name}"]["0", *labels]

    assert found["tidemill_worker_info"] == {("w", "1.0", "g"): 1}
    assert found["tidemill_engine_running"] == {("0",): 1, ("1",): 0}
    assert found["tidemill_engine_starts_total"] == {("0",): 1, ("1",): 2}
    assert found["tidemill_executor_pool_max"] == {("0",): 8, ("1",): 8}
    assert (of("executor_tasks_total", "succeeded"), of("executor_tasks_total", "failed")) == (25, 3)
    assert found["tidemill_messages_consumed_total"] == {("0", "t/0"): 40, ("0", "t/7"): 5}
    assert found["tidemill_offsets_committed_total"] == {("0", "t/0"): 30, ("0", "t/7"): 3}
    assert found["tidemill_uncommitted"] == {("0", "t/0"): 6, ("0", "t/1"): 0}
    assert of("executor_duration_seconds_bucket", "0.01") == 2
    assert (of("executor_duration_seconds_count"), of("executor_duration_seconds_sum")) == (15, 99.0)
    assert (of("queue_wait_seconds_count"), of("queue_wait_seconds_sum")) == (30, 98.0)
    assert (of("spawn_seconds_count"), of("spawn_seconds_sum")) == (45, 97.0)
    assert of("handler_duration_seconds_count", "arrange") == 60
    assert (of("loop_lag_seconds_count"), of("consumer_errors_total")) == (75, 94)
    assert of("recreated_partitions_total") == 89
    assert of("executor_timeouts_total") == 2
    assert (of("executor_pool_active"), of("task_retries_total")) == (2, 4)
    assert found["tidemill_offset_lag"] == {("0", "t/0"): 5}
    assert found["tidemill_partition_stalled"] == {("0", "t/0"): 0, ("0", "t/1"): 1}
    assert (of("batch_duration_seconds_count"), of("batch_duration_seconds_sum")) == (90, 93.0)
    assert found["tidemill_lag_seconds"] == {("0", "t/0"): 0, ("0", "t/1"): 60}
    assert found["tidemill_partition_queue_size"] == {("0", "t/0"): 0, ("0", "t/1"): 12}
    assert (of("assigned_partitions"), of("backpressure_active")) == (2, 1)
    assert found["tidemill_assigned_partitions"]["1",] == 0
    assert (of("in_flight_messages"), of("letters_dropped_total"), of("recorder_dropped_total")) == (10, 1, 4)
    assert (of("dead_letters_total", "task"), of("dead_letters_total", "parse")) == (3, 0)
    assert (of("cache_hits_total"), of("cache_misses_total")) == (7, 8)
    assert of("sink_payloads_delivered_total", "kafka.out") == 20
    assert of("sink_deliver_errors_total", "kafka.out") == 2
    assert of("sink_delivery_retries_total", "kafka.out") == 5
    assert of("sink_deliveries_skipped_total", "kafka.out") == 1
    assert of("sink_dlq_messages_total", "kafka.out") == 6
    assert found["tidemill_sink_breaker_state"]["0", "kafka.out"] == 2
    assert found["tidemill_sink_breaker_state"]["1", "kafka.out"] == 0
    assert of("sink_deliver_duration_seconds_count", "kafka.out") == 15
    assert of("in_flight_bytes") == 11
    assert of("sink_payloads_delivered_total", "http.api") == 0, "a sink that was not used yet is there"


def test_every_metric_that_is_documented_is_collected() -> None:
    documented = {name for definition in DEFINITIONS for name in definition.list_series()}
    assert set(collected(EngineStatus(0, "running", starts=1, progress=BUSY))) >= documented
    assert len({definition.name for definition in DEFINITIONS}) == len(DEFINITIONS)


def hello(run_token: int) -> HelloFrame:
    return HelloFrame(slot=0, job_token=1, run_token=run_token, engine_id="e", pid=1, host="h")


def test_counters_do_not_go_back_when_an_engine_is_replaced_and_gauges_are_of_the_new_one() -> None:
    slot = SupervisedSlot(0, SlotLimits(), jobs=None)  # type: ignore[arg-type]

    def done() -> tuple[float, float, int]:
        status = slot.status(0.0)
        found = collected(status)
        total = sum_progress(
            [part for part in (status.past,) if part], [part for part in (status.progress,) if part], [status]
        )
        tasks = found["tidemill_executor_tasks_total"]["0", "succeeded"]
        assert tasks == total.tasks_done, "metrics and progress agree"
        return tasks, found["tidemill_in_flight_messages"]["0",], total.tasks_done

    slot.admit(1, hello(1))
    slot.progress = EngineProgress(tasks_done=5, in_flight=3)
    assert done()[:2] == (5, 3)
    slot.admit(1, hello(1))  # the same engine, on another connection
    assert done()[:2] == (5, 3)
    slot.admit(2, hello(2))  # Spark has started another one by itself
    assert done()[:2] == (5, 0)
    slot.progress = EngineProgress(tasks_done=1, in_flight=9)
    assert done()[:2] == (6, 9)
    slot.retire_engine()  # the supervisor submits the next job
    assert done()[:2] == (6, 0)
    slot.admit(3, hello(3))
    slot.progress = EngineProgress(tasks_done=2)
    assert done()[:2] == (8, 0)


#: What each counter of the metrics has to equal in the progress; histograms by their count.
AGREEMENTS = {
    "tidemill_executor_tasks_total": lambda total: total.tasks_done + total.tasks_failed,
    "tidemill_messages_consumed_total": lambda total: sum(counts[0] for counts in total.flow.values()),
    "tidemill_offsets_committed_total": lambda total: sum(counts[1] for counts in total.flow.values()),
    "tidemill_executor_duration_seconds_count": lambda total: sum(total.attempts.counts),
    "tidemill_batch_duration_seconds_count": lambda total: sum(total.batches.counts),
    "tidemill_queue_wait_seconds_count": lambda total: sum(total.queue_waits.counts),
    "tidemill_spawn_seconds_count": lambda total: sum(total.spawns.counts),
    "tidemill_loop_lag_seconds_count": lambda total: sum(total.loop_lags.counts),
    "tidemill_handler_duration_seconds_count": lambda total: sum(sum(hook.counts) for hook in total.hooks.values()),
    "tidemill_consumer_errors_total": lambda total: total.consumer_errors,
    "tidemill_recreated_partitions_total": lambda total: total.recreated_partitions,
    "tidemill_executor_timeouts_total": lambda total: total.timeouts,
    "tidemill_task_retries_total": lambda total: total.tasks_retried,
    "tidemill_dead_letters_total": lambda total: sum(total.letter_kinds.values()),
    "tidemill_letters_dropped_total": lambda total: total.letters_dropped,
    "tidemill_recorder_dropped_total": lambda total: total.recorder_dropped,
    "tidemill_cache_hits_total": lambda total: total.cache_hits,
    "tidemill_cache_misses_total": lambda total: total.cache_misses,
    "tidemill_sink_payloads_delivered_total": lambda total: sum(s.delivered_payloads for s in total.sinks.values()),
    "tidemill_executor_pool_active": lambda total: total.tasks_running,
    "tidemill_in_flight_messages": lambda total: total.in_flight,
    "tidemill_in_flight_bytes": lambda total: total.in_flight_bytes,
    "tidemill_offset_lag": lambda total: sum(total.lag.values()),
    "tidemill_partition_queue_size": lambda total: sum(head.buffered for head in total.heads.values()),
    "tidemill_assigned_partitions": lambda total: len(total.partitions),
}


def test_all_numbers_agree_with_the_progress_over_restarts_of_two_engines() -> None:
    slots = [SupervisedSlot(number, SlotLimits(), jobs=None) for number in (0, 1)]  # type: ignore[arg-type]
    other = {"partitions": ["t/2"], "lag": {"t/2": 9}, "heads": {}, "flow": {"t/2": (7, 6, 1)}, "waits": {}}
    seen: list[float] = []

    def agree() -> None:
        statuses = [slot.status(0.0) for slot in slots]
        past = [status.past for status in statuses if status.past]
        now = [status.progress for status in statuses if status.progress]
        total, found = sum_progress(past, now, statuses), collected(*statuses)
        for name, read in AGREEMENTS.items():
            assert sum(found.get(name, {}).values()) == read(total), name
        seen.append(total.tasks_done)

    agree()
    for run_token in (1, 2, 3):
        slots[0].admit(run_token, hello(run_token))
        agree()
        slots[0].progress = BUSY
        agree()
        if run_token < 3:
            slots[1].admit(run_token, hello(run_token))
            slots[1].progress = msgspec.structs.replace(BUSY, **other)
            agree()
        slots[0].retire_engine()
        agree()
    assert seen == sorted(seen)
    assert seen[-1] == 5 * BUSY.tasks_done


def test_what_is_not_ready_is_named_without_the_texts_of_errors() -> None:
    def busy(**changes) -> PipelineProgress:
        engine = EngineProgress(**{"partitions": ["t/0"], **changes})
        return sum_progress((), [engine], [EngineStatus(0, "running", 7, "h", 1, 0.1, engine)])

    lost = PipelineProgress(engines=[EngineStatus(0, "waiting", starts=2)], partitions=["t/0"])
    waits = {"sinks.http.api": "401 for alice", "dead letters": "x", "kafka": "x", "brake of engine 0": "x"}
    for state, progress, reasons in (
        (
            STARTING,
            PipelineProgress(),
            ["it is starting: Spark is starting"],
        ),
        (RUNNING, busy(), []),
        (RUNNING, busy(partitions=[]), ["no partition is assigned to it"]),
        (RUNNING, lost, ["engine 0 is not running: waiting (start 2)"]),
        (RunState(RunPhase.DRAINING), busy(), ["it is draining"]),
        (RunState(RunPhase.STOPPING), busy(), ["it is stopping"]),
        (
            RUNNING,
            busy(waits=waits),
            [
                "the brokers cannot be reached",
                "the broker does not accept dead letters",
                "sinks.http.api is down",
            ],
        ),
    ):
        found = [reason.removesuffix(" (3 s)") for reason in find_unready(state, progress)]
        assert found == reasons
    assert find_unready(RUNNING, busy(), [3]) == ["partition 3 has no owner"]


def test_an_endpoint_answers_from_the_start_to_the_end_of_a_run() -> None:
    settings = Settings.model_validate({"metrics": {"port": 0}, "sinks": {"filesystem": {"out": {"base_path": "/x"}}}})
    state, progress = [RunState(step="Spark is starting")], [PipelineProgress()]
    asked = Monitored(lambda: progress[0], lambda: state[0], list, lambda: 4)

    with (
        capture_logs() as logs,
        serve_metrics(settings.metrics, settings, "w", asked) as address,
    ):
        assert address is not None
        assert scrape(address)["tidemill_worker_info"]
        assert ask(f"{address}/healthz") == (200, [])
        assert ask(f"{address}/readyz") == (503, ["it is starting: Spark is starting (0 s)"])
        state[0] = RUNNING
        progress[0] = sum_progress((), [BUSY], [EngineStatus(0, "running", 7, "h", 1, 0.1, BUSY)])
        assert ask(f"{address}/readyz") == (503, ["the brokers cannot be reached", "partition t/1 is stalled"])
        well = msgspec.structs.replace(BUSY, waits={})
        progress[0] = sum_progress((), [well], [EngineStatus(0, "running", 7, "h", 1, 0.1, well)])
        assert ask(f"{address}/readyz") == (200, [])
        assert scrape(address)["tidemill_sink_payloads_delivered_total"] == {
            ("0", "filesystem.out"): 0,
            ("0", "kafka.out"): 20,
        }
    assert [line["metrics"] for line in logs] == [f"{address}/metrics"]


def test_off_means_that_nothing_of_it_is_imported() -> None:
    program = """
import sys
from tidemill.config.settings import Settings
from tidemill.spark.pipeline import Pipeline
from tidemill.services.triggerer import process
from tidemill.spark.live.monitoring import serve_metrics
settings = Settings.model_validate({"metrics": {"enabled": False}})
with serve_metrics(settings.metrics, settings, "w", None) as address:
    assert address is None
names = "prometheus_client", "tidemill.runtime.metrics", "wsgiref"
print(sorted(name for name in sys.modules if name.startswith(names)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
