"""Builds the web UI of a pipeline's driver; `spark.live.web_ui` imports it by name."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from tidemill.recorder.format.file_layout import name_worker_folder
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.writing.memory_recording import MemoryRecording
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.runtime.log.setup import version
from tidemill.spark.live.readiness import find_unready
from tidemill.spark.live.run_recorder import RunRecorder
from tidemill.spark.live.web_ui import Watched
from tidemill.web.letters.letter_box import LetterBox
from tidemill.web.letters.redrive_desk import RedriveDesk
from tidemill.web.letters.redrive_section import build_redrive_section
from tidemill.web.letters.section import build_letters_section
from tidemill.web.pages import Pages
from tidemill.web.pipeline.section import PipelineView, build_pipeline_section
from tidemill.web.probe.desk import ProbeDesk
from tidemill.web.probe.section import build_probe_section
from tidemill.web.recorded.archive import Archive
from tidemill.web.recorded.section import build_recorded_section
from tidemill.web.sections import Health, PageAbout, UiSection
from tidemill.web.server import WebServer
from tidemill.web.values.section import ValueReader, build_values_section


def describe_about(watched: Watched) -> PageAbout:
    """Return the description of the process for the head of every page."""
    settings = watched.settings
    links = [(link.name, link.url) for link in settings.debug.custom_links]
    if watched.metrics_address is not None:
        links.append(("Metrics", f"{watched.metrics_address}/metrics"))
    group = settings.kafka.consumer_group
    return PageAbout("pipeline", group, watched.worker, version(), links, settings.cluster_name)


def open_archive(watched: Watched, writer: RecordWriter | None = None) -> Archive:
    """Return the recordings of this pipeline, and of others in the same folder."""
    settings = watched.settings
    debug = settings.debug
    try:
        folder = Path(debug.db_dir).expanduser() if debug.db_dir else None
    except RuntimeError:  # a user without a home directory: the recording is in memory
        folder = None
    memory = {}
    if writer is not None and isinstance(recording := writer.recording, MemoryRecording):
        name = name_worker_folder(settings.kafka.consumer_group, watched.worker)
        memory[name] = recording
    return Archive(
        Reader(folder, memory), debug.max_ui_rows, watched.engines.find_message, settings.kafka.consumer_group
    )


def build_server(listener: socket.socket, key: str | None, watched: Watched, recorder: RunRecorder | None) -> WebServer:
    """Return the server.

    Args:
        listener: A listening socket.
        key: The key in the printed address; None if there are users or tokens.
        watched: The pipeline.
        recorder: Records messages, tasks and actions; None: nothing is recorded.
    """
    writer = recorder.writer if recorder is not None else None

    def mount(pages: Pages) -> Sequence[UiSection]:
        archive = open_archive(watched, writer)
        view = PipelineView(watched, pages, archive, writer)
        view.start()
        letters = build_letters_section(LetterBox(watched.settings, config=watched.config), pages, archive.max_rows)
        desk = RedriveDesk(watched.settings, view.note_action)
        redrives = build_redrive_section(desk, watched.settings, pages)
        reader = ValueReader(watched.settings)
        values = build_values_section(reader, pages)
        probes = build_probe_section(ProbeDesk(watched.engines, view.note_action), reader, watched.settings, pages)
        recorded = build_recorded_section(archive, pages, peers=view.peers)
        return [build_pipeline_section(view, pages), recorded, letters, redrives, values, probes]

    def find_reasons() -> list[str]:
        return find_unready(watched.asked.state(), watched.asked.progress(), watched.asked.find_orphans())

    health = Health(find_dead=list, find_unready=find_reasons)
    return WebServer(listener, watched.settings.debug, key, describe_about(watched), health, mount)
