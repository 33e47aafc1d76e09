"""`tidemill run`: runs a pipeline in the foreground until it is stopped."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.leaving import LEAVE_SECONDS, leave_within
from tidemill.cli.reporting import print_error, reporting
from tidemill.core.errors import TidemillError


def run(
    handler: Annotated[
        str, typer.Option("--handler", metavar="MODULE:CLASS", help="The handler, for example handler:LogHandler.")
    ],
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="The YAML file; default: what TIDEMILL_CONFIG names."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No live status line, even on a terminal.")] = False,
    dev: Annotated[
        bool,
        typer.Option(
            "--dev",
            help="For development: run new code whenever a file is saved, and a Kafka if none answers on this machine.",
        ),
    ] = False,
) -> None:
    """Run a pipeline until it is stopped.

    The first SIGTERM or SIGINT (Ctrl-C) drains: it stops reading, running tasks finish, and finished offsets are
    committed. A second one stops at once.
    """
    with reporting():
        from tidemill.config.loading import load_settings

        # Before anything heavy is imported, so that common mistakes are reported at once.
        settings = load_settings(config)
        if dev:
            from tidemill.cli.dev import write_no_bytecode

            write_no_bytecode()
        from tidemill.cli.handlers import load_handler

        instance = load_handler(handler)
        from tidemill.cli.status import live_status
        from tidemill.spark.pipeline import Pipeline

        with contextlib.ExitStack() as stack:
            files = None
            if dev:
                from tidemill.cli.dev import DevFiles, dev_broker

                files = DevFiles(handler, config)
                stack.enter_context(dev_broker(settings))
            pipeline = Pipeline(instance, settings=settings, files=files)
            with live_status(pipeline.progress, plain=plain):
                code = pipeline.run()
        if isinstance(pipeline.error, TidemillError):
            # It was logged as well, but the log may go elsewhere.
            print_error(pipeline.error)
        if pipeline.error is None and not pipeline.progress().engines:  # the start was ended
            leave_within(LEAVE_SECONDS, code)
        raise typer.Exit(code)
