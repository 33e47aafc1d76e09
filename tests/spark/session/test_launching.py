"""The JVM is launched before everything else, with what earlier launches left; and it ends if nobody wants it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from tests.until import wait_until

from tidemill.config.settings import SparkSettings
from tidemill.core.errors import RemoteError
from tidemill.runtime.embedded.java import find_java
from tidemill.runtime.process.table import find_descendants, is_running, read_arguments
from tidemill.spark.session import archive
from tidemill.spark.session.conf import spark_conf
from tidemill.spark.session.jvm import is_given
from tidemill.spark.session.kept_launch import MAIN_CLASS, KeptLaunch, find_kept_launch
from tidemill.spark.session.launching import find_spark_home
from tidemill.spark.session.session import Spark


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tidemill" / "spark"


@pytest.fixture
def hanging_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Java that answers with its version, and then hangs."""
    program = tmp_path / "java-home" / "bin" / "java"
    program.parent.mkdir(parents=True)
    answer = 'if [ "$1" = -version ]; then echo \'openjdk version "17.0.1"\' >&2; exit 0; fi\n'
    program.write_text(f"#!/bin/sh\n{answer}exec tail -f /dev/null $0 >/dev/null\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(program.parent.parent))
    return program


def jvms(program: Path) -> list[int]:
    """Return the processes of the program but for those that are only asked for its version."""
    arguments = {pid: read_arguments(pid) for pid in find_descendants(os.getpid())}
    return [pid for pid, words in arguments.items() if str(program) in words and "-version" not in words]


def test_a_jvm_that_nobody_starts_ends_with_the_block(hanging_java: Path) -> None:
    with Spark(SparkSettings(), "test", 1).launching() as spark:
        wait_until(lambda: spark.jvm_pid is not None and jvms(hanging_java))
    assert not jvms(hanging_java)
    assert spark.jvm_pid is None


def test_a_block_that_ends_at_once_launches_nothing_later(hanging_java: Path) -> None:
    for _ in range(5):
        with Spark(SparkSettings(), "test", 1).launching():
            pass
    for thread in threading.enumerate():
        if thread.name == "tidemill-launch":
            thread.join(60)
    assert not jvms(hanging_java)


def test_a_launch_serves_other_numbers_of_engines_but_no_other_options_environment_or_folder(
    hanging_java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Spark(SparkSettings(), "test", 1).launching() as spark:
        assert spark.configure(SparkSettings(), "other name", 7) == []
        assert spark._conf["spark.master"] == "local[8]"
        assert spark.configure(SparkSettings(conf={"spark.driver.memory": "2g"}), "test", 1) == ["spark.driver.memory"]
        monkeypatch.setenv("SOMETHING_THAT_ENGINES_INHERIT", "1")
        (changed,) = spark.configure(SparkSettings(), "test", 1)
        assert changed == "environment variable SOMETHING_THAT_ENGINES_INHERIT"
        monkeypatch.delenv("SOMETHING_THAT_ENGINES_INHERIT")
        assert spark.configure(SparkSettings(), "test", 1) == []
        monkeypatch.chdir(tmp_path)
        assert spark.configure(SparkSettings(), "test", 1) == ["current folder"]


def test_a_launch_uses_the_environment_of_the_moment_at_which_it_was_made(
    hanging_java: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java_home = os.environ["JAVA_HOME"]
    spark = Spark(SparkSettings(), "test", 1)
    with monkeypatch.context() as patch:
        patch.setenv("JAVA_HOME", "/nowhere")
        patch.setenv("SPARK_HOME", "/nowhere")
        patch.setenv("SET_BY_THE_HANDLER", "1")
        patch.setenv("PYSPARK_SUBMIT_ARGS", "--conf a=b pyspark-shell")
        with spark.launching():
            wait_until(lambda: spark.jvm_pid is not None and jvms(hanging_java))
            environ = Path(f"/proc/{spark.jvm_pid}/environ").read_bytes().decode().split("\0")
            assert not any("a=b" in word for pid in jvms(hanging_java) for word in read_arguments(pid))
    assert f"JAVA_HOME={java_home}" in environ
    assert "SET_BY_THE_HANDLER=1" not in environ


def test_the_session_is_imported_without_pyspark() -> None:
    code = "import sys, tidemill.spark.session.early; assert not {'pyspark', 'confluent_kafka'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sigterm_before_the_pipeline_runs_ends_the_jvm_as_well(hanging_java: Path, tmp_path: Path) -> None:
    script = """
        import signal, sys
        from tidemill.config.settings import SparkSettings
        from tidemill.spark.session.early import launched_early
        with launched_early(SparkSettings()):
            print("launched", flush=True)
            sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "launched\n"
        launched = wait_until(lambda: jvms(hanging_java))
        process.terminate()
        assert process.wait(60) == -15
    # They are nobody's descendants now.
    wait_until(lambda: not any(map(is_running, launched)))


@pytest.mark.parametrize("launched", ["launcher", "script", "JVM"])
def test_a_driver_that_is_killed_before_its_jvm_listens_leaves_no_jvm(
    launched: str, cache: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if launched == "JVM":
        program = tmp_path / "jvm"
        command = {"before": [sys.executable, "-c", "import time; time.sleep(1000)", str(program)], "after": []}
        (keep_hanging_command().folder / "command.json").write_text(json.dumps(command))
    else:
        program = request.getfixturevalue("hanging_java")
        if launched == "script":  # which starts the real Java instead of becoming it
            program.write_text(program.read_text().replace("exec ", ""))
    script = """
        import sys
        from tidemill.config.settings import SparkSettings
        from tidemill.spark.session.early import launched_early
        with launched_early(SparkSettings()):
            sys.stdin.read()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE) as driver:
        # The script and what it started.
        pids = wait_until(lambda: pids if len(pids := jvms(program)) > (launched == "script") else [])
        driver.kill()
    wait_until(lambda: not any(map(is_running, pids)), what=lambda: f"these have ended: {pids}")


def keep_hanging_command() -> KeptLaunch:
    """Keep a command that never listens, as if an earlier launch had left it."""
    kept = find_kept_launch(find_java(), find_spark_home(os.environ), spark_conf(SparkSettings(), "test", 1))
    assert kept is not None
    kept.prepare()
    command = {"before": ["/bin/sh", "-c", "read _"], "after": []}
    (kept.folder / "command.json").write_text(json.dumps(command))
    return kept


@pytest.mark.parametrize("end", ["it takes too long", "Spark fails", "it is aborted"])
def test_what_a_start_that_failed_has_used_is_forgotten_unless_the_start_was_aborted(
    end: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep_hanging_command()
    spark = Spark(SparkSettings(start_timeout_seconds=1 if end == "it takes too long" else 60), "test", 1)

    def gateway(*_: object) -> object:
        if end == "it is aborted":
            spark.abort()
            spark._launch.stopping.wait(60)
        raise ValueError("the context failed")

    if end != "it takes too long":
        monkeypatch.setattr("tidemill.spark.session.launching.gateway_to", gateway)
    with pytest.raises(RemoteError):
        spark.start()
    assert (kept.command([]) is not None) is (end == "it is aborted")


@pytest.mark.long
@pytest.mark.spark
def test_what_an_earlier_launch_left_is_used_and_a_broken_one_only_costs_time(cache: Path) -> None:
    assert not is_given()

    def start() -> list[str]:
        spark = Spark(SparkSettings(), "test", 1)
        try:
            spark.start()
            assert spark.jvm_pid is not None
            return read_arguments(spark.jvm_pid)
        finally:
            spark.stop()

    first = start()
    (command,) = cache.glob("*/command.json")
    kept = json.loads(command.read_bytes())
    assert first[0] == kept["before"][0]
    command.write_text(json.dumps({**kept, "before": ["/bin/false", *kept["before"][1:]]}))
    again = start()
    assert again[: again.index(MAIN_CLASS)][0] == first[0]
    assert json.loads(command.read_bytes()) == kept
    by_itself = start()
    assert by_itself[: by_itself.index("-cp")] == [first[0]]
    options = [set(words[: words.index(MAIN_CLASS)]) for words in (again, by_itself)]
    assert all("ClassList" in word for word in options[0] ^ options[1])


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_real_archive_is_made_once_and_a_damaged_one_only_costs_time(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.spark.session.launching.ARCHIVE_AFTER_SECONDS", 0.0)
    # At the lowest priority it would not get on beside other tests.
    guarded = archive._GUARDED.replace("nice -n 19", "nice -n 0")
    assert guarded != archive._GUARDED
    monkeypatch.setattr(archive, "_GUARDED", guarded)
    monkeypatch.chdir(tmp_path)

    def start(*, until_made: bool) -> bool:
        """Start and stop; tell whether the JVM mapped the archive."""
        spark = Spark(SparkSettings(), "test", 1)
        try:
            spark.start()
            assert spark.context.parallelize([1, 2], 2).sum() == 3
            spark.note_running()
            if until_made:
                wait_until(lambda: list(cache.glob("*/classes.jsa")), 300)
            # Java has an archive of its own classes, under the same name.
            return str(cache) in Path(f"/proc/{spark.jvm_pid}/maps").read_text()
        finally:
            spark.stop()

    assert not start(until_made=True)
    (made,) = cache.glob("*/classes.jsa")
    made_at = made.stat().st_mtime_ns
    assert start(until_made=False)
    assert made.stat().st_mtime_ns == made_at
    whole = made.read_bytes()
    half = len(whole) // 2
    made.write_bytes(whole[:half] + bytes(4096) + whole[half + 4096 :])  # of another size: see test_kept_launch.py
    start(until_made=False)
    assert not list(tmp_path.glob("hs_err*")), "a JVM crashed"
