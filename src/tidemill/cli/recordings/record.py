"""`tidemill record list | merge | clean | export`: the recordings on this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.dlq.options import parse_time
from tidemill.cli.help import App
from tidemill.cli.options import ConfigPath
from tidemill.cli.recordings.location import find_folder
from tidemill.cli.reporting import reporting
from tidemill.cli.terminal.tables import Column, find_width, format_table
from tidemill.core.errors import ConfigError
from tidemill.core.wording import format_count, to_one_line

if TYPE_CHECKING:
    from tidemill.recorder.reading.queries import RecordingInfo

app = App(help="Show, copy, export and remove recordings.")


@app.command("list")
def list_recordings(
    config: ConfigPath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")] = False,
) -> None:
    """List recordings, newest first for each worker."""
    with reporting():
        import msgspec

        from tidemill.recorder.reading.reader import Reader

        folder = find_folder(config)
        found = Reader(folder).list_recordings()
        if as_json:
            for info in found:
                typer.echo(json.dumps(msgspec.to_builtins(info)))
            return
        for line in format_table(_columns(), [_row(info) for info in found], find_width()):
            typer.echo(line)
        typer.echo(f"{format_count(len(found), 'recording')} in {folder}", err=True)


def _columns() -> list[Column]:
    return [
        Column("RECORDING", cut=True),
        Column("FROM"),
        Column("TO", optional=True),
        Column("MESSAGES", right=True),
        Column("TASKS", right=True, optional=True),
        Column("EVENTS", right=True, optional=True),
        Column("SIZE", right=True),
        Column("STATE"),
        Column("PROBLEM", optional=True, detail=True),
    ]


def _row(info: RecordingInfo) -> list[str]:
    from tidemill.core.times import format_utc

    first, last = (format_utc(at)[:19] if at is not None else "" for at in (info.first_us, info.last_us))
    return [
        info.recording,
        first or format_utc(info.started_us)[:19],
        last,
        f"{info.messages:,}",
        f"{info.tasks:,}",
        f"{info.events:,}",
        format_size(info.size_bytes),
        ", ".join(word for word, is_so in (("bounded run", info.bounded), ("live", info.live)) if is_so),
        to_one_line("; ".join(info.problems)),
    ]


def format_size(size_bytes: int) -> str:
    """Return a size in decimal units.

    Example:
        >>> format_size(999), format_size(1_500_000)
        ('999 B', '1.5 MB')
    """
    size, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _refuse_file(option: str, target: Path) -> None:
    """Reject a target that exists but is not a folder.

    Raises:
        ConfigError: The target is not a folder.
    """
    if target.exists() and not target.is_dir():
        raise ConfigError(
            f"{option} {target}: this is a file; write the name of a folder, which is created if it does not exist"
        )


@app.command()
def merge(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder for the copies.")],
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER", help="Folders of recordings, also of several hosts; default: this host's."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The YAML file that names the folder of this host's recordings."),
    ] = None,
) -> None:
    """Copy the current recordings of several folders into one, including those being written."""
    with reporting():
        from tidemill.recorder.format.file_layout import list_periods
        from tidemill.recorder.reading.copying import copy_recordings

        sources = folders or [find_folder(config)]
        for source in sources:
            if not source.is_dir():
                raise ConfigError(f"{source}: not a folder of recordings")
            if list_periods(source):
                raise ConfigError(f"{source}: this is the folder of one worker; write its parent folder")
            if to.resolve() == source.resolve() or source.resolve() in to.resolve().parents:
                raise ConfigError(f"--to {to}: choose a folder outside of {source}")
        _refuse_file("--to", to)
        copies, problems = copy_recordings(sources, to)
        for problem in problems:
            typer.echo(f"warning: {to_one_line(problem)}", err=True)
        typer.echo(f"{format_count(len(copies), 'recording')} copied to {to}", err=True)


@app.command()
def clean(
    config: ConfigPath = None,
    before: Annotated[
        str | None,
        typer.Option(
            "--before",
            metavar="TIME",
            help="Remove recordings that ended before this time (2h, 2026-05-01); default: those that exceed the "
            "retention of their pipelines.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing; only list the recordings that would be removed.")
    ] = False,
) -> None:
    """Remove old recordings, but never one that is being written."""
    with reporting():
        from tidemill.recorder.writing.cleaning import find_expired, remove_recordings

        folder = find_folder(config)
        expired = find_expired(folder, time.time(), parse_time("--before", before))
        if not dry_run:
            expired = remove_recordings(expired)
        for period in expired:
            typer.echo(str(period.database))
        done = "would be removed" if dry_run else "removed"
        typer.echo(f"{format_count(len(expired), 'recording')} {done}", err=True)


@app.command()
def export(
    parquet: Annotated[Path, typer.Option("--parquet", metavar="DIR", help="The folder for the files.")],
    config: ConfigPath = None,
    since: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="Messages at or after this time, such as 2h or 2026-05-01T12:00."),
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Messages before this time.")] = None,
) -> None:
    """Write the recorded messages as Parquet files with the columns of the history."""
    with reporting():
        from tidemill.pipeline.reports.history import SCHEMA
        from tidemill.recorder.reading.export import export_messages

        folder = find_folder(config)
        _refuse_file("--parquet", parquet)
        first, last = parse_time("--from", since), parse_time("--until", until)
        problems: list[str] = []
        count = export_messages(
            folder,
            parquet,
            SCHEMA,
            0 if first is None else int(first * 1_000_000),
            2**62 if last is None else int(last * 1_000_000),
            problems,
        )
        for problem in problems:
            typer.echo(f"warning: {to_one_line(problem)}", err=True)
        typer.echo(f"{format_count(count, 'message')} written to {parquet}", err=True)
