"""Opens the recording of a trigger host; if it is off, its modules are not imported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemill.config.redaction import redact
from tidemill.config.settings import Settings
from tidemill.services.triggerer.hosting.host_book import HostBook

if TYPE_CHECKING:
    from tidemill.services.triggerer.lists.reporting.host_recorder import HostRecorder

#: How long the shutdown of the host may wait for the disk.
END_SECONDS = 1.0


@contextlib.contextmanager
def record_host(settings: Settings, worker: str, list_name: str, book: HostBook) -> Iterator[HostRecorder | None]:
    """Record while the block runs; yields None if nothing is recorded.

    Args:
        settings: Uses the section `debug`.
        worker: The worker's name.
        list_name: The name of the trigger list.
        book: The statistics of the host.
    """
    if not settings.debug.enabled:
        yield None
        return
    from tidemill.recorder.format.file_layout import name_list_folder, name_list_group
    from tidemill.recorder.writing.writer import RecordWriter
    from tidemill.recorder.writing.writer_start import start_writing
    from tidemill.services.triggerer.lists.reporting.host_recorder import HostRecorder

    recorder = HostRecorder(book)
    recorder.writer = RecordWriter(
        settings.debug,
        name_list_group(list_name),
        worker,
        config=redact(settings.model_dump(mode="json")),
        sample=lambda at, last: recorder.sample(at),
        folder=name_list_folder(list_name),
        end_seconds=END_SECONDS,
    )
    with start_writing(recorder.writer) as can_write:
        if not can_write:
            yield None
            return
        recorder.follow()
        try:
            yield recorder
        finally:
            recorder.finish()
