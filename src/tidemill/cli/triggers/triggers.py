"""`tidemill triggers run | check | list | events | streams`: hosts triggers and shows their state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tidemill.cli.completion import complete_triggers
from tidemill.cli.help import App
from tidemill.cli.reporting import divert_prints, let_reader_leave, reporting
from tidemill.core.wording import format_count

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from tidemill.store.records import EventRecord, Page, TriggerRecord

T = TypeVar("T")

app = App(help="Host triggers, and show their state.")

Specs = Annotated[Path, typer.Argument(metavar="SPEC", help="The YAML file with the list of triggers.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The YAML file with settings; default: the file in TIDEMILL_CONFIG."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")]
#: The number of rows per read; every list is read page by page.
_PAGE = 500
#: The largest integer of the databases.
_MOST = 2**63 - 1


@app.command()
def run(specs: Specs, config: Config = None) -> None:
    """Run a list of triggers and store their events until stopped.

    A first SIGTERM or SIGINT (Ctrl-C) stops it cleanly, a second one immediately. SIGHUP reloads the list.
    """
    with reporting():
        import signal

        # Ignore SIGHUP until the host handles it: it would end the process, and the list has not been read yet.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

        from tidemill.config.loading import load_settings
        from tidemill.runtime.identity import find_worker_name
        from tidemill.runtime.log.setup import configure
        from tidemill.services.triggerer.hosting.leaving import end_anyway
        from tidemill.services.triggerer.process import run_host

        settings = load_settings(config)
        configure(settings.logging, worker_id=find_worker_name(settings))
        code = run_host(settings, specs)
        end_anyway(code)
        raise typer.Exit(code)


@app.command()
def check(
    specs: Specs, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False
) -> None:
    """Check a list of triggers: import and create each one, without running any."""
    with reporting(), divert_prints(as_json) as output:
        from tidemill.core.errors import ConfigError
        from tidemill.services.triggerer.lists.checking import check_list

        try:
            count = check_list(specs)
        except ConfigError as error:
            if not as_json:
                raise
            typer.echo(json.dumps({"ok": False, "spec": str(specs), "problems": str(error).splitlines()}), file=output)
            raise typer.Exit(2) from None
        if as_json:
            typer.echo(json.dumps({"ok": True, "spec": str(specs), "triggers": count, "problems": []}), file=output)
        else:
            typer.echo(f"ok: {specs}, {format_count(count, 'trigger')}")


@app.command(name="list")
def list_(specs: Specs, config: Config = None, as_json: AsJson = False) -> None:
    """Show all triggers in the store, with their state, number of events and last error."""
    with reporting():
        from tidemill.cli.triggers.triggers_view import encode_trigger, format_triggers
        from tidemill.store.queries.triggers.triggers import list_triggers

        def page(connection: Connection, after: int | None) -> Page[TriggerRecord]:
            return list_triggers(connection, after=after, limit=_PAGE)

        _show(_read_pages(specs, config, page), encode_trigger if as_json else None, format_triggers, "no triggers")


@app.command()
def events(
    specs: Specs,
    config: Config = None,
    trigger: Annotated[
        str | None,
        typer.Option(
            "--trigger",
            metavar="NAME",
            help="Show only events of this trigger.",
            autocompletion=complete_triggers,
        ),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            "--after",
            metavar="ID",
            min=-1,
            max=_MOST,
            help="Show only events after this id, or with --trigger, after this sequence number.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, max=_MOST, help="Show at most N events.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show stored events, oldest first."""
    with reporting():
        from tidemill.cli.triggers.triggers_view import encode_event, format_events
        from tidemill.core.errors import ConfigError
        from tidemill.store.queries.triggers.events import list_events, list_trigger_events
        from tidemill.store.queries.triggers.triggers import find_triggers

        def page(connection: Connection, behind: int | None) -> Page[EventRecord]:
            behind = after if behind is None else behind
            if trigger is None:
                return list_events(connection, after=behind, limit=_PAGE)
            found = find_triggers(connection, [trigger])
            if not found:
                raise ConfigError(
                    f"the store has no trigger {trigger!r}; to list its triggers, run: tidemill triggers list {specs}"
                )
            return list_trigger_events(connection, found[0].id, after=behind, limit=_PAGE)

        pages = _cut_pages(_read_pages(specs, config, page), limit)
        _show(pages, encode_event if as_json else None, format_events, "no events")


@app.command()
def streams(specs: Specs, as_json: AsJson = False) -> None:
    """Show the shared streams of this machine's hosts: for each lane, the oldest event and the triggers that hold it.

    A host on standby names the host that runs the list.
    """
    with reporting():
        from tidemill.cli.terminal.tables import find_width
        from tidemill.cli.triggers.triggers_view import format_host
        from tidemill.services.triggerer.lists.control import ask, build_silence_error
        from tidemill.services.triggerer.lists.file import require_list

        require_list(specs)
        answers = ask(specs)
        with let_reader_leave():
            for report in answers.reports:
                for line in [json.dumps(report)] if as_json else format_host(report, find_width()):
                    typer.echo(line)
        if answers.silent:
            raise build_silence_error(specs)


def _read_pages(
    specs: Path, config: Path | None, page: Callable[[Connection, int | None], Page[T]]
) -> Iterator[Sequence[T]]:
    """Yield the rows of a list page by page, over one connection to the store."""
    import asyncio

    from tidemill.config.loading import load_settings
    from tidemill.services.triggerer.lists.file import require_list
    from tidemill.store.engines.opening import choose_store_url, open_reader

    settings = load_settings(config)
    require_list(specs)
    url = choose_store_url(settings.store.url, specs.resolve().parent)
    with asyncio.Runner() as runner:
        database = runner.run(open_reader(url))
        try:
            after: int | None = None
            while True:
                found = runner.run(database.read(_start_at(page, after)))
                yield found.rows
                after = found.next
                if after is None:
                    return
        finally:
            runner.run(database.close())


def _start_at(page: Callable[[Connection, int | None], Page[T]], after: int | None) -> Callable[[Connection], Page[T]]:
    return lambda connection: page(connection, after)


def _cut_pages(pages: Iterator[Sequence[T]], limit: int | None) -> Iterator[Sequence[T]]:
    """Yield pages up to a total number of rows; reads no page more than necessary."""
    left = _MOST if limit is None else limit
    for rows in pages:
        yield rows[:left]
        left -= len(rows)
        if left <= 0:
            return


def _show(
    pages: Iterator[Sequence[T]],
    encode: Callable[[T], str] | None,
    table: Callable[[Sequence[T], int | None], Iterator[str]],
    nothing: str,
) -> None:
    """Print rows as they are read: as JSON with `encode`, otherwise as a table per page."""
    from tidemill.cli.terminal.tables import find_width

    shown = False
    for rows in pages:
        if rows:
            for line in map(encode, rows) if encode is not None else table(rows, find_width()):
                typer.echo(line)
            shown = True
    if not shown and encode is None:
        typer.echo(nothing)
