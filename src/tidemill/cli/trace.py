"""`tidemill trace`: what happened to a message, from the recordings on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.recordings import open_reader
from tidemill.cli.reporting import reporting
from tidemill.core.errors import ConfigError
from tidemill.runtime.exitcode import ExitCode

if TYPE_CHECKING:
    from tidemill.core.recorder.place import MessagePlace
    from tidemill.recorder.queries import MessageQuery, Trace
    from tidemill.recorder.reader import Reader

#: With a key or a label, the stories of this many messages are told, the newest ones.
_MOST = 10


def trace(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC:PARTITION:OFFSET", help="The message; not with --key, --task or --label.", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="The YAML file that says where recordings are; default: as for `tidemill run`."
        ),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="The newest messages with this key.")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="The messages of this task.")] = None,
    label: Annotated[
        str | None,
        typer.Option("--label", metavar="NAME=VALUE", help="The messages of the newest tasks with this label."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show what happened to a message: its stages, tasks, tries, errors, dead letters and its commit.

    A message that was reprocessed has a story for each time. Exit code 6: nothing is recorded about it.
    """
    with reporting():
        from tidemill.cli.trace_view import describe_nothing, describe_trace, encode_traces

        message, config = _read_arguments(place, config, [key, task, label])
        reader, where = open_reader(config)
        traces, more = _tell(reader, message, key, task, label)
        for problem in dict.fromkeys(problem for each in traces for problem in each.problems):
            typer.echo(f"warning: {problem}", err=True)
        if as_json:
            typer.echo(encode_traces(traces, more=more))
        if not any(each.stories or each.events or each.tasks for each in traces):
            if not as_json:
                names = (("key", key), ("task", task), ("label", label))
                what = next((f"{name} {value}" for name, value in names if value is not None), str(place))
                typer.echo(describe_nothing(what, where, reader.find_span()), err=True)
            raise typer.Exit(ExitCode.NOTHING_FOUND)
        if not as_json:
            typer.echo("\n\n".join(describe_trace(each) for each in traces))
            if more:
                typer.echo(f"there are more messages than these {len(traces)}, the newest ones", err=True)


def _read_arguments(
    place: str | None, config: Path | None, others: list[str | None]
) -> tuple[MessagePlace | None, Path | None]:
    """Return the message that was asked for, and the configuration, which is alone where an option says the message.

    Raises:
        ConfigError: It does not say which messages.
    """
    from tidemill.core.recorder.place import parse_place

    options = sum(other is not None for other in others)
    if options > 1:
        raise ConfigError("--key, --task and --label: give one of them")
    if options and config is None and place is not None and parse_place(place) is None:
        return None, Path(place)
    if options and place is not None:
        raise ConfigError(f"{place}: give either a message or one of --key, --task and --label")
    if options:
        return None, config
    if place is None:
        raise ConfigError("give a message as TOPIC:PARTITION:OFFSET, or one of --key, --task and --label")
    message = parse_place(place)
    if message is None:
        raise ConfigError(f"{place}: not a message; write TOPIC:PARTITION:OFFSET, for example orders:3:4711")
    return message, config


def _tell(
    reader: Reader, message: MessagePlace | None, key: str | None, task: str | None, label: str | None
) -> tuple[list[Trace], bool]:
    """Return the stories of each message, the newest first, and whether there are more messages."""
    if message is not None:
        return [reader.trace(message.topic, message.partition, message.offset)], False
    page = reader.find_messages(_make_query(key, task, label), limit=_MOST)
    places = dict.fromkeys((row.topic, row.partition, row.offset) for row in page.rows)
    traces = [reader.trace(*each) for each in list(places)[:_MOST]]
    return traces, page.cursor is not None or len(places) > _MOST


def _make_query(key: str | None, task: str | None, label: str | None) -> MessageQuery:
    from tidemill.recorder.queries import MessageQuery

    if label is not None and "=" not in label:
        raise ConfigError(f"--label {label}: write NAME=VALUE")
    # What is not UTF-8 comes as surrogates from the command line.
    return MessageQuery(key=None if key is None else key.encode("utf-8", "surrogateescape"), task_id=task, label=label)
