"""`tidemill dlq list | show | stats | redrive`: shows dead letters, and sends them again.

Results go to standard output (`--json`: for programs), progress and errors to standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.completion import complete_targets
from tidemill.cli.dlq.options import (
    AsJson,
    Ids,
    Keys,
    Kinds,
    Since,
    SinkNames,
    Text,
    Until,
    make_criteria,
    parse_target,
)
from tidemill.cli.help import App
from tidemill.cli.options import ConfigPath
from tidemill.cli.reporting import reporting
from tidemill.core.errors import ConfigError
from tidemill.core.wording import format_count

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.core.deadletters.redrive import LetterCriteria
    from tidemill.deadletters.opening import Letters
    from tidemill.deadletters.reader import FoundLetter
    from tidemill.deadletters.redrive.history import Redriven

#: The width of output that is not a terminal.
_NO_WIDTH = 100_000

app = App(help="Show dead letters, and send them again.")


@app.command("list")
def list_letters(
    config: ConfigPath = None,
    ids: Ids = None,
    kinds: Kinds = None,
    sinks: SinkNames = None,
    since: Since = None,
    until: Until = None,
    keys: Keys = None,
    text: Text = "",
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="Show the newest N letters; 0: all, oldest first.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """List letters, newest first. Times may be relative (--from 2h)."""
    with reporting():
        from tidemill.cli.dlq.view import build_table, encode_letter_line

        criteria = make_criteria(ids, kinds, sinks, since, until, keys, text)
        settings = _load_settings(config)
        with _open_letters(settings) as box:
            found = _read_all(box, criteria) if limit == 0 else reversed(_find_newest(box, criteria, limit))
            sent = _find_history(settings, box)
            if as_json:
                for each in found:
                    typer.echo(encode_letter_line(each, sent(each)))
            else:
                _print_table(found, lambda page, width: build_table([(each, sent(each)) for each in page], width))


def _find_history(settings: Settings, box: Letters) -> Callable[[FoundLetter], list[Redriven]]:
    """Return a function that lists the redrives of a letter."""
    from tidemill.core.errors import RemoteError
    from tidemill.deadletters.redrive.history import read_history

    try:
        return read_history(settings, box).list_redriven
    except RemoteError as error:
        # Listing consumer groups requires a separate permission; letters can be read without it.
        typer.echo(f"warning: {error}", err=True)
        return lambda found: []


def _print_table(found: Iterator[FoundLetter], table: Callable[[list[FoundLetter], int], object]) -> None:
    """Print the letters as several tables, since all letters of a huge topic would not fit into one."""
    from rich.console import Console

    # Only a terminal limits the length of lines; programs and files get whole lines.
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(soft_wrap=False, width=None if narrow else _NO_WIDTH)
    page: list[FoundLetter] = []
    count = 0
    for each in found:
        page.append(each)
        count += 1
        if len(page) == 1_000:
            console.print(table(page, console.width))
            page = []
    if page:
        console.print(table(page, console.width))
    typer.echo(format_count(count, "letter"), err=True)


@app.command()
def show(
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="The letter's id, or a prefix of it.")],
    config: ConfigPath = None,
    as_json: AsJson = False,
) -> None:
    """Show one letter with all its contents; messages and payloads are shown unmasked, including secrets."""
    with reporting():
        from tidemill.cli.dlq.view import describe_letter, encode_letter_line
        from tidemill.core.deadletters.redrive import LetterCriteria

        if not letter_id:
            raise ConfigError("the id is empty; pass an id from `tidemill dlq list`")
        settings = _load_settings(config)
        with _open_letters(settings) as box:
            found: dict[str, FoundLetter] = {}
            for each in _read_all(box, LetterCriteria(ids=(letter_id,))):
                assert each.letter is not None
                found[each.letter.letter_id] = each
                if each.letter.letter_id == letter_id or len(found) > 1:
                    break
            if not found:
                raise ConfigError(f"no letter {letter_id!r} in {box.location}; `tidemill dlq list` lists the ids")
            if len(found) > 1 and letter_id not in found:
                raise ConfigError(
                    f"several ids begin with {letter_id!r}, such as {', '.join(found)}; write more of the id"
                )
            one = found.get(letter_id) or next(iter(found.values()))
            sent = _find_history(settings, box)(one)
        allowed = settings.dlq.max_redrives
        typer.echo(encode_letter_line(one, sent) if as_json else describe_letter(one, str(config or ""), sent, allowed))


@app.command()
def stats(
    config: ConfigPath = None,
    ids: Ids = None,
    kinds: Kinds = None,
    sinks: SinkNames = None,
    since: Since = None,
    until: Until = None,
    keys: Keys = None,
    text: Text = "",
    as_json: AsJson = False,
) -> None:
    """Count letters by kind, sink, error and day. Times may be relative (--from 7d)."""
    with reporting():
        from tidemill.cli.dlq.view import describe_stats, encode_stats
        from tidemill.core.deadletters.letter_stats import LetterStats
        from tidemill.deadletters.reader import extract_facts

        criteria = make_criteria(ids, kinds, sinks, since, until, keys, text)
        counted = LetterStats()
        with _open_letters(_load_settings(config)) as box:
            for each in _read_all(box, criteria, garbage=True):
                if each.letter is None:
                    counted.no_letters += 1
                else:
                    counted.add(extract_facts(each.letter), each.letter.error)
        typer.echo(encode_stats(counted) if as_json else describe_stats(counted))


@app.command()
def redrive(
    config: ConfigPath = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="WHERE",
            autocompletion=complete_targets,
            help="source: each message to its own topic, to be reprocessed; sink: each rejected payload to its sink; a "
            "topic: the messages to that topic.",
        ),
    ] = "source",
    ids: Ids = None,
    kinds: Kinds = None,
    sinks: SinkNames = None,
    since: Since = None,
    until: Until = None,
    keys: Keys = None,
    text: Text = "",
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Send at most N letters in this run.")
    ] = None,
    max_redrives: Annotated[
        int | None,
        typer.Option(
            "--max-redrives",
            metavar="N",
            min=0,
            help="Skip messages that have been redriven N times; default: dlq.max_redrives.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="N", min=0.001, help="Send at most N messages or payloads per second."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Send nothing; show which letters would be sent, and to which target.")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Start from the oldest letter, including letters that this redrive has sent before."
        ),
    ] = False,
    drop_headers: Annotated[
        bool, typer.Option("--drop-headers", help="If a message's headers cannot be read, send it without them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send letters again, each once. To continue a redrive, repeat the command.

    The same filters and target identify the same redrive. Ctrl-C stops after the current batch; a second one stops
    immediately.
    """
    with reporting():
        from tidemill.cli.dlq.redrive import run_redrive
        from tidemill.deadletters.redrive.run import RedriveOrder

        target, topic = parse_target(to)
        criteria = make_criteria(ids, kinds, sinks, since, until, keys, text, relative=False)
        order = RedriveOrder(criteria, target, topic, limit, max_redrives, rate, dry_run, restart, drop_headers)
        raise typer.Exit(run_redrive(_load_settings(config), order, as_json=as_json))


