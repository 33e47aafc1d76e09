"""`tidemill pools | variables | connections list | set | delete`, and `tidemill db migrate`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from tidemill.cli.dags.asking import AsJson, Config, Folder, asking
from tidemill.cli.help import App
from tidemill.cli.reporting import reporting
from tidemill.cli.terminal.tables import Column
from tidemill.core.errors import ConfigError

pools = App(help="Manage pools, which limit how many tasks run at once.")
variables = App(help="Manage variables, which are values that DAGs read.")
connections = App(help="Manage connections: addresses and credentials of other systems.")
db = App(help="Manage the database of DAGs.")

_POOL_COLUMNS = (
    Column("POOL", cut=True),
    Column("SLOTS", right=True),
    Column("USED", right=True),
    Column("WAITING", right=True),
    Column("DESCRIPTION", detail=True),
)
_VARIABLE_COLUMNS = (Column("VARIABLE", cut=True), Column("VALUE", cut=True), Column("DESCRIPTION", detail=True))
_CONNECTION_COLUMNS = (
    Column("CONNECTION", cut=True),
    Column("TYPE"),
    Column("HOST", cut=True),
    Column("PORT", right=True, optional=True),
    Column("LOGIN", optional=True, cut=True),
    Column("DESCRIPTION", detail=True),
)
#: The limit of the store.
_MOST_SLOTS = (1 << 31) - 1
Description = Annotated[str | None, typer.Option("--description", metavar="TEXT", help="A description.")]


@pools.command("list")
def list_pools(config: Config = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """List pools with their used slots and waiting tasks."""
    with reporting():
        from tidemill.cli.dags.views import Listing, show_rows
        from tidemill.store.calls.setting_calls import ListPools, PoolRecord

        def build_row(pool: PoolRecord) -> tuple[str, ...]:
            return pool.name, str(pool.slots), str(pool.used), str(pool.waiting), pool.description

        def encode(pool: PoolRecord) -> dict[str, Any]:
            return {
                "pool": pool.name,
                "slots": pool.slots,
                "used": pool.used,
                "waiting": pool.waiting,
                "include_deferred": pool.include_deferred,
                "description": pool.description,
            }

        with asking(config, folder) as store:
            rows = store.ask(ListPools())
        show_rows([rows], Listing(_POOL_COLUMNS, build_row, encode), as_json=as_json, nothing="no pools")


@pools.command("set")
def set_pool(
    name: Annotated[str, typer.Argument(metavar="POOL")],
    slots: Annotated[int, typer.Argument(metavar="SLOTS", min=0, max=_MOST_SLOTS)],
    description: Description = None,
    include_deferred: Annotated[
        bool | None,
        typer.Option("--include-deferred/--exclude-deferred", help="Whether deferred tasks use slots of the pool."),
    ] = None,
    config: Config = None,
    folder: Folder = None,
) -> None:
    """Create or change a pool; options that are not given stay unchanged."""
    with reporting():
        from tidemill.store.calls.setting_calls import SetPool

        with asking(config, folder, create=True) as store:
            store.ask(SetPool(name, slots, description, include_deferred))


@pools.command("delete")
def delete_pool(
    name: Annotated[str, typer.Argument(metavar="POOL")], config: Config = None, folder: Folder = None
) -> None:
    """Delete a pool."""
    with reporting():
        from tidemill.store.calls.setting_calls import DeletePool

        with asking(config, folder) as store:
            if not store.ask(DeletePool(name)):
                raise ConfigError(f"there is no pool {name!r}; `tidemill pools list` lists all pools")


@variables.command("list")
def list_variables(
    values: Annotated[bool, typer.Option("--values", help="Show the values, which may be secrets.")] = False,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List variables by name."""
    with reporting():
        from tidemill.cli.dags.views import Listing, show_rows
        from tidemill.store.calls.setting_calls import ListVariables, VariableRecord

        def build_row(variable: VariableRecord) -> tuple[str, ...]:
            return variable.key, variable.value or "", variable.description

        def encode(variable: VariableRecord) -> dict[str, Any]:
            shown = {} if variable.value is None else {"value": variable.value}
            return {"variable": variable.key, **shown, "description": variable.description}

        with asking(config, folder) as store:
            pages = store.ask_pages(lambda after: ListVariables(after=after, values=values))
            show_rows(pages, Listing(_VARIABLE_COLUMNS, build_row, encode), as_json=as_json, nothing="no variables")


