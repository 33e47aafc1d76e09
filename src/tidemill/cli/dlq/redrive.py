"""Runs a redrive for the command line: handles signals, and shows progress and the result."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import typer

from tidemill.cli.dlq.view import plain, render_json
from tidemill.config.redaction import redact_text
from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import Target, UnsentReason
from tidemill.core.wording import format_count
from tidemill.deadletters.redrive.run import Redrive, RedriveOrder
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.stop_signals import find_stop_signals

if TYPE_CHECKING:
    from rich.status import Status

    from tidemill.deadletters.redrive.targets import RedriveItem

#: The interval of progress lines without a terminal, and of status updates with one.
_LINE_SECONDS = 10.0
_STATUS_SECONDS = 0.2
_FAILED_SHOWN = 20


class _Stop:
    """Records the first stop signal; a second one interrupts immediately."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self) -> bool:
        return self.wanted

    def take(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


def run_redrive(settings: Settings, order: RedriveOrder, *, as_json: bool) -> ExitCode:
    """Run a redrive, and show its progress and its result.

    Raises:
        TidemillError: The redrive ended early, after its result so far was printed.
    """
    stop = _Stop()
    for number in find_stop_signals():
        signal.signal(number, stop.take)
    ended = "error"
    with _progress() as watch:

        def say_item(item: RedriveItem) -> None:
            watch.clear()
            _say_item(item, as_json=as_json)

        redrive = Redrive(settings, order, stop, watch, say_item)
        try:
            redrive.run()
            ended = "stopped" if stop.wanted and redrive.left else "limit" if redrive.left else "end"
        finally:
            watch.clear()
            # Print the result after errors too, because letters may have been sent.
            _say_result(redrive, order, ended, as_json=as_json)
    undone = redrive.tally.unsent or redrive.tally.lost_messages
    return ExitCode.REMOTE if undone and not order.dry_run else ExitCode.OK


def _say_item(item: RedriveItem, *, as_json: bool) -> None:
    letter = item.letter
    if as_json:
        line = {"letter_id": letter.letter_id, "kind": letter.kind, "to": item.where, "count": item.count}
        typer.echo(render_json(line))
    else:
        what = "payload" if item.where.startswith("sinks.") else "message"
        counted = f"{item.count} {what}{'s' if item.count != 1 else ''}"
        typer.echo(plain(f"{letter.letter_id}  {letter.kind.value:<9}  {counted} to {item.where}"))


def _say_result(redrive: Redrive, order: RedriveOrder, ended: str, *, as_json: bool) -> None:
    tally = redrive.tally
    if as_json:
        typer.echo(render_json(_result(redrive, order, ended)))
        return
    would = "would be sent" if order.dry_run else "sent"
    what = "payload" if order.target is Target.SINK else "message"
    resumed = " (continued from where the last run ended)" if redrive.resumed else ""
    typer.echo(f"{format_count(tally.sent, 'letter')} {would}, {format_count(tally.messages, what)}{resumed}", err=True)
    for why, count in tally.why.items():
        if why is not UnsentReason.NOT_SELECTED:
            typer.echo(f"{count:,} not sent: {why.value}", err=True)
    for letter_id, _, text in tally.failed[:_FAILED_SHOWN]:
        typer.echo(plain(redact_text(f"  {letter_id}: {text}")), err=True)
    if tally.unsent > _FAILED_SHOWN:
        typer.echo(f"  and {tally.unsent - _FAILED_SHOWN:,} more; --json names up to {tally.keep:,}", err=True)
    if tally.unsent and not order.dry_run:
        typer.echo("after fixing the cause, send these letters by their ids with --id ID --restart", err=True)
    if tally.lost_messages:
        typer.echo(
            f"{format_count(tally.lost_messages, 'message')} cannot be redriven; they did not fit into their letters",
            err=True,
        )
        for letter_id, lost in tally.in_part[:_FAILED_SHOWN]:
            typer.echo(plain(f"  {letter_id}: sent, except {lost:,} of its messages"), err=True)
    if redrive.left and not order.dry_run:
        typer.echo(f"{format_count(redrive.left, 'record')} left; repeat the command to continue", err=True)


def _result(redrive: Redrive, order: RedriveOrder, ended: str) -> dict[str, object]:
    tally = redrive.tally
    return {
        "redrive": redrive.name,
        "to": order.topic or order.target.value,
        "dry_run": order.dry_run,
        "ended": ended,
        "resumed": redrive.resumed,
        "letters_sent": tally.sent,
        "sent": tally.messages,
        "not_sent": {why.value: count for why, count in tally.why.items()},
        "failed": [
            {"letter_id": letter_id, "reason": why.value, "text": redact_text(text)}
            for letter_id, why, text in tally.failed
        ],
        "messages_lost": tally.lost_messages,
        "sent_in_part": [{"letter_id": letter_id, "messages_lost": lost} for letter_id, lost in tally.in_part],
        "records_left": redrive.left,
    }


@contextlib.contextmanager
def _progress() -> Iterator[_Watch]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.status import Status

    status = Status("connecting", console=Console(stderr=True))
    try:
        yield ShownProgress(status)
    finally:
        status.stop()


class _Watch:
    """Called often by a redrive; prints progress periodically."""

    seconds = _LINE_SECONDS

    def __init__(self) -> None:
        self._next = time.monotonic() + self.seconds

    def __call__(self, redrive: Redrive) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.seconds
            self.say(describe_progress(redrive))

    def say(self, text: str) -> None:
        """Show a text."""

    def clear(self) -> None:
        """Remove the status line before a line of output."""


class _Lines(_Watch):
    def say(self, text: str) -> None:
        typer.echo(text, err=True)


class ShownProgress(_Watch):
    """A status line on a terminal; it is removed while a line is printed, which would otherwise continue it."""

    seconds = _STATUS_SECONDS

    def __init__(self, status: Status) -> None:
        super().__init__()
        self._status = status
        status.start()

    def say(self, text: str) -> None:
        self._status.update(text)
        self._status.start()

    def clear(self) -> None:
        self._status.stop()


def describe_progress(redrive: Redrive) -> str:
    """Return a line that describes the progress of a redrive."""
    seen = redrive.total - redrive.left
    share = f"{seen / redrive.total:.0%}" if redrive.total else "100%"
    parts = [f"{seen:,} of {redrive.total:,} records ({share})", f"{format_count(redrive.tally.sent, 'letter')} sent"]
    if redrive.tally.unsent:
        parts.append(f"{redrive.tally.unsent:,} not sent")
    return " | ".join(parts)
