"""Structured logs: one entry per event on standard error, as JSON or for people, with secrets masked.

structlog's own loggers and the standard library's (pyspark, py4j, libraries) write through the same chain. `configure`
sets the fields of every entry of a process (worker, group, version) once. They are not context variables, because the
threads of a process would not see those. Logging is for rare events; nothing logs per message.

Engines on this host log as JSON into a pipe of the driver, which shows their entries like its own (`relay`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.redaction import redact_text
from tidemill.config.settings import LoggingSettings
from tidemill.core.errors import ConfigError, TidemillError
from tidemill.runtime.log.console import ConsoleFormat
from tidemill.runtime.log.startup import is_waiting
from tidemill.runtime.log.values import mask_value
from tidemill.runtime.log.writer import LogWriter, replace_writer

#: Libraries whose INFO and DEBUG lines are useful only to their authors; some log every message with all its data.
_QUIET = ("alembic", "asyncio", "httpcore", "httpx", "py4j", "pymongo", "pyspark", "urllib3", "watchfiles")
#: Set for processes whose standard error is read by a driver that understands JSON entries.
RELAY_VARIABLE = "_TIDEMILL_LOG_RELAY"
Format = Literal["json", "console"]


def version() -> str:
    """Return tidemill's version."""
    try:
        return importlib.metadata.version("tidemill")
    except importlib.metadata.PackageNotFoundError:
        # A .zip that was sent to a cluster has no metadata.
        return "unknown"


def choose_format(settings: LoggingSettings, stream: TextIO | None = None) -> Format:
    """Return this process's log format; `auto` means the format for people on a terminal, and JSON elsewhere."""
    if settings.format != "auto":
        return settings.format
    return "console" if _is_terminal(stream) else "json"


def configure(
    settings: LoggingSettings,
    *,
    stream: TextIO | None = None,
    relayed: bool = False,
    secrets: KnownSecrets | None = None,
    **context: object,
) -> None:
    """Send all logs of this process to one stream in one format; another call replaces the earlier configuration.

    Args:
        settings: Level and format.
        stream: Where lines are written; None is standard error, looked up at each write.
        relayed: Log as JSON, whatever is configured, if a driver on this host reads the lines.
        secrets: The secrets that this process knows and no line may show; more may be added later.
        context: Fields of every line: worker_id, consumer_group, engine ...; None values are left out.
    """
    form = "json" if relayed and os.environ.get(RELAY_VARIABLE) else choose_format(settings, stream)
    chain = _make_chain(settings, form, stream, context, secrets or KnownSecrets())
    replace_writer(chain.writer)
    _RELAY.writer = chain.writer if form == "console" else None
    _configure_structlog(settings, chain)
    root = logging.getLogger()
    root.handlers[:] = [_RecordHandler(chain)]
    level = logging.getLevelNamesMapping()[settings.level]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


@contextlib.contextmanager
def configured_for_people(settings: LoggingSettings) -> Iterator[None]:
    """Log for people while the block runs, as a test of a handler does; a configuration of structlog by others stays.

    The standard library's logging is not touched, because test runners capture it.

    Args:
        settings: The level, and the format if it is `json`.
    """
    before = structlog.get_config()
    is_own = isinstance(before["logger_factory"], _LoggerFactory) and before["processors"][-1] is _as_one_argument
    if structlog.is_configured() and not is_own:
        yield
        return
    form: Format = "json" if settings.format == "json" else "console"
    chain = _make_chain(settings, form, None, {}, KnownSecrets())
    _configure_structlog(settings, chain)
    try:
        yield
    finally:
        chain.writer.tell_all()
        if is_own:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()


def relay(line: str) -> bool:
    """Show an entry that another process of this host logged as JSON, formatted like this process's own entries.

    Args:
        line: The line that the process wrote.

    Returns:
        False if this process does not log for people, or the line is not an entry; the caller passes it on unchanged.
    """
    writer = _RELAY.writer
    if writer is None or not line.startswith('{"timestamp"'):
        return False
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    writer.write(entry)
    return True


