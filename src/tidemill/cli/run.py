"""`tidemill run`: runs a pipeline in the foreground until it is stopped."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from tidemill.cli.leaving import LEAVE_SECONDS, leave_within
from tidemill.cli.options import ConfigPath, HandlerName
from tidemill.cli.reporting import reporting


def run(
    handler: HandlerName,
    config: ConfigPath = None,
    plain: Annotated[bool, typer.Option("--plain", help="Log a line every 10 s, even on a terminal.")] = False,
) -> None:
    """Run a pipeline until it is stopped.

    The first SIGTERM or SIGINT (Ctrl-C) drains: it stops reading, running tasks finish, and finished offsets are
    committed. A second one stops at once.
    """
    with reporting(), contextlib.ExitStack() as stack:
        from tidemill.config.loading import load_settings

        # Before anything heavy is imported, so that common mistakes are reported at once.
        settings = load_settings(config)
        from tidemill.spark.session.early import launched_early

        # Spark's JVM starts while the handler and everything else is imported.
        spark = stack.enter_context(launched_early(settings.spark))
        from tidemill.cli.handlers import load_handler

        instance = load_handler(handler)
        from tidemill.cli.status_text import format_status
        from tidemill.cli.watching import list_fields, show_summary, watch
        from tidemill.spark.pipeline import Pipeline

        pipeline = Pipeline(instance, settings=settings, spark=spark)

        def describe(rate: float, width: int) -> str:
            return format_status(pipeline.state(), pipeline.progress(), rate, width)

        with watch(describe, lambda: (pipeline.state(), pipeline.progress()), list_fields, plain=plain):
            code = pipeline.run()
        if pipeline.progress().engines:
            show_summary(pipeline.progress(), pipeline.state().work_seconds)
        elif pipeline.error is None:  # the start was ended
            leave_within(LEAVE_SECONDS, code)
        raise typer.Exit(code)
