"""Common options of the `tidemill dlq` commands, and the formats of times and targets."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.completion import complete_kinds, complete_sinks
from tidemill.core.errors import ConfigError
from tidemill.core.times import parse_ago, parse_moment

if TYPE_CHECKING:
    from tidemill.core.deadletters.redrive import LetterCriteria, Target

Ids = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="ID", help="Letters whose ids start with this text; repeatable."),
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help="The kind of failure (task, delivery ...); repeatable.",
        autocompletion=complete_kinds,
    ),
]
SinkNames = Annotated[
    list[str] | None,
    typer.Option(
        "--sink",
        metavar="NAME",
        help="The sink that rejected the payload, as name or type.name; repeatable.",
        autocompletion=complete_sinks,
    ),
]
Since = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="TIME", help="Letters written at or after this time, such as 2026-05-01 or 2026-05-01T12:00."
    ),
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Letters written before this time.")]
Keys = Annotated[
    list[str] | None, typer.Option("--key", metavar="KEY", help="The key of a source message; repeatable.")
]
Text = Annotated[
    str, typer.Option("--text", metavar="TEXT", help="A text in error, stderr, arguments, payloads or messages.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def parse_time(option: str, text: str | None, *, relative: bool = True) -> float | None:
    """Return a time in seconds since the epoch; a time without a zone is UTC.

    Args:
        option: The option's name, for error messages.
        text: `2026-05-01`, `2026-05-01T12:00+02:00`, or if relative times are allowed, `2h` (before now).
        relative: Whether relative times are allowed.

    Raises:
        ConfigError: The text is not a time.
    """
    if text is None:
        return None
    try:
        ago = parse_ago(text)
        at = None if ago is None else datetime.now(UTC) - timedelta(microseconds=ago)
    except (OverflowError, ValueError):  # ValueError: too many digits
        raise ConfigError(f"{option} {text}: too far in the past; write a smaller number") from None
    if at is not None:
        if not relative:
            raise ConfigError(
                f"{option} {text}: a redrive needs an absolute time (2026-05-01T12:00), so that the same command "
                "selects the same letters when it is run again"
            )
        return at.timestamp()
    try:
        return parse_moment(text) / 1_000_000
    except ValueError:
        example = "2026-05-01T12:00 (UTC)" + (", or 2h for two hours ago" if relative else "")
        raise ConfigError(f"{option} {text}: not a valid time; write {example}") from None


def make_criteria(
    ids: Sequence[str] | None,
    kinds: Sequence[str] | None,
    sinks: Sequence[str] | None,
    since: str | None,
    until: str | None,
    keys: Sequence[str] | None,
    text: str,
    *,
    relative: bool = True,
) -> LetterCriteria:
    """Return the criteria for the values of the common options.

    Raises:
        ConfigError: A kind is unknown, a time is invalid, or the times are in the wrong order.
    """
    from tidemill.core.deadletters.redrive import LetterCriteria
    from tidemill.deadletters.letter import LetterKind

    known = [kind.value for kind in LetterKind]
    for kind in kinds or ():
        if kind not in known:
            raise ConfigError(f"--kind {kind}: unknown kind; choose one of {', '.join(known)}")
    if "" in (ids or ()):
        raise ConfigError("--id: the id is empty; write the id of a letter, or omit the option for all letters")
    begin, end = (parse_time(name, at, relative=relative) for name, at in (("--from", since), ("--until", until)))
    if begin is not None and end is not None and begin >= end:
        raise ConfigError(f"--until {until} is not after --from {since}, so no letter matches; swap or change them")
    return LetterCriteria(
        tuple(ids or ()),
        tuple(kinds or ()),
        tuple(sinks or ()),
        begin,
        end,
        tuple(keys or ()),
        text,
    )


def parse_target(text: str) -> tuple[Target, str]:
    """Return the target that `--to` names: `source`, `sink`, or a topic; `topic:NAME` allows a topic of any name.

    Raises:
        ConfigError: The text is not a target.
    """
    from tidemill.config.kafka_names import check_topic
    from tidemill.core.deadletters.redrive import Target

    if text in (Target.SOURCE.value, Target.SINK.value):
        return Target(text), ""
    name = text.removeprefix("topic:")
    try:
        check_topic(name)
    except ValueError as error:
        raise ConfigError(f"--to {text}: this name {error}; write source, sink or the name of a topic") from None
    return Target.TOPIC, name