def is_for_people() -> bool:
    """Return whether this process logs for people, so that plain text may stand between its entries."""
    return _RELAY.writer is not None


def tell_failure(what: str, error: TidemillError) -> None:
    """Report once why this process ends: as a line for people, or as a log entry for machines.

    Args:
        what: The operation that failed.
        error: The error.
    """
    # Configuration errors quote no secrets, but name keys that masking would take for secrets.
    text = str(error) if isinstance(error, ConfigError) else redact_text(str(error))
    if is_for_people() or not structlog.is_configured() or is_waiting():
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"error: {text}\n")
            sys.stderr.flush()
    else:
        structlog.get_logger(__name__).error(what, error=text, kind=type(error).__name__)


class _Relay:
    """The writer for entries of other processes; None if this process does not log for people."""

    writer: LogWriter | None = None


_RELAY = _Relay()


class _Chain:
    """The level, processors and writer that every entry passes through."""

    def __init__(self, level: int, processors: list[Processor], writer: LogWriter) -> None:
        self.level = level
        self.processors = processors
        self.writer = writer


def _make_chain(
    settings: LoggingSettings,
    form: Format,
    stream: TextIO | None,
    context: Mapping[str, object],
    secrets: KnownSecrets,
) -> _Chain:
    fixed = {"version": version(), **{key: value for key, value in context.items() if value is not None}}
    processors: list[Processor] = [
        _logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_context(fixed),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _mask_with(secrets),
        _first_keys_first,
    ]
    if form == "console":
        writer = LogWriter(ConsoleFormat(fixed, colors=_has_colors(stream)).render, stream, ("engine",))
    else:
        writer = LogWriter(_to_json, stream)
    return _Chain(logging.getLevelNamesMapping()[settings.level], processors, writer)


def _configure_structlog(settings: LoggingSettings, chain: _Chain) -> None:
    structlog.configure(
        processors=[*chain.processors, _as_one_argument],
        wrapper_class=structlog.make_filtering_bound_logger(chain.level),
        logger_factory=_LoggerFactory(chain.writer),
        # Loggers that were created before this call (one per module) have to follow it.
        cache_logger_on_first_use=False,
    )


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return (stream or sys.stderr).isatty()
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def _has_colors(stream: TextIO | None) -> bool:
    return _is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _of_interest(record: logging.LogRecord) -> bool:
    # py4j logs errors through the root logger, with a traceback, even if it raises or returns them to its caller; and
    # its caller already reports a JVM that ended during a call. asyncpg's pool logs each connection that it fails to
    # open in advance, while the caller that needs a connection gets the error.
    return (record.name != "root" or "py4j" not in record.pathname) and record.name != "asyncpg.pool"


_DIGITS = re.compile(r"\d+")
#: Fields that name the subject of an event: two unreachable sinks are two messages.
_SUBJECTS = ("sink", "topic", "client", "path")


class ThrottledLogger:
    """A logger for messages that may repeat endlessly; it passes one per interval and counts the others.

    Created by `throttle`. Safe to use from any thread.
    """

    __slots__ = ("_about", "_logger", "_seconds")

    def __init__(self, logger: Any, seconds: float, about: object) -> None:
        self._about = about
        self._logger = logger
        self._seconds = seconds

    def debug(self, event: str, **details: object) -> None:
        """Log at DEBUG, or count the event."""
        self._log("debug", event, details)

    def info(self, event: str, **details: object) -> None:
        """Log at INFO, or count the event."""
        self._log("info", event, details)

    def warning(self, event: str, **details: object) -> None:
        """Log at WARNING, or count the event."""
        self._log("warning", event, details)

    def error(self, event: str, **details: object) -> None:
        """Log at ERROR, or count the event."""
        self._log("error", event, details)

    def _log(self, method: str, event: str, details: dict[str, object]) -> None:
        about = (event, self._about, *[details[name] for name in _SUBJECTS if name in details])
        left_out = _LIMITS.passes(repr(about), self._seconds)
        if left_out is None:
            return
        if left_out:
            details["left_out"] = left_out
        getattr(self._logger, method)(event, **details)


