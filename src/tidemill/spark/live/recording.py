"""Opens the recording of a pipeline and answers requests about it; if it is off, the recorder is not imported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from tidemill.config.redaction import redact
from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.runtime.link.progress import EngineProgress

if TYPE_CHECKING:
    from tidemill.spark.live.run_recorder import RunRecorder

log = structlog.get_logger(__name__)


@contextlib.contextmanager
def record_run(
    settings: Settings, worker: str, read_progress: Callable[[], EngineProgress]
) -> Iterator[RunRecorder | None]:
    """Record during the block; yield the sink for the link's rows and events, or None if nothing is recorded.

    Args:
        settings: The settings of the pipeline.
        worker: The worker name.
        read_progress: Returns the sums over all engines.
    """
    if not settings.debug.enabled:
        yield None
        return
    from tidemill.recorder.writing.writer import RecordWriter
    from tidemill.recorder.writing.writer_start import start_writing
    from tidemill.spark.live.run_recorder import RunRecorder

    recorder = RunRecorder()
    config = redact(settings.model_dump(mode="json"))
    group = settings.kafka.consumer_group
    writer = RecordWriter(
        settings.debug, group, worker, stored=recorder.confirm, read_progress=read_progress, config=config
    )
    recorder.writer = writer
    with start_writing(writer) as can_write:
        yield recorder if can_write else None


FindMessage = Callable[[str, int, int], OpenMessage | None]


def answer_open(find: FindMessage, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer where a message that the pipeline has not finished is, if the request names a single message.

    Args:
        find: Finds the message by topic, partition and offset; blocks.
        request: See `tidemill trace`.
    """
    query = request.get("query")
    position = [query.get(name) for name in ("topic", "partition", "offset")] if isinstance(query, dict) else []
    match position:
        case [str(topic), int(partition), int(offset)]:
            try:
                found = find(topic, partition, offset)
            except RemoteError as error:
                return {"open": None, "problem": str(error)}
            return {"open": None if found is None else msgspec.to_builtins(found)}
        case _:
            return {}


def answer_trace(recorder: RunRecorder | None, group: str, worker: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer with traces of messages if the recording is in this process's memory; clients read files themselves."""
    if recorder is None:
        return {"traces": None}
    from tidemill.recorder.format.file_layout import name_worker_folder
    from tidemill.recorder.reading.queries import MessageQuery
    from tidemill.recorder.reading.reader import Reader
    from tidemill.recorder.reading.trace_document import find_traces
    from tidemill.recorder.writing.memory_recording import MemoryRecording

    memory = recorder.writer.recording
    if not isinstance(memory, MemoryRecording):
        return {"traces": None}
    try:
        query = msgspec.convert(request.get("query"), MessageQuery)
    except msgspec.ValidationError as error:
        return {"error": f"not a valid message query: {error}"}
    reader = Reader(None, {name_worker_folder(group, worker): memory})
    return {"traces": msgspec.to_builtins(find_traces(reader, query))}
