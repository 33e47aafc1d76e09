"""Logging: one form for all loggers, context on every line, secrets masked, floods limited."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from tests.until import wait_until

from tidemill.config.settings import LoggingSettings
from tidemill.runtime.log import repeats
from tidemill.runtime.log import setup as log_module
from tidemill.runtime.log.setup import RELAY_VARIABLE, configure, configured_for_people, relay, throttle, version
from tidemill.runtime.log.writer import LogWriter, tell_repeats

LOG = structlog.get_logger("tidemill.test")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_line_carries_the_context_and_the_version(stream: io.StringIO) -> None:
    configure(LoggingSettings(), stream=stream, worker_id="w", consumer_group="g", engine=3, partition=None)

    LOG.info("hello", partition=7)

    (line,) = lines(stream)
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert line["timestamp"].endswith("Z")
    del line["timestamp"]
    assert line == {
        "level": "info",
        "event": "hello",
        "logger": "tidemill.test",
        "worker_id": "w",
        "consumer_group": "g",
        "engine": 3,
        "partition": 7,
        "version": version(),
    }


def test_the_standard_library_goes_the_same_way(stream: io.StringIO) -> None:
    configure(LoggingSettings(), stream=stream, worker_id="w")

    logging.getLogger("some.library").warning("is %s", "low")

    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("is low", "warning", "some.library")
    assert line["worker_id"] == "w"


@pytest.mark.parametrize("name", ["py4j", "py4j.clientserver", "pyspark", "asyncio", "watchfiles.main"])
def test_noisy_libraries_are_heard_from_warning_on(stream: io.StringIO, name: str) -> None:
    configure(LoggingSettings(level="DEBUG"), stream=stream)

    logging.getLogger(name).info("chatter")
    logging.getLogger(name).warning("trouble")

    assert [line["event"] for line in lines(stream)] == ["trouble"]


def test_lines_below_the_level_are_not_written(stream: io.StringIO) -> None:
    configure(LoggingSettings(level="WARNING"), stream=stream)

    LOG.info("no")
    logging.getLogger("x").info("no")
    LOG.warning("yes")

    assert [line["event"] for line in lines(stream)] == ["yes"]


def test_a_logger_made_before_follows_a_later_configuration(stream: io.StringIO) -> None:
    bound = LOG.bind(engine=1)
    configure(LoggingSettings(level="ERROR"), stream=io.StringIO())
    LOG.error("first")

    configure(LoggingSettings(level="DEBUG"), stream=stream)
    LOG.debug("second")
    LOG.bind(engine=1).debug("third")

    assert [line["event"] for line in lines(stream)] == ["second", "third"]
    assert bound is not None


@pytest.mark.parametrize("form", ["json", "console"])
def test_secrets_are_masked_in_fields_messages_and_tracebacks(stream: io.StringIO, form: Any) -> None:
    configure(LoggingSettings(format=form), stream=stream, url="http://me:hunter2@host/")

    LOG.info(
        "connecting with password=hunter2",
        sasl_password="hunter2",
        config={"sasl.password": "hunter2", "list": [{"token": "hunter2"}]},
        args=("postgres://u:hunter2@h/",),
    )
    logging.getLogger("lib").warning("token: %s", "hunter2")
    try:
        raise ValueError("no luck with postgres://u:" + "hunter2@db/")
    except ValueError:
        LOG.exception("failed")
        logging.getLogger("lib").exception("failed too")

    assert "hunter2" not in stream.getvalue().replace('"hunter2@db/")', "").replace('\\"hunter2@db/\\")', "")
    assert stream.getvalue().count("ValueError: no luck with postgres://***@db/") == 2


def test_console_lines_have_no_colours_without_a_terminal(stream: io.StringIO) -> None:
    configure(LoggingSettings(format="console"), stream=stream, worker_id="w")

    LOG.info("hello", n=1)

    assert stream.getvalue()[8:] == " info    hello n=1\n"


def test_lines_go_to_standard_error_as_it_is_when_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LoggingSettings())

    LOG.info("hello")

    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "hello"


def test_a_closed_standard_error_stops_nothing() -> None:
    closed = io.StringIO()
    configure(LoggingSettings(), stream=closed)
    closed.close()

    LOG.error("nobody reads this")


def test_values_that_json_does_not_know_are_written_as_text(stream: io.StringIO) -> None:
    configure(LoggingSettings(), stream=stream)

    LOG.info("x", error=ValueError("bad"), raw=b"\xff")

    assert lines(stream)[0]["error"] == "bad"


class Unprintable:
    def __str__(self) -> str:
        raise LookupError("no text")

    __repr__ = __str__

    def __hash__(self) -> int:
        return 1


def make_cycle() -> dict[str, Any]:
    cycle: dict[str, Any] = {"password": "hunter2"}
    cycle["again"] = cycle
    return cycle


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({("t", 0): 3}, "{('t', 0): 3}"),
        (Unprintable(), "<Unprintable that cannot be shown>"),
        ([Unprintable()], "<list that cannot be shown>"),
        ({Unprintable(): {"password": "hunter2"}}, "<dict that cannot be shown>"),
        (make_cycle(), "<dict that cannot be shown>"),
    ],
    ids=["tuple as key", "no text", "no text inside", "key without a text", "cycle"],
)
@pytest.mark.parametrize("form", ["json", "console"])
def test_an_entry_is_written_and_counted_whatever_its_values_are(
    stream: io.StringIO, form: Any, value: Any, shown: str
) -> None:
    configure(LoggingSettings(format=form), stream=stream)

    for _ in range(3):
        LOG.warning("x", value=value, n=3)
    logging.getLogger("lib").warning("next")
    tell_repeats()

    first, following, count = stream.getvalue().splitlines()
    assert "hunter2" not in stream.getvalue()
    assert "next" in following
    if form == "json":
        assert (json.loads(first)["value"], json.loads(first)["n"]) == (shown, 3)
        assert (json.loads(count)["value"], json.loads(count)["repeated"]) == (shown, 2)
    else:
        assert "value=" in first
        assert shown.strip("<>") in first
        assert "repeated=2" in count


def test_a_count_that_cannot_be_rendered_does_not_end_the_counting(stream: io.StringIO) -> None:
    configure(LoggingSettings(), stream=stream)

    for name in ("first", "second"):
        for _ in range(2):
            LOG.warning(name, counts={("t", 0): 3})
        wait_until(lambda: lines(stream)[-1].get("repeated") == 1)  # told by the thread, not by another entry

    assert [line["event"] for line in lines(stream)] == ["first", "first", "second", "second"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_module, "_LIMITS", log_module._Limits(clock))
    return clock


def test_a_limited_message_passes_once_per_interval_and_counts_the_others(stream: io.StringIO, clock: Clock) -> None:
    configure(LoggingSettings(), stream=stream)

    for step in range(25):
        clock.now = 100.0 + step
        # A new view each time, as in callbacks: the count is not lost with it.
        throttle(LOG, 10.0).warning("broker down", step=step)

    assert [(line["step"], line.get("left_out")) for line in lines(stream)] == [(0, None), (10, 9), (20, 9)]


def test_different_messages_are_limited_on_their_own(stream: io.StringIO, clock: Clock) -> None:
    configure(LoggingSettings(), stream=stream)

    for event in ("a", "b", "a", "b"):
        throttle(LOG, 10.0).error(event)
    for sink in ("x", "y", "x"):
        throttle(LOG, 10.0).error("down", sink=sink, error=ValueError())

    assert [(line["event"], line.get("sink")) for line in lines(stream)] == [
        ("a", None),
        ("b", None),
        ("down", "x"),
        ("down", "y"),
    ]


def test_texts_without_end_do_not_fill_the_memory(clock: Clock) -> None:
    limits = log_module._Limits(clock)

    for number in range(5000):
        limits.passes(f"event {number}", 10.0)

    assert len(limits._written) <= limits.MAX_EVENTS


def test_what_py4j_logs_of_an_ended_jvm_is_left_out_since_it_raises_the_same(stream: io.StringIO) -> None:
    configure(LoggingSettings(), stream=stream)

    for path in ("/lib/py4j/java_gateway.py", "/lib/other.py"):
        for level in (logging.INFO, logging.ERROR):
            record = logging.LogRecord("root", level, path, 1, f"{path} {level}", None, None)
            logging.getLogger().handle(record)

    assert [line["event"] for line in lines(stream)] == [f"/lib/other.py {level}" for level in (20, 40)]


def test_what_a_pool_logs_of_connections_that_it_opens_ahead_is_left_out(stream: io.StringIO) -> None:
    configure(LoggingSettings(), stream=stream)
    for name in ("asyncpg.pool", "asyncpg.other"):
        logging.getLogger(name).warning("from %s", name)
    assert [line["event"] for line in lines(stream)] == ["from asyncpg.other"]


@pytest.mark.parametrize(("form", "is_json"), [("auto", False), ("console", False), ("json", True)])
def test_on_a_terminal_logs_are_for_people_unless_json_is_configured(
    form: Any, is_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    configure(LoggingSettings(format=form), stream=terminal)

    LOG.info("hello")

    assert terminal.getvalue().startswith("{") is is_json
    assert ("\x1b[" in terminal.getvalue()) is not is_json


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colors_are_used_where_nobody_wants_them(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    terminal = Terminal()
    configure(LoggingSettings(), stream=terminal)

    LOG.error("hello", n=1)

    assert terminal.getvalue()[8:] == " error   hello n=1\n"


def test_equal_entries_are_counted_and_the_count_is_written_without_another_entry(stream: io.StringIO) -> None:
    configure(LoggingSettings(), stream=stream)

    for _ in range(5):
        LOG.warning("no broker", address="b:1")
    LOG.warning("no broker", address="b:2")

    assert [line["address"] for line in lines(stream)] == ["b:1", "b:2"]
    wait_until(lambda: len(lines(stream)) == 3)
    assert (lines(stream)[2]["address"], lines(stream)[2]["repeated"]) == ("b:1", 4)


def test_a_count_does_not_wait_for_another_that_is_due_later(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(repeats, "AGAIN_SECONDS", 3600.0)
    waiting = threading.Event()

    def now() -> float:
        if threading.current_thread().name == "tidemill-log":
            waiting.set()
        return time.monotonic()

    writer = LogWriter(lambda entry: f"{entry['event']} {entry.get('repeated', '')}", stream, clock=now)
    writer.write({"event": "a"})
    writer.write({"event": "a"})
    wait_until(lambda: "a 1\n" in stream.getvalue())
    waiting.clear()
    writer.write({"event": "a"})  # due in an hour
    assert waiting.wait(60)
    try:
        writer.write({"event": "b"})
        writer.write({"event": "b"})
        wait_until(lambda: "b 1\n" in stream.getvalue())
    finally:
        writer.tell_all()
    assert stream.getvalue() == "a \na 1\nb \nb 1\na 1\n"


def test_a_process_that_ends_writes_its_counts_before(stream: io.StringIO) -> None:
    configure(LoggingSettings(), stream=stream)
    for _ in range(3):
        logging.getLogger("lib").warning("slow")

    tell_repeats()

    assert [line.get("repeated") for line in lines(stream)] == [None, 2]


def test_after_a_fork_nothing_of_the_parent_is_held_or_told_again(stream: io.StringIO) -> None:
    writer = LogWriter(lambda entry: str(entry["event"]), stream)
    writer.write({"event": "a"})
    writer.write({"event": "a"})

    writer._changed.acquire()  # as a thread of the parent may have done
    writer.reset_after_fork()
    writer.tell_all()

    assert stream.getvalue() == "a\n"


def test_entries_of_engines_are_shown_as_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RELAY_VARIABLE, "1")
    monkeypatch.setenv("NO_COLOR", "1")
    pipe = io.StringIO()
    configure(LoggingSettings(format="console"), stream=pipe, relayed=True, engine=1, worker_id="w")
    LOG.warning("slow", seconds=3)
    said = pipe.getvalue()
    assert json.loads(said)["engine"] == 1

    terminal = Terminal()
    configure(LoggingSettings(), stream=terminal, worker_id="w")
    assert relay(said)
    assert relay(said.replace('"engine": 1', '"engine": 2'))
    assert not relay("a line of the JVM\n")
    assert not relay('{"timestamp": half\n')
    assert not relay(f'{{"timestamp": {"[" * 100_000}\n')
    tell_repeats()
    assert [line[9:] for line in terminal.getvalue().splitlines()] == [
        "warning slow seconds=3 engine=1",
        "warning slow seconds=3 engine=2 repeated=1",
    ]

    configure(LoggingSettings(), stream=io.StringIO())
    assert not relay(said)  # it is JSON already


def test_a_run_of_a_handler_logs_for_people_and_leaves_logging_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    with configured_for_people(LoggingSettings(level="WARNING")):
        LOG.info("no")
        try:
            secret = "hunter" + "2"
            raise LookupError("no table")
        except LookupError:
            LOG.exception("failed", n=1)
    del secret

    said = capsys.readouterr()
    assert said.out == ""
    assert "error   failed n=1\n  LookupError: no table\n" in said.err
    assert "hunter2" not in said.err
    assert not structlog.is_configured()
    with structlog.testing.capture_logs() as logs, configured_for_people(LoggingSettings(level="ERROR")):
        LOG.info("captured")
    assert [line["event"] for line in logs] == ["captured"]
    configure(LoggingSettings(format="json"))
    with configured_for_people(LoggingSettings()):
        LOG.info("for people")
    LOG.info("for machines")
    people, machines = capsys.readouterr().err.splitlines()
    assert people.endswith(" info    for people")
    assert json.loads(machines)["event"] == "for machines"