def throttle(logger: Any, seconds: float, *, about: object = None) -> ThrottledLogger:
    """Return a view of a logger that passes each event once per `seconds` in this process.

    Events are the same if their text and their subject agree: `about`, and the fields sink, topic, client, path.

    Args:
        logger: A structlog logger.
        seconds: The interval; the field `left_out` of the next line says how many events were not written.
        about: Another part of the subject; it is not written.

    Example:
        >>> throttle(structlog.get_logger(), 10.0).warning("the broker is down")  # doctest: +SKIP
    """
    return ThrottledLogger(logger, seconds, about)


def kind_of(text: str | None) -> str:
    """Return a text with its numbers masked, which is equal for the same failure of different messages.

    Example:
        >>> kind_of("line 17: no field 3") == kind_of("line 4711: no field 8")
        True
    """
    return _DIGITS.sub("#", (text or "")[:200])


class _Limits:
    """The last time each event was written, and the number of its repetitions left out since."""

    #: Events have few texts, but an outside error's text used as an event must not fill the memory.
    MAX_EVENTS = 1000

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._written: dict[str, tuple[float, int]] = {}

    def passes(self, event: str, seconds: float) -> int | None:
        """Return how many events were left out since the last one that passed, or None if this one does not pass."""
        now = self._clock()
        with self._lock:
            last, left_out = self._written.get(event, (None, 0))
            if last is not None and now - last < seconds:
                self._written[event] = (last, left_out + 1)
                return None
            if len(self._written) >= self.MAX_EVENTS:
                self._written.clear()
            self._written[event] = (now, 0)
            return left_out


#: One per process, because a repeating message comes from many short-lived objects.
_LIMITS = _Limits()


class _Logger:
    """Passes finished entries to the writer; knows the name of the module that logs."""

    def __init__(self, writer: LogWriter, name: str) -> None:
        self._writer = writer
        self.name = name

    def msg(self, entry: EventDict) -> None:
        self._writer.write(entry)

    log = debug = info = warn = warning = error = err = critical = fatal = failure = exception = msg


class _LoggerFactory:
    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def __call__(self, *args: object) -> _Logger:
        return _Logger(self._writer, str(args[0]) if args else "")


class _RecordHandler(logging.Handler):
    """Passes records of the standard library's loggers through the chain."""

    def __init__(self, chain: _Chain) -> None:
        super().__init__()
        self._chain = chain
        self.addFilter(_of_interest)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            entry: EventDict = {"event": record.getMessage(), "_record": record}
            if record.exc_info:
                entry["exc_info"] = record.exc_info
            if record.stack_info:
                entry["stack"] = record.stack_info
            for process in self._chain.processors:
                entry = process(None, record.levelname.lower(), entry)  # type: ignore[assignment]
            self._chain.writer.write(entry)
        except Exception:
            self.handleError(record)


def _as_one_argument(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[EventDict], dict[str, Any]]:
    return (event,), {}


def _to_json(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, default=str, ensure_ascii=False)


def _logger_name(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    record = event.pop("_record", None)
    name = record.name if record is not None else getattr(logger, "name", "")
    if name:
        event["logger"] = name
    return event


def _add_context(fixed: dict[str, object]) -> Processor:
    def add(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        for key, value in fixed.items():
            event.setdefault(key, value)
        return event

    return add


def _mask_with(secrets: KnownSecrets) -> Processor:
    def mask(logger: WrappedLogger, method: str, event: EventDict) -> MutableMapping[str, Any]:
        """Mask secrets, also inside messages and tracebacks; runs after these have become text."""
        for key, value in event.items():
            event[key] = mask_value(key, secrets.mask_known(value) if isinstance(value, str) else value)
        return event

    return mask


def _first_keys_first(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    return {key: event[key] for key in ("timestamp", "level", "event") if key in event} | dict(event)
