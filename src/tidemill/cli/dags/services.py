"""`tidemill scheduler | triggerer | worker | parser`: the services of DAGs, on any number of hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.dags.asking import AsJson, Config, Folder, asking
from tidemill.cli.help import App
from tidemill.cli.reporting import reporting
from tidemill.cli.terminal.tables import Column
from tidemill.core.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.config.known_secrets import KnownSecrets
    from tidemill.services.supervision.supervisor import ServiceFolder
    from tidemill.store.calls.service_calls import ServiceRecord


services = App(help="Show the services of all hosts.")

Queues = Annotated[
    str | None, typer.Option("--queues", metavar="A,B", help="The queues whose work it takes; default: the settings.")
]
_COLUMNS = (
    Column("SESSION", right=True),
    Column("SERVICE"),
    Column("NAME", cut=True),
    Column("HOST", cut=True),
    Column("PID", right=True),
    Column("BEAT", right=True),
    Column("RUNS", right=True),
    Column("QUEUES", cut=True),
    Column("VERSION", optional=True),
    Column("BELOW", optional=True, right=True),
)


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


def worker(
    config: Config = None,
    folder: Folder = None,
    queues: Queues = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", min=1, help="How many tasks run at once.")
    ] = None,
) -> None:
    """Run one of the workers of a database: it runs the attempts of tasks. The store must be in PostgreSQL.

    SIGTERM or Ctrl-C lets running tasks finish; a second one stops immediately.
    """
    with reporting():
        from tidemill.config.known_secrets import KnownSecrets
        from tidemill.services.hosts.worker import run_worker

        secrets = KnownSecrets()
        about = _prepare(config, folder, secrets)
        changes = {"queues": _split(queues), "concurrency": concurrency}
        raise typer.Exit(run_worker(_change(about, "worker", changes), secrets))


def triggerer(
    config: Config = None,
    folder: Folder = None,
    queues: Queues = None,
    capacity: Annotated[
        int | None, typer.Option("--capacity", metavar="N", min=1, help="How many triggers run at once.")
    ] = None,
) -> None:
    """Run one of the triggerers of a database: it runs what deferred tasks wait for.

    The store must be in PostgreSQL.
    """
    with reporting():
        from tidemill.services.hosts.triggerer import run_triggerer

        changes = {"queues": _split(queues), "capacity": capacity}
        raise typer.Exit(run_triggerer(_change(_prepare(config, folder), "triggerer", changes)))


@services.command("list")
def list_services(config: Config = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """List the services of all hosts, with what they run."""
    with reporting():
        from tidemill.cli.dags.views import Listing, show_rows
        from tidemill.store.calls.service_calls import DescribeServices

        with asking(config, folder) as store:
            rows = store.ask(DescribeServices())
        nothing = "no services; start them with `tidemill dev`, or one by one on any host"
        show_rows([rows], Listing(_COLUMNS, _build_row, _encode), as_json=as_json, nothing=nothing)


def _build_row(record: ServiceRecord) -> tuple[str, ...]:
    from tidemill.cli.terminal.tables import format_age

    one = record.session
    runs = f"{record.held}/{one.capacity}" if one.capacity else ""
    return (
        str(one.id),
        one.kind,
        one.name,
        one.host,
        str(one.pid),
        format_age(one.quiet_us / 1e6),
        runs,
        ",".join(one.queues),
        one.version,
        "" if one.parent is None else str(one.parent),
    )


def _encode(record: ServiceRecord) -> dict[str, Any]:
    one = record.session
    return {
        "session": one.id,
        "kind": one.kind,
        "name": one.name,
        "host": one.host,
        "pid": one.pid,
        "beat_age_seconds": round(one.quiet_us / 1e6, 3),
        "holds": record.held,
        "capacity": one.capacity,
        "queues": list(one.queues),
        "version": one.version,
        "supervised_by": one.parent,
    }


def _split(queues: str | None) -> list[str] | None:
    """Return the queues of an option.

    Raises:
        ConfigError: One of them is empty.
    """
    if queues is None:
        return None
    found = [queue.strip() for queue in queues.split(",")]
    if not all(found):
        raise ConfigError(f"--queues {queues!r} has an empty name; give names separated by commas: default,large")
    return found


def _change(about: ServiceFolder, section: str, changes: dict[str, Any]) -> ServiceFolder:
    """Return the settings with the options of the command line.

    Raises:
        ConfigError: One of them is invalid.
    """
    from tidemill.config.loading import revalidate

    given = {name: value for name, value in changes.items() if value is not None}
    changed = getattr(about.settings, section).model_copy(update=given)
    settings = about.settings.model_copy(update={section: changed})
    return replace(about, settings=revalidate(settings, "the command line"))


def _prepare(config: Path | None, folder: Path | None, secrets: KnownSecrets | None = None) -> ServiceFolder:
    """Load the settings, configure the log, and find the folder.

    Raises:
        ConfigError: The settings are invalid, or the folder does not exist.
    """
    from tidemill.config.loading import load_settings
    from tidemill.runtime.identity import find_worker_name
    from tidemill.runtime.log.setup import configure
    from tidemill.services.dag_store import choose_folder
    from tidemill.services.supervision.supervisor import ServiceFolder

    settings = load_settings(config)
    configure(settings.logging, secrets=secrets, worker_id=find_worker_name(settings))
    return ServiceFolder(settings, choose_folder(settings, folder), config)
