"""`tidemill broker`: runs the embedded Kafka in the foreground, for trying things out."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tidemill.cli.reporting import reporting
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.wording import format_count
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.stop_signals import find_stop_signals

if TYPE_CHECKING:
    from tidemill.runtime.embedded.broker import EmbeddedBroker

_CALL_SECONDS = 10.0
#: Each partition costs the broker open files and memory, and this broker is only for experiments.
_MAX_PARTITIONS = 1_000


class _StopRequestedError(Exception):
    """A stop signal has arrived."""


def broker(
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="NAME:PARTITIONS", help="Create this topic if it does not exist; repeatable."),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="The port to listen on; 0: any free one.")
    ] = 9092,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Store data in this folder and keep it; default: delete all data at the end.",
        ),
    ] = None,
) -> None:
    """Run a real Kafka on this machine until Ctrl-C; for trying things out, not for production.

    Topics keep their records forever, whatever their timestamps.
    """
    with reporting():
        topics = [parse_topic(text) for text in topic or []]
        from tidemill.runtime.embedded.broker import EmbeddedBroker

        for number in find_stop_signals():
            signal.signal(number, _stop)
        try:
            with EmbeddedBroker(data_dir, port, progress=_say) as running:
                for name, partitions in topics:
                    _say(_ensure_topic(running, name, partitions))
                _say(f"Kafka is ready at {running.bootstrap}; Ctrl-C stops it")
                while running.running:
                    time.sleep(0.5)
                raise RemoteError(f"the broker exited unexpectedly:\n{running.read_log_tail()}")
        except _StopRequestedError:
            raise typer.Exit(ExitCode.OK) from None


def parse_topic(text: str) -> tuple[str, int]:
    """Return the name and number of partitions from a text like `orders:4`; `orders` alone means one.

    Raises:
        ConfigError: The text is malformed.
    """
    from tidemill.config.kafka_names import check_topic

    name, _, count = text.partition(":")
    try:
        check_topic(name)
    except ValueError as error:
        raise ConfigError(f"--topic {text}: this name {error}; write NAME:PARTITIONS, for example orders:4") from None
    if not (count or "1").isdecimal():
        raise ConfigError(f"--topic {text}: {count!r} is not a number; write NAME:PARTITIONS, for example orders:4")
    # Shorter than Python's limit for digits of integers.
    if not 1 <= int((count or "1")[:10]) <= _MAX_PARTITIONS:
        raise ConfigError(
            f"--topic {text}: the number of partitions must be between 1 and {_MAX_PARTITIONS:,}, as in orders:4"
        )
    return name, int(count or 1)


def _ensure_topic(running: EmbeddedBroker, name: str, partitions: int) -> str:
    from confluent_kafka.admin import AdminClient

    client = AdminClient({"bootstrap.servers": running.bootstrap, "log_level": 0})
    known = client.list_topics(timeout=_CALL_SECONDS).topics
    if name in known:
        return f"topic {name} exists, with {format_count(len(known[name].partitions), 'partition')}"
    running.create_topic(name, partitions)
    return f"topic {name} created, with {format_count(partitions, 'partition')}"


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the broker's shutdown.
    for other in find_stop_signals():
        signal.signal(other, signal.SIG_IGN)
    raise _StopRequestedError


def _say(text: str) -> None:
    typer.echo(text, err=True)
