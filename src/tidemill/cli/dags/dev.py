"""`tidemill dev`: runs the DAGs of a folder on this machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.dags.asking import Config
from tidemill.cli.reporting import reporting
from tidemill.runtime.process.exitcode import ExitCode

FolderArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FOLDER", help="The folder of the DAG files; default: dags.folder, or else dags."),
]


Plain = Annotated[bool, typer.Option("--plain", help="Show no live table of runs, even on a terminal.")]


def dev(folder: FolderArgument = None, config: Config = None, plain: Plain = False) -> None:
    """Run the DAGs of a folder on this machine: scheduler, worker, triggerer and web UI in one command.

    Saved files are reloaded immediately. Runs are stored in dags.db next to the folder. On a terminal, a table below
    the log shows the latest runs. Ctrl-C lets running tasks finish; a second one stops immediately. (To run a Kafka
    pipeline with code reloading: tidemill run --dev.)
    """
    with reporting(), _ending_well():
        from tidemill.config.loading import load_settings
        from tidemill.runtime.identity import find_worker_name
        from tidemill.runtime.log.setup import configure
        from tidemill.services.dag_store import choose_folder
        from tidemill.services.dev.process import run_dev
        from tidemill.services.supervision.supervisor import ServiceFolder

        settings = load_settings(config)
        configure(settings.logging, worker_id=find_worker_name(settings))
        about = ServiceFolder(settings, choose_folder(settings, folder), config)
        if plain or not sys.stderr.isatty():
            raise typer.Exit(run_dev(about))
        from tidemill.cli.dags.dev_screen import DevScreen
        from tidemill.cli.terminal.status_line import StatusLine

        screen = DevScreen()
        with StatusLine(screen.format):
            code = run_dev(about, screen.follow)
        raise typer.Exit(code)


@contextlib.contextmanager
def _ending_well() -> Iterator[None]:
    """End the command with exit code 0 at Ctrl-C during the first imports, when nothing has been started yet."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.OK) from None
