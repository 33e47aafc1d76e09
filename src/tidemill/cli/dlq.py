"""`tidemill dlq list | show | stats | redrive`: looks at dead letters, and sends them again.

What is asked for goes to standard output (`--json`: for programs), progress and what went wrong to standard error.
"""

from __future__ import annotations

import heapq
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.dlq_options import (
    AsJson,
    ConfigPath,
    Ids,
    Keys,
    Kinds,
    Since,
    SinkNames,
    Text,
    Until,
    criteria_of,
    parsed_target,
)
from tidemill.cli.reporting import reporting
from tidemill.core.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.core.deadletters.redrive import Criteria
    from tidemill.deadletters.opening import Letters
    from tidemill.deadletters.reader import Found
    from tidemill.deadletters.redrive.history import Redriven

#: Columns of an output that is no terminal.
_NO_WIDTH = 100_000

app = typer.Typer(help="Look at dead letters, and send them again.", no_args_is_help=True)


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
    limit: Annotated[int, typer.Option("--limit", min=0, help="The newest so many; 0: all, the oldest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List letters, the newest first; times may be relative here (--from 2h)."""
    with reporting():
        from tidemill.cli.dlq_view import letter_json, letters_table

        criteria = criteria_of(ids, kinds, sinks, since, until, keys, text)
        settings = _settings(config)
        with _opened(settings) as box:
            found = _all(box, criteria) if limit == 0 else reversed(_newest(box, criteria, limit))
            sent = _history(settings, box)
            if as_json:
                for each in found:
                    typer.echo(letter_json(each, sent(each)))
            else:
                _table(found, lambda page, width: letters_table([(each, sent(each)) for each in page], width))


def _history(settings: Settings, box: Letters) -> Callable[[Found], list[Redriven]]:
    """Return what tells when and where to a letter was sent again."""
    from tidemill.core.errors import RemoteError
    from tidemill.deadletters.redrive.history import read_history

    try:
        return read_history(settings, box).of
    except RemoteError as error:
        # It takes a right of its own to see groups; the letters can be seen without.
        typer.echo(f"warning: {error}", err=True)
        return lambda found: []


def _table(found: Iterator[Found], table: Callable[[list[Found], int], object]) -> None:
    """Print tables of some letters each: all of a huge topic do not fit into one."""
    from rich.console import Console

    # Where nobody looks, lines are as long as they are: a program or a file wants them whole.
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(soft_wrap=False, width=None if narrow else _NO_WIDTH)
    page: list[Found] = []
    count = 0
    for each in found:
        page.append(each)
        count += 1
        if len(page) == 1_000:
            console.print(table(page, console.width))
            page = []
    if page:
        console.print(table(page, console.width))
    typer.echo(f"{count:,} letter{'s' if count != 1 else ''}", err=True)


@app.command()
def show(
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="The letter's id, or how it begins.")],
    config: ConfigPath = None,
    as_json: AsJson = False,
) -> None:
    """Show one letter with everything in it: messages and payloads as they are, secrets included."""
    with reporting():
        from tidemill.cli.dlq_view import letter_json, letter_text
        from tidemill.core.deadletters.redrive import Criteria

        if not letter_id:
            raise ConfigError("the id of a letter is not empty")
        settings = _settings(config)
        with _opened(settings) as box:
            found: dict[str, Found] = {}
            for each in _all(box, Criteria(ids=(letter_id,))):
                assert each.letter is not None
                found[each.letter.letter_id] = each
                if each.letter.letter_id == letter_id or len(found) > 1:
                    break
            if not found:
                raise ConfigError(f"there is no letter {letter_id!r} in {box.place}; `tidemill dlq list` has the ids")
            if len(found) > 1 and letter_id not in found:
                raise ConfigError(f"several letters begin with {letter_id!r}: {', '.join(found)}, perhaps more")
            one = found.get(letter_id) or next(iter(found.values()))
            sent = _history(settings, box)(one)
        allowed = settings.dlq.max_redrives
        typer.echo(letter_json(one, sent) if as_json else letter_text(one, str(config or ""), sent, allowed))


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
    """Count letters by kind, sink, error and day; times may be relative here (--from 7d)."""
    with reporting():
        from tidemill.cli.dlq_view import stats_json, stats_text
        from tidemill.core.deadletters.letter_stats import LetterStats
        from tidemill.deadletters.reader import facts_of

        criteria = criteria_of(ids, kinds, sinks, since, until, keys, text)
        counted = LetterStats()
        with _opened(_settings(config)) as box:
            for each in _all(box, criteria, garbage=True):
                if each.letter is None:
                    counted.no_letters += 1
                else:
                    counted.add(facts_of(each.letter), each.letter.error)
        typer.echo(stats_json(counted) if as_json else stats_text(counted))


