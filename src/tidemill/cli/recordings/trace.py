"""`tidemill trace`: the history of a message, from the recordings on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.recordings.location import expand_folder, load_quietly
from tidemill.cli.reporting import reporting
from tidemill.core.errors import ConfigError, escape_surrogates
from tidemill.core.wording import format_count, to_one_line
from tidemill.runtime.process.exitcode import ExitCode

if TYPE_CHECKING:
    from tidemill.recorder.reading.queries import MessageQuery
    from tidemill.recorder.reading.trace_document import Traces
    from tidemill.runtime.link.open_message import OpenMessage

#: A process that does not answer within this time hangs, or is suspended.
_ANSWER_SECONDS = 5.0


def trace(
    position: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC:PARTITION:OFFSET", help="The message; not with --key, --task or --label.", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="The YAML file with the folder of recordings; default: as for `tidemill run`."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="The newest messages with this key, as displayed (\\xNN: a byte)."),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="The messages of this task.")] = None,
    label: Annotated[
        str | None,
        typer.Option("--label", metavar="NAME=VALUE", help="The messages of the newest tasks with this label."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the history of a message: its stages, tasks, attempts, errors, dead letters and its commit.

    A message that was reprocessed has a history for each time. A message that a running pipeline has not finished is
    shown with its current stage. Exit code 6: the message is not recorded, and no pipeline on this machine has it.
    """
    with reporting():
        from tidemill.cli.recordings.trace_view import describe_nothing, describe_open, describe_trace, encode_traces

        query, config = _read_arguments(position, config, key, task, label)
        traces, where, opened = _find(query, config)
        for problem in traces.problems:
            typer.echo(f"warning: {to_one_line(problem)}", err=True)
        if as_json:
            span = (traces.first_us, traces.last_us)
            typer.echo(encode_traces(traces.found, opened, more=traces.more, span=span))
        if not traces.found and not opened:
            if not as_json:
                names = (("key", key), ("task", task), ("label", label))
                what = next((f"{name} {value}" for name, value in names if value is not None), str(position))
                typer.echo(describe_nothing(what, where, (traces.first_us, traces.last_us)), err=True)
            raise typer.Exit(ExitCode.NOTHING_FOUND)
        if not as_json:
            typer.echo("\n\n".join([*map(describe_trace, traces.found), *map(describe_open, opened)]))
            if traces.more:
                typer.echo(f"these are the newest {len(traces.found)} messages; there are more", err=True)


def _find(query: MessageQuery, config: Path | None) -> tuple[Traces, str, list[tuple[str, OpenMessage]]]:
    """Return the recorded histories, the description of where they were searched, and open messages by worker."""
    import msgspec

    from tidemill.config.loading import CONFIG_VARIABLE
    from tidemill.recorder.reading.reader import Reader
    from tidemill.recorder.reading.trace_document import Traces, find_traces
    from tidemill.runtime.link.open_message import OpenMessage
    from tidemill.runtime.sockets.pipeline_socket import ask_pipelines

    settings = load_quietly(config)
    traces, where = Traces(), "the memory of running pipelines"
    if settings.debug.db_dir:
        folder = expand_folder(settings.debug)
        traces, where = find_traces(Reader(folder), query), str(folder)
    chosen = config is not None or os.environ.get(CONFIG_VARIABLE)
    request = {"do": "trace", "query": msgspec.to_builtins(query)}
    answers = ask_pipelines(settings.kafka if chosen else None, request, _ANSWER_SECONDS)
    opened = []
    for report in answers.reports:
        if report.get("open") is not None:
            opened.append((str(report.get("worker")), msgspec.convert(report["open"], OpenMessage)))
        if report.get("problem"):
            traces.problems.append(f"the current stage of the message cannot be read: {report['problem']}")
        # Files were read above; a process without a recording in memory returns no traces.
        if report.get("traces") is not None:
            traces.add(msgspec.convert(report["traces"], Traces))
    if answers.silent:
        traces.problems.append(
            f"{format_count(answers.silent, 'process')} did not answer within {_ANSWER_SECONDS:g} s; recordings in "
            "their memory are not shown"
        )
    return traces, where, _drop_committed(opened, traces)


def _drop_committed(opened: list[tuple[str, OpenMessage]], traces: Traces) -> list[tuple[str, OpenMessage]]:
    """For a message that is known to be committed, drop the note that no engine owns its partition."""
    is_committed = any(story.committed_us is not None for trace in traces.found for story in trace.stories)
    return [(worker, each) for worker, each in opened if each.engine is not None or not is_committed]


def _read_arguments(
    position: str | None, config: Path | None, key: str | None, task: str | None, label: str | None
) -> tuple[MessageQuery, Path | None]:
    """Return the query and the configuration; with an option, the only positional argument is the configuration.

    Raises:
        ConfigError: The arguments do not select messages.
    """
    from tidemill.core.recorder.key_text import read_key
    from tidemill.core.recorder.position import parse_position
    from tidemill.recorder.reading.queries import MessageQuery

    options = sum(option is not None for option in (key, task, label))
    if options > 1:
        raise ConfigError("--key, --task and --label exclude each other; write only one")
    message = None if position is None else parse_position(position)
    if options and position is not None:
        if message is not None or config is not None:
            raise ConfigError(f"{position}: write either a message or one of --key, --task and --label")
        config = Path(position)
    if label is not None and "=" not in label:
        raise ConfigError(f"--label {label}: write NAME=VALUE")
    if options:
        for name, text in (("--task", task), ("--label", label)):
            if text == "":
                raise ConfigError(f"{name} is empty; write a value")
        raw = None if key is None else read_key(key)
        task, label = (None if text is None else escape_surrogates(text) for text in (task, label))
        return MessageQuery(key=raw, task_id=task, label=label), config
    if position is None:
        raise ConfigError("write a message as TOPIC:PARTITION:OFFSET, or one of --key, --task and --label")
    if message is None:
        raise ConfigError(f"{position}: not a message; write TOPIC:PARTITION:OFFSET, for example orders:3:4711")
    return MessageQuery(topic=message.topic, partition=message.partition, offset=message.offset), config