def _load_settings(config: Path | None) -> Settings:
    """Return the configuration; log warnings and errors to standard error."""
    from tidemill.config.loading import load_settings, require_letters_named
    from tidemill.runtime.log.setup import configure

    settings = load_settings(config)
    require_letters_named(settings, config)
    if settings.logging.level in ("DEBUG", "INFO"):
        # These levels are meant for the pipeline; here they would disturb the output.
        settings.logging.level = "WARNING"
    configure(settings.logging)
    return settings


def _open_letters(settings: Settings) -> Letters:
    from tidemill.deadletters.opening import open_letters

    return open_letters(settings)


def _find_ranges(box: Letters) -> dict[int, tuple[int, int]]:
    """Return the first offset and the end of each partition or file; print a notice if brokers are slow to answer."""
    from tidemill.cli.topic_access import waiting_for_brokers
    from tidemill.runtime.kafka.client import CALL_SECONDS

    brokers = getattr(box, "brokers", "")
    with waiting_for_brokers(brokers, CALL_SECONDS) if brokers else contextlib.nullcontext():
        return box.find_ranges()


def _read_all(box: Letters, criteria: LetterCriteria, *, garbage: bool = False) -> Iterator[FoundLetter]:
    from tidemill.deadletters.search import read_all

    return read_all(box, _find_ranges(box), criteria, garbage=garbage)


def _find_newest(box: Letters, criteria: LetterCriteria, limit: int) -> list[FoundLetter]:
    from tidemill.deadletters.search import find_newest

    return find_newest(box, _find_ranges(box), criteria, limit)
