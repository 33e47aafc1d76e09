"""The `tidemill` command: registers all commands and documents the exit codes.

It must start fast, so no heavy module (Spark, Kafka, pydantic) is imported before a command needs it.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli import broker, config, init, web
from tidemill.cli.dags import dags, dev, objects, runs, services, tasks
from tidemill.cli.dlq import dlq
from tidemill.cli.doctor import doctor
from tidemill.cli.help import App
from tidemill.cli.pipelines import backfill, pause, release, run, status
from tidemill.cli.recordings import record, trace
from tidemill.cli.reporting import find_system_cause, print_error, reporting
from tidemill.cli.topics import consume, send
from tidemill.cli.triggers import triggers
from tidemill.runtime.log.startup import log_to_stderr
from tidemill.runtime.process.exitcode import find_exit_code

EXIT_CODES = "\n".join(
    (
        "0  success, or drained after a first SIGTERM, SIGINT or SIGHUP",
        "1  internal error in tidemill",
        "2  invalid configuration or command line",
        "3  invalid handler",
        "4  a broker, Spark or a sink failed; doctor: problems found; dlq redrive: incomplete; status: not running or "
        "not healthy",
        "5  another process uses the same worker name, or runs the same redrive",
        "6  trace: nothing found",
        "130  stopped immediately by a second signal",
    )
)

app = App(
    name="tidemill",
    help="Kafka pipelines that run a program per task and commit an offset only when its work is delivered; DAGs whose "
    "waiting tasks use no worker.",
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"tidemill {importlib.metadata.version('tidemill')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep everything running until Ctrl-C.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="The folder for all output; default: demo-output."),
    ] = None,
) -> None:
    """Process a real access log with a real Kafka and Spark on this machine, and check the result."""
    with reporting():
        from tidemill.cli.demo.demo import run_demo

        raise typer.Exit(run_demo(keep=keep, directory=directory))


app.command(epilog=EXIT_CODES)(run.run)
app.command(epilog=EXIT_CODES)(backfill.backfill)
app.command(epilog=EXIT_CODES)(status.status)
app.command(epilog=EXIT_CODES)(release.release)
app.command(epilog=EXIT_CODES)(pause.pause)
app.command(epilog=EXIT_CODES)(pause.resume)
app.command(epilog=EXIT_CODES)(pause.restart)
app.command(epilog=EXIT_CODES)(trace.trace)
app.command(epilog=EXIT_CODES)(web.web)
app.command()(init.init)
app.add_typer(config.app, name="config")
app.add_typer(triggers.app, name="triggers")
app.add_typer(dlq.app, name="dlq", epilog=EXIT_CODES)
app.add_typer(record.app, name="record")
app.command(epilog=EXIT_CODES)(dev.dev)
for _service in (services.scheduler, services.triggerer, services.worker, services.parser):
    app.command(epilog=EXIT_CODES)(_service)
app.add_typer(services.services, name="services")
app.add_typer(dags.app, name="dags", epilog=EXIT_CODES)
app.add_typer(runs.app, name="runs")
app.add_typer(tasks.app, name="tasks")
app.add_typer(objects.pools, name="pools")
app.add_typer(objects.variables, name="variables")
app.add_typer(objects.connections, name="connections")
app.add_typer(objects.db, name="db")
app.command()(doctor.doctor)
app.command()(broker.broker)
app.command()(send.send)
app.command()(consume.consume)


def _log_warnings() -> None:
    from tidemill.config.settings import LoggingSettings
    from tidemill.runtime.log.setup import configure

    configure(LoggingSettings(level="WARNING"))


def open_closed_streams() -> None:
    """Open the null device for each standard stream that was closed before this process started.

    Python sets such streams to None, and a socket or file of tidemill would get their file descriptors.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - gets the lowest free file descriptor, and is never closed
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def main() -> None:
    """Run the command line."""
    open_closed_streams()
    log_to_stderr(_log_warnings)
    try:
        app()
    except OSError as error:  # help and completions are written before any command runs
        if (cause := find_system_cause(error)) is None:
            raise
        print_error(cause)
        sys.exit(find_exit_code(cause))
    finally:
        # The system frees the memory; searching all of it for cycles takes the interpreter a second on a busy host.
        gc.freeze()