@app.command()
def redrive(
    config: ConfigPath = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="source|sink|TOPIC",
            help="source: each message to its topic, to be processed again; sink: the payloads that a sink refused to "
            "that sink; or the messages to another topic.",
        ),
    ] = "source",
    ids: Ids = None,
    kinds: Kinds = None,
    sinks: SinkNames = None,
    since: Since = None,
    until: Until = None,
    keys: Keys = None,
    text: Text = "",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many letters in this run.")] = None,
    max_redrives: Annotated[
        int | None,
        typer.Option(
            "--max-redrives", min=0, help="Leave a message that was sent again so often; else dlq.max_redrives."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="At most so many messages or payloads in a second.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Send nothing; say what would be sent, and where.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin with the oldest letter, whatever this redrive sent before.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send letters again, each once: the same command goes on where it was stopped.

    Letters to the same place by the same filters are the same redrive. Ctrl-C ends it after what is in hand; a
    second one at once.
    """
    with reporting():
        from tidemill.cli.dlq_redrive import run_redrive
        from tidemill.deadletters.redrive.run import Order

        target, topic = parsed_target(to)
        criteria = criteria_of(ids, kinds, sinks, since, until, keys, text, relative=False)
        order = Order(criteria, target, topic, limit, max_redrives, rate, dry_run, restart)
        raise typer.Exit(run_redrive(_settings(config), order, as_json=as_json))


def _settings(config: Path | None) -> Settings:
    """Return the configuration, with logs of warnings and worse on standard error."""
    from tidemill.config.loading import load_settings
    from tidemill.runtime.log import configure

    settings = load_settings(config)
    if settings.logging.level in ("DEBUG", "INFO"):
        # Meant for the pipeline: here, somebody reads along.
        settings.logging.level = "WARNING"
    configure(settings.logging)
    return settings


def _opened(settings: Settings) -> Letters:
    from tidemill.deadletters.opening import open_letters

    return open_letters(settings)


def _all(box: Letters, criteria: Criteria, *, garbage: bool = False) -> Iterator[Found]:
    """Yield the letters asked for, the oldest first."""
    ranges = box.ranges()
    starts = {number: low for number, (low, _) in ranges.items()}
    if criteria.since is not None:
        starts = box.offsets_at(criteria.since, ranges)
    yield from _matching(box, criteria, starts, {number: end for number, (_, end) in ranges.items()}, garbage)


def _matching(
    box: Letters, criteria: Criteria, starts: dict[int, int], ends: dict[int, int], garbage: bool
) -> Iterator[Found]:
    from tidemill.deadletters.reader import Found, facts_of

    for each in box.stream(starts, ends):
        if not isinstance(each, Found):
            continue
        if each.letter is None:
            if garbage:
                yield each
        elif criteria.matches(facts_of(each.letter, text=bool(criteria.text))):
            yield each


def _newest(box: Letters, criteria: Criteria, limit: int) -> list[Found]:
    """Return the newest letters asked for, in order of time; what is no letter is among them if all are asked for."""

    def age(each: Found) -> float:
        return each.letter.written_at if each.letter is not None else 0.0

    def newest(found: Iterable[Found]) -> list[Found]:
        numbered = heapq.nlargest(limit, enumerate(found), key=lambda each: (age(each[1]), each[0]))
        return [each for _, each in reversed(numbered)]

    if not criteria.empty:
        return newest(_all(box, criteria))
    ranges = box.ranges()
    ends = {number: end for number, (_, end) in ranges.items()}
    reach = limit
    while True:
        starts = {number: max(low, end - reach) for number, (low, end) in ranges.items()}
        found = newest(_matching(box, criteria, starts, ends, garbage=True))
        if len(found) == limit or all(starts[number] == low for number, (low, _) in ranges.items()):
            return found
        # Transactions leave offsets without a letter: look further back.
        reach *= 4
