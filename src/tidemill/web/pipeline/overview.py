"""Describes the current state of a pipeline, from reports that its engines send to the driver anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.config.redaction import redact_text
from tidemill.config.sections.web_settings import check_url
from tidemill.config.settings import Settings
from tidemill.config.sink_types import name_sink_section
from tidemill.runtime.link.progress import EngineProgress, SinkStats, find_stalled_partitions, name_stalled_partition
from tidemill.spark.live.status_report import find_problems, is_starting
from tidemill.spark.live.web_ui import Watched
from tidemill.spark.progress import PipelineProgress
from tidemill.web.pipeline import engines, models
from tidemill.web.pipeline.partitions import PartitionTable
from tidemill.web.pipeline.sampler import PipelineSampler
from tidemill.web.series import find_quantile

_BREAKERS = ("closed", "half-open", "open")
_SINKS = "sinks."
#: The maximum number of entries of a kind at the head of the overview.
_NOTES = 10


def describe_pipeline(
    watched: Watched, progress: PipelineProgress, partitions: PartitionTable, sampler: PipelineSampler, at: float
) -> models.Overview:
    """Return the state of a pipeline.

    Args:
        watched: The pipeline.
        progress: The totals over its engines.
        partitions: Its partitions.
        sampler: Earlier samples, for rates and trends.
        at: The current time, in seconds since the epoch.
    """
    settings, state = watched.settings, watched.asked.state()
    kafka, problems = settings.kafka, find_problems(state, progress)
    return models.Overview(
        at=at,
        group=kafka.consumer_group,
        worker=watched.worker,
        topic=kafka.source_topic,
        brokers=kafka.brokers,
        state="starting" if is_starting(state, progress) else state.phase.value,
        step=state.describe_step(),
        problems=problems[:_NOTES],
        problem_count=len(problems),
        waits=_list_waits(progress),
        wait_count=len(progress.waits),
        pauses=[
            # Whole seconds, so that rounding of two clocks does not change the end with every update.
            models.PauseView(partition=pause.partition, until=round(pause.until), by=pause.by)
            for pause in progress.pauses
        ],
        run_seconds=state.run_seconds,
        left_seconds=state.left_seconds,
        consumed=progress.consumed,
        done=progress.messages_done,
        done_per_second=sampler.rate("done"),
        delivered=progress.delivered,
        delivered_per_second=sampler.rate("delivered"),
        in_flight=progress.in_flight,
        in_flight_bytes=progress.in_flight_bytes,
        held=progress.held,
        skipped=progress.skipped,
        lag=sampler.lag(),
        tasks=_describe_tasks(progress, settings),
        task_p50_seconds=sampler.task_quantile(0.5),
        task_p95_seconds=sampler.task_quantile(0.95),
        letters=models.Letters(
            written=progress.dead_lettered, dropped=progress.letters_dropped, kinds=dict(progress.letter_kinds)
        ),
        hooks=_describe_hooks(progress, settings),
        engines=engines.list_first(progress.engines, sampler.cpu_percent),
        engine_count=len(progress.engines),
        partitions=partitions.list_first(),
        partition_count=partitions.count,
        stalled_count=partitions.count_stalled(),
        orphans=list(watched.asked.find_orphans()),
        sinks=_describe_sinks(progress, settings),
        slowest=[
            models.SlowTask(seconds=seconds, task_id=task_id, label=label)
            for seconds, task_id, label in progress.slowest
        ],
    )


def _list_waits(progress: PipelineProgress) -> list[models.ExternalWaitView]:
    # Stalled partitions come last: they have rows of their own, and there may be thousands. Waits that affect all
    # partitions come first.
    partitions = {name_stalled_partition(name) for name in find_stalled_partitions(progress.waits)}
    first = sorted(progress.waits, key=lambda what: (what in partitions, what))[:_NOTES]
    return [models.ExternalWaitView(what=what, why=redact_text(progress.waits[what])) for what in first]


def _describe_tasks(progress: PipelineProgress, settings: Settings) -> models.Tasks:
    running = sum(engine.state == "running" for engine in progress.engines)
    return models.Tasks(
        running=progress.tasks_running,
        queued=progress.tasks_queued,
        in_backoff=progress.tasks_retrying,
        done=progress.tasks_done,
        failed=progress.tasks_failed,
        retried=progress.tasks_retried,
        timed_out=progress.timeouts,
        max_running=running * settings.executor.max_executors,
    )


def _describe_hooks(progress: PipelineProgress, settings: Settings) -> models.Hooks:
    return models.Hooks(
        periodic_runs=progress.periodic_runs,
        periodic_errors=progress.periodic_errors,
        cache_enabled=settings.cache.enabled,
        cache_hits=progress.cache_hits,
        cache_misses=progress.cache_misses,
        cache_entries=progress.cache_entries,
        loop_blocks=progress.loop_blocks,
    )


def _describe_sinks(progress: PipelineProgress, settings: Settings) -> list[models.SinkView]:
    links = {
        f"{name_sink_section(kind)}.{name}": _find_ui_url(section)
        for kind, named in settings.sinks.group_by_type().items()
        for name, section in named.items()
    }
    # The breakers of engines that have ended no longer matter.
    now: Sequence[EngineProgress] = [engine.progress for engine in progress.engines if engine.progress is not None]
    return [
        _describe_sink(
            name,
            progress.sinks.get(name, SinkStats()),
            max((engine.sinks[name].breaker_state for engine in now if name in engine.sinks), default=0),
            progress.waits.get(name),
            links.get(name, ""),
        )
        for name in sorted({*links, *progress.sinks})
    ]


def _describe_sink(name: str, stats: SinkStats, breaker: int, waits: str | None, ui_url: str) -> models.SinkView:
    return models.SinkView(
        name=name.removeprefix(_SINKS),
        breaker=_BREAKERS[breaker],
        delivered=stats.delivered_payloads,
        errors=stats.error_count,
        refused=stats.refused,
        skipped=stats.skipped,
        dead_lettered=stats.dead_lettered,
        breaker_opened=stats.breaker_opened,
        batch_p50_seconds=find_quantile(stats.sends.counts, 0.5),
        batch_p95_seconds=find_quantile(stats.sends.counts, 0.95),
        last_error=None if stats.last_error is None else redact_text(stats.last_error),
        last_error_at=stats.last_error_at,
        last_delivered_at=stats.last_delivered_at,
        waits=None if waits is None else redact_text(waits),
        ui_url=ui_url,
    )


def _find_ui_url(section: object) -> str:
    """Return the address of a sink's own web pages, or '' if it is not safe to link."""
    found = section.get("ui_url", "") if isinstance(section, Mapping) else getattr(section, "ui_url", "")
    try:
        return redact_text(check_url(str(found)))
    except ValueError:
        return ""
