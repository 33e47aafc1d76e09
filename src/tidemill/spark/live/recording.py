"""Opens the recording of a pipeline, unless it is off: then nothing of it is imported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tidemill.config.redaction import redact
from tidemill.config.settings import Settings
from tidemill.runtime.progress import EngineProgress

if TYPE_CHECKING:
    from tidemill.spark.live.run_recorder import RunRecorder


@contextlib.contextmanager
def record_run(
    settings: Settings, worker: str, read_progress: Callable[[], EngineProgress]
) -> Iterator[RunRecorder | None]:
    """Record while the block runs; yields what the link gives rows and events to, or None if nothing is recorded.

    Args:
        settings: Of the pipeline.
        worker: The worker's name.
        read_progress: Returns the sums over all engines.
    """
    if not settings.debug.enabled:
        yield None
        return
    from tidemill.recorder.writer import RecordWriter
    from tidemill.spark.live.run_recorder import RunRecorder

    recorder = RunRecorder()
    config = redact(settings.model_dump(mode="json"))
    group = settings.kafka.consumer_group
    with RecordWriter(
        settings.debug, group, worker, stored=recorder.confirm, read_progress=read_progress, config=config
    ) as writer:
        recorder.writer = writer
        yield recorder
