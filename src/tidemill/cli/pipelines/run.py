"""`tidemill run`: runs a pipeline in the foreground until it is stopped."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.leaving import LEAVE_SECONDS, leave_within
from tidemill.cli.options import ConfigPath, HandlerName
from tidemill.cli.reporting import reporting

if TYPE_CHECKING:
    from tidemill.runtime.files.code_watch import FirstFiles


def run(
    handler: HandlerName,
    config: ConfigPath = None,
    plain: Annotated[bool, typer.Option("--plain", help="Log a line every 10 s, even on a terminal.")] = False,
    dev: Annotated[
        bool,
        typer.Option(
            "--dev",
            help="For development: reload code on save, and start a Kafka if none answers on this machine. (For DAGs: "
            "tidemill dev.)",
        ),
    ] = False,
) -> None:
    """Run a pipeline until it is stopped.

    The first SIGTERM, SIGINT (Ctrl-C) or SIGHUP (closed terminal) drains: the pipeline stops reading, finishes running
    tasks, and commits finished offsets. A second signal stops it immediately.
    """
    with reporting(), contextlib.ExitStack() as stack:
        from tidemill.config.loading import find_source, load_settings

        first = _note_files(config) if dev else None
        # Load the settings before heavy imports, so that common mistakes are reported at once.
        settings = load_settings(config)
        from tidemill.spark.session.early import launched_early

        # Start Spark's JVM while the handler and the other modules are imported.
        spark = stack.enter_context(launched_early(settings.spark))
        from tidemill.cli.pipelines.handlers import load_handler

        instance = load_handler(handler)
        from tidemill.cli.terminal.status_text import format_status
        from tidemill.cli.terminal.watching import list_fields, show_summary, watch
        from tidemill.spark.pipeline import Pipeline

        files = None
        if dev:
            from tidemill.cli.pipelines.dev import DevFiles, dev_broker

            files = DevFiles(handler, config, first)
            stack.enter_context(dev_broker(settings))
        pipeline = Pipeline(instance, find_source(config), settings=settings, spark=spark, files=files)

        def describe(rate: float, width: int) -> str:
            return format_status(pipeline.state(), pipeline.progress(), rate, width)

        with watch(describe, lambda: (pipeline.state(), pipeline.progress()), list_fields, plain=plain):
            code = pipeline.run(tell=False)
        if pipeline.progress().engines:
            show_summary(pipeline.progress(), pipeline.state().work_seconds)
        elif pipeline.error is None:  # startup was interrupted
            leave_within(LEAVE_SECONDS, code)
        pipeline.tell_failure()
        raise typer.Exit(code)


def _note_files(config: Path | None) -> FirstFiles:
    """Return the current state of the files; any later save counts as a change, however long startup takes."""
    from tidemill.runtime.files.code_watch import FirstFiles

    _write_no_bytecode()
    return FirstFiles(config)


def _write_no_bytecode() -> None:
    """Keep this process and the engines from writing `.pyc` files.

    Their timestamps have whole seconds: a `.pyc` file written between two saves in one second would hide the second
    save.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
