"""`tidemill triggers run | list | events | streams`: hosts triggers, and shows what they did."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tidemill.cli.reporting import reporting

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from tidemill.store.records import EventRecord, Page, TriggerRecord

T = TypeVar("T")

app = typer.Typer(help="Host triggers, and see what they do.", no_args_is_help=True)

Specs = Annotated[Path, typer.Argument(metavar="SPEC", help="The YAML file with the list of triggers.")]
Config = Annotated[
    Path | None, typer.Option("--config", help="The YAML file with settings; default: what TIDEMILL_CONFIG names.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document per line.")]
#: Rows read at once; every list is read page by page.
_PAGE = 500
#: The largest integer of the databases.
_MOST = 2**63 - 1
#: A table shows this many characters of an error.
_ERROR_LENGTH = 200


@app.command()
def run(specs: Specs, config: Config = None) -> None:
    """Run a list of triggers and store their events until stopped.

    SIGTERM or SIGINT (Ctrl-C) stops it cleanly, a second one at once. SIGHUP reads the list again.
    """
    with reporting():
        import signal

        # Until the host handles it: a hangup would end the process, and the list is not read before anyway.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

        from tidemill.config.loading import load_settings
        from tidemill.runtime.identity import find_worker_name
        from tidemill.runtime.log import configure
        from tidemill.services.triggerer.process import end_anyway, run_host

        settings = load_settings(config)
        configure(settings.logging, worker_id=find_worker_name(settings))
        code = run_host(settings, specs)
        end_anyway(code)
        raise typer.Exit(code)


@app.command(name="list")
def list_(specs: Specs, config: Config = None, as_json: AsJson = False) -> None:
    """Show all triggers that the store knows: their state, how many events they fired, and how they failed."""
    with reporting():
        from tidemill.store.queries.triggers import list_triggers

        def page(connection: Connection, after: int | None) -> Page[TriggerRecord]:
            return list_triggers(connection, after=after, limit=_PAGE)

        _show(_read_pages(specs, config, page), _build_trigger_row, as_json, "no triggers")


@app.command()
def events(
    specs: Specs,
    config: Config = None,
    trigger: Annotated[str | None, typer.Option("--trigger", help="Only events of the trigger with this name.")] = None,
    after: Annotated[
        int | None,
        typer.Option(
            "--after", min=-1, max=_MOST, help="Only events after this id, or with --trigger after this sequence."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, max=_MOST, help="At most this many.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show stored events, oldest first."""
    with reporting():
        import itertools

        from tidemill.core.errors import ConfigError
        from tidemill.store.queries.events import list_events, list_trigger_events
        from tidemill.store.queries.triggers import find_triggers

        def page(connection: Connection, behind: int | None) -> Page[EventRecord]:
            behind = after if behind is None else behind
            if trigger is None:
                return list_events(connection, after=behind, limit=_PAGE)
            found = find_triggers(connection, [trigger])
            if not found:
                raise ConfigError(f"the store has no trigger {trigger!r}; see tidemill triggers list {specs}")
            return list_trigger_events(connection, found[0].id, after=behind, limit=_PAGE)

        rows = itertools.islice(_read_pages(specs, config, page), limit)
        _show(rows, _build_event_row, as_json, "no events")


@app.command()
def streams(specs: Specs, as_json: AsJson = False) -> None:
    """Show what the shared streams of this machine's hosts wait for: per lane, the oldest event and who holds it.

    A host that waits for another one names it.
    """
    with reporting():
        from tidemill.services.triggerer.control import ask, build_silence_error

        answers = ask(specs)
        for report in answers.reports:
            if as_json:
                typer.echo(json.dumps(report))
            else:
                _show_streams(report)
        if answers.silent:
            raise build_silence_error(specs)


def _show_streams(report: dict[str, Any]) -> None:
    holder = report["waits_for"]
    if holder is not None:
        typer.echo(
            f"process {report['pid']} waits: process {holder['process']} on {holder['host']} runs the list "
            f"{holder['list']} since {holder['since']}"
        )
    elif report["store"] is None:
        typer.echo(f"process {report['pid']} starts")
    else:
        typer.echo(f"process {report['pid']}: {report['running']} triggers, store {report['store']}")
    for stream in report["streams"]:
        full = "" if stream["full_seconds"] is None else f", not polled for {stream['full_seconds']:.1f} s (full)"
        typer.echo(
            f"{stream['key']}: {len(stream['subscribers'])} subscribers, {stream['outstanding']} outstanding{full}"
        )
        for name, seconds in stream["failed"].items():
            typer.echo(f"  {name} failed {seconds:.1f} s ago and has not ended")
        for lane in stream["lanes"]:
            holders = ", ".join(lane["holders"]) or "nobody: being advanced"
            typer.echo(
                f"  {lane['lane'] or 'lane'}: {lane['outstanding']} outstanding, event {lane['head']} "
                f"since {lane['age_seconds']:.1f} s held by {holders}"
            )


def _read_pages(specs: Path, config: Path | None, page: Callable[[Connection, int | None], Page[T]]) -> Iterator[T]:
    """Yield the rows of all pages of a list, over one connection to the store."""
    from tidemill.config.loading import load_settings
    from tidemill.store.opening import open_reader, store_url

    url = store_url(load_settings(config).store.url, specs.resolve().parent)
    with asyncio.Runner() as runner:
        database = runner.run(open_reader(url))
        try:
            after: int | None = None
            while True:
                found = runner.run(database.read(_start_at(page, after)))
                yield from found.rows
                after = found.next
                if after is None:
                    return
        finally:
            runner.run(database.close())


def _start_at(page: Callable[[Connection, int | None], Page[T]], after: int | None) -> Callable[[Connection], Page[T]]:
    return lambda connection: page(connection, after)


def _show(rows: Iterator[T], row: Callable[[T], dict[str, Any]], as_json: bool, nothing: str) -> None:
    try:
        _print(rows, row, as_json, nothing)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(rows: Iterator[T], row: Callable[[T], dict[str, Any]], as_json: bool, nothing: str) -> None:
    shown = False
    for record in rows:
        values = row(record)
        if as_json:
            typer.echo(json.dumps(values))
        else:
            if not shown:
                typer.echo("\t".join(values))
            typer.echo("\t".join(_format_cell(name, value) for name, value in values.items()))
        shown = True
    if not shown and not as_json:
        typer.echo(nothing)


def _format_cell(column: str, value: object) -> str:
    """Return what a table shows of a value: one line of printable text; the JSON has all of it."""
    text = "" if value is None else str(value)
    if column == "error":
        text = _find_last_words(text)
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def _find_last_words(error: str) -> str:
    """Return the last line of a traceback with words in it: that of an exception group ends with a frame."""
    line = next((each for each in reversed(error.splitlines()) if any(map(str.isalnum, each))), "")
    line = line.strip(" |")
    return line if len(line) <= _ERROR_LENGTH else f"{line[:_ERROR_LENGTH]}..."


def _build_trigger_row(record: TriggerRecord) -> dict[str, Any]:
    return {
        "name": record.spec.name,
        "state": record.state.value,
        "events": record.next_index,
        "restart": record.spec.restart,
        "since": _format_time(record.changed_us),
        "reason": record.reason,
        "error": record.error,
        "list": record.list,
        "session": record.session,
    }


def _build_event_row(record: EventRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "trigger": record.trigger_name,
        "sequence": record.sequence_index,
        "time": _format_time(record.created_us),
        "identity": record.identity,
        "payload": record.payload,
    }


def _format_time(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="milliseconds")
