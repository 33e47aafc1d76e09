"""Structured logs: one line per event on standard error, as JSON or for people, secrets masked.

All logs go the same way: structlog's own loggers and the standard library's (pyspark, py4j, libraries). What
every line of a process carries (worker, group, version) is set once by `configure`; it is not a context
variable, because the threads of a process would not see it. Logging is for rare events; nothing logs
per message.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from tidemill.config.redaction import is_secret, redact, redact_text
from tidemill.config.settings import LoggingSettings

#: Libraries whose INFO and DEBUG lines only their authors need; some log every message with all its data.
_QUIET = ("alembic", "asyncio", "httpcore", "httpx", "py4j", "pymongo", "pyspark", "urllib3")


def version() -> str:
    """Return tidemill's version."""
    try:
        return importlib.metadata.version("tidemill")
    except importlib.metadata.PackageNotFoundError:
        # Sent to a cluster as a .zip, it has no metadata.
        return "unknown"


def configure(settings: LoggingSettings, *, stream: TextIO | None = None, **context: object) -> None:
    """Send all logs of this process to one place in one form; calling it again replaces the earlier configuration.

    Args:
        settings: Level and format.
        stream: Where lines go; None: standard error, as it is when a line is written.
        context: What every line carries: worker_id, consumer_group, engine ...; None values are left out.
    """
    level = logging.getLevelNamesMapping()[settings.level]
    fixed = {"version": version(), **{key: value for key, value in context.items() if value is not None}}
    shared: list[Processor] = [
        _logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_context(fixed),
        structlog.processors.StackInfoRenderer(),
    ]
    render = _make_renderers(settings, stream)
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_LineLoggerFactory(stream),
        # Loggers created before this call (one per module) have to follow it.
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(_Stderr(stream))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    handler.addFilter(_of_interest)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def _of_interest(record: logging.LogRecord) -> bool:
    # py4j logs through the root logger, with a traceback, whatever it then raises or returns to its caller: a JVM that
    # was ended during a call is not news.
    return record.name != "root" or "py4j" not in record.pathname


_DIGITS = re.compile(r"\d+")
#: Fields that say what an event is about: two sinks that are down are two messages.
_SUBJECTS = ("sink", "topic", "client", "path")


class Limited:
    """A logger for messages that may repeat endlessly: it passes one per interval and counts the others.

    Made by `limited`. Safe to use from any thread.
    """

    __slots__ = ("_about", "_logger", "_seconds")

    def __init__(self, logger: Any, seconds: float, about: object) -> None:
        """Keep the logger, the interval, and what its events are about."""
        self._about = about
        self._logger = logger
        self._seconds = seconds

    def debug(self, event: str, **details: object) -> None:
        """Log at DEBUG, or count it."""
        self._log("debug", event, details)

    def info(self, event: str, **details: object) -> None:
        """Log at INFO, or count it."""
        self._log("info", event, details)

    def warning(self, event: str, **details: object) -> None:
        """Log at WARNING, or count it."""
        self._log("warning", event, details)

    def error(self, event: str, **details: object) -> None:
        """Log at ERROR, or count it."""
        self._log("error", event, details)

    def _log(self, method: str, event: str, details: dict[str, object]) -> None:
        about = (event, self._about, *[details[name] for name in _SUBJECTS if name in details])
        left_out = _LIMITS.passes(repr(about), self._seconds)
        if left_out is None:
            return
        if left_out:
            details["left_out"] = left_out
        getattr(self._logger, method)(event, **details)


def limited(logger: Any, seconds: float, *, about: object = None) -> Limited:
    """Return a view of a logger that passes each event once per `seconds` in this process.

    Events are told apart by their text and by what they are about: `about`, and the fields sink, topic, client, path.

    Args:
        logger: A structlog logger.
        seconds: The interval; a line after it says with `left_out` how many were not written.
        about: What else tells events of one text apart; not written.

    Example:
        >>> limited(structlog.get_logger(), 10.0).warning("the broker is down")  # doctest: +SKIP
    """
    return Limited(logger, seconds, about)


def kind_of(text: str | None) -> str:
    """Return what texts that differ only in numbers have in common: the same failure of different messages.

    Example:
        >>> kind_of("line 17: no field 3") == kind_of("line 4711: no field 8")
        True
    """
    return _DIGITS.sub("#", (text or "")[:200])


class _Limits:
    """When each event was last written, and how many were not since."""

    #: Texts of events are few; texts of outside errors used as events must not fill the memory.
    MAX_EVENTS = 1000

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._written: dict[str, tuple[float, int]] = {}

    def passes(self, event: str, seconds: float) -> int | None:
        """Return how many were left out since the last one that passed, or None if this one does not."""
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


#: One per process, because a message that repeats comes from many short-lived places.
_LIMITS = _Limits()


class _Stderr:
    """Standard error as it is now: tests and live displays replace it after the configuration."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return (self._stream or sys.stderr).write(text)

    def flush(self) -> None:
        (self._stream or sys.stderr).flush()


class _LineLogger:
    """Writes finished lines; knows the name of the module that logs."""

    def __init__(self, stream: _Stderr, name: str) -> None:
        self._stream = stream
        self.name = name

    def msg(self, line: str) -> None:
        # Work continues without a log: standard error may be closed or its reader gone.
        with contextlib.suppress(OSError, ValueError):
            # One write, so that lines of several threads and processes do not mix.
            self._stream.write(line + "\n")
            self._stream.flush()

    log = debug = info = warn = warning = error = err = critical = fatal = failure = exception = msg


class _LineLoggerFactory:
    def __init__(self, stream: TextIO | None) -> None:
        self._stream = _Stderr(stream)

    def __call__(self, *args: object) -> _LineLogger:
        return _LineLogger(self._stream, str(args[0]) if args else "")


def _logger_name(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    record = event.get("_record")
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


def _mask(logger: WrappedLogger, method: str, event: EventDict) -> MutableMapping[str, Any]:
    """Mask secrets, also inside messages and tracebacks; runs after those have become text."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = "***" if is_secret(key) and value else redact_text(value)
        elif isinstance(value, dict | list | tuple):
            event[key] = redact({key: value})[key]
    return event


def _first_keys_first(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    return {key: event[key] for key in ("timestamp", "level", "event") if key in event} | dict(event)


def _make_renderers(settings: LoggingSettings, stream: TextIO | None) -> list[Processor]:
    if settings.format == "json":
        return [
            structlog.processors.format_exc_info,
            _mask,
            _first_keys_first,
            structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
        ]
    colors = (stream or sys.stderr).isatty()
    return [
        structlog.processors.format_exc_info,
        _mask,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]
