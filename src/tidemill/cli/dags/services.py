"""`tidemill scheduler | triggerer | worker | parser`: the services of DAGs, on any number of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tidemill.cli.dags.asking import Config, Folder
from tidemill.cli.reporting import reporting

if TYPE_CHECKING:
    from tidemill.config.known_secrets import KnownSecrets
    from tidemill.services.supervision.supervisor import ServiceFolder


def scheduler(config: Config = None, folder: Folder = None) -> None:
    """Run one of the schedulers of a database: it creates runs, decides which tasks run, and replaces dead services.

    It also reads the DAG files, unless dags.parser is separate. Start as many as you like, on any hosts. The store must
    be in PostgreSQL.
    """
    with reporting():
        from tidemill.services.hosts.scheduler import run_scheduler

        raise typer.Exit(run_scheduler(_prepare(config, folder)))


def parser(config: Config = None, folder: Folder = None) -> None:
    """Run one of the parsers of a database: it reads the DAG files of a folder. The store must be in PostgreSQL."""
    with reporting():
        from tidemill.services.hosts.parser import run_parser

        raise typer.Exit(run_parser(_prepare(config, folder)))


def worker(config: Config = None, folder: Folder = None) -> None:
    """Run one of the workers of a database: it runs the attempts of tasks. The store must be in PostgreSQL.

    SIGTERM or Ctrl-C lets running tasks finish; a second one stops immediately.
    """
    with reporting():
        from tidemill.config.known_secrets import KnownSecrets
        from tidemill.services.hosts.worker import run_worker

        secrets = KnownSecrets()
        raise typer.Exit(run_worker(_prepare(config, folder, secrets), secrets))


def triggerer(config: Config = None, folder: Folder = None) -> None:
    """Run one of the triggerers of a database: it runs what deferred tasks wait for.

    The store must be in PostgreSQL.
    """
    with reporting():
        from tidemill.services.hosts.triggerer import run_triggerer

        raise typer.Exit(run_triggerer(_prepare(config, folder)))


def _prepare(config: Path | None, folder: Path | None, secrets: KnownSecrets | None = None) -> ServiceFolder:
    """Load the settings, configure the log, and find the folder.

    Raises:
        ConfigError: The settings are invalid, or there is no such folder.
    """
    from tidemill.config.loading import load_settings
    from tidemill.runtime.identity import find_worker_name
    from tidemill.runtime.log.setup import configure
    from tidemill.services.dag_store import choose_folder
    from tidemill.services.supervision.supervisor import ServiceFolder

    settings = load_settings(config)
    configure(settings.logging, secrets=secrets, worker_id=find_worker_name(settings))
    return ServiceFolder(settings, choose_folder(settings, folder), config)