@variables.command("set")
def set_variable(
    key: Annotated[str, typer.Argument(metavar="NAME")],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The value; -: read it from standard input.")],
    description: Description = None,
    config: Config = None,
    folder: Folder = None,
) -> None:
    """Create or change a variable."""
    with reporting():
        from tidemill.store.calls.task_calls import SetVariable

        with asking(config, folder, create=True) as store:
            store.ask(SetVariable(key, _read_secret(value), description))


@variables.command("delete")
def delete_variable(
    key: Annotated[str, typer.Argument(metavar="NAME")], config: Config = None, folder: Folder = None
) -> None:
    """Delete a variable."""
    with reporting():
        from tidemill.store.calls.task_calls import DeleteVariable

        with asking(config, folder) as store:
            if not store.ask(DeleteVariable(key)):
                raise ConfigError(f"there is no variable {key!r}; `tidemill variables list` lists all variables")


@connections.command("list")
def list_connections(config: Config = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """List connections by name, without secrets."""
    with reporting():
        from tidemill.cli.dags.views import Listing, show_rows
        from tidemill.store.calls.setting_calls import ConnectionRow, ListConnections

        def build_row(row: ConnectionRow) -> tuple[str, ...]:
            port = "" if row.port is None else str(row.port)
            return row.id, row.kind, row.host or "", port, row.login or "", row.description or ""

        def encode(row: ConnectionRow) -> dict[str, Any]:
            return {
                "connection": row.id,
                "type": row.kind,
                "host": row.host,
                "port": row.port,
                "schema": row.schema,
                "login": row.login,
                "description": row.description,
            }

        with asking(config, folder) as store:
            pages = store.ask_pages(lambda after: ListConnections(after=after))
            show_rows(pages, Listing(_CONNECTION_COLUMNS, build_row, encode), as_json=as_json, nothing="no connections")


@connections.command("set")
def set_connection(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    kind: Annotated[str, typer.Option("--type", metavar="TYPE", help="The type, for example http or postgres.")],
    host: Annotated[str | None, typer.Option("--host", metavar="HOST")] = None,
    port: Annotated[int | None, typer.Option("--port", metavar="PORT", min=1, max=65535)] = None,
    schema: Annotated[
        str | None, typer.Option("--schema", metavar="TEXT", help="The schema, for example a database.")
    ] = None,
    login: Annotated[str | None, typer.Option("--login", metavar="NAME")] = None,
    password: Annotated[
        str | None, typer.Option("--password", metavar="TEXT", help="The password; -: read it from standard input.")
    ] = None,
    extra: Annotated[
        str | None, typer.Option("--extra", metavar="JSON", help="Further settings, as a JSON object.")
    ] = None,
    description: Description = None,
    config: Config = None,
    folder: Folder = None,
) -> None:
    """Create or replace a connection; secrets are stored encrypted."""
    with reporting():
        from tidemill.store.calls.setting_calls import SetConnection

        _check_extra(extra)
        secret = None if password is None else _read_secret(password)
        call = SetConnection(name, kind, host, schema, login, secret, port, extra, description)
        with asking(config, folder, create=True) as store:
            store.ask(call)


def _check_extra(extra: str | None) -> None:
    try:
        found = {} if extra is None else json.loads(extra)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError("--extra must be a JSON object, such as '{\"timeout\": 10}'")


@connections.command("delete")
def delete_connection(
    name: Annotated[str, typer.Argument(metavar="NAME")], config: Config = None, folder: Folder = None
) -> None:
    """Delete a connection."""
    with reporting():
        from tidemill.store.calls.setting_calls import DeleteConnection

        with asking(config, folder) as store:
            if not store.ask(DeleteConnection(name)):
                raise ConfigError(f"there is no connection {name!r}; `tidemill connections list` lists all connections")


def _read_secret(text: str) -> str:
    return sys.stdin.read().rstrip("\n") if text == "-" else text


@db.command()
def migrate(config: Config = None, folder: Folder = None) -> None:
    """Create or update the tables of the database.

    `tidemill dev` does it, too, when it starts. Stop all services on other hosts before.
    """
    with reporting():
        from tidemill.store.calls.service_calls import ListSessions

        with asking(config, folder, create=True, upgrade=True) as store:
            store.ask(ListSessions())
        typer.echo("the database is up to date")
