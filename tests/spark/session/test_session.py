"""What Spark is told, and how its process comes and goes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tidemill.config.settings import SparkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.java import JavaRuntime
from tidemill.runtime.link.progress import EngineProgress, SinkStats
from tidemill.spark.preflight import choose_engine_count
from tidemill.spark.progress import sum_progress
from tidemill.spark.session.conf import redirect_sockets, spark_conf
from tidemill.spark.session.jvm import JvmOutput
from tidemill.spark.session.packaging import _package_zip
from tidemill.spark.session.session import Spark, keep_accumulators_quiet


def test_local_has_one_core_more_than_engines() -> None:
    conf = spark_conf(SparkSettings(), "app", 3)
    assert conf["spark.master"] == "local[4]"
    assert conf["spark.driver.host"] == "127.0.0.1"
    assert conf["spark.scheduler.mode"] == "FAIR"
    assert conf["spark.ui.enabled"] == "false"


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_jvm_that_ends_first_prints_no_traceback_of_accumulators(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], is_quiet: bool
) -> None:
    from pyspark.accumulators import _start_update_server

    server = _start_update_server("", True, str(tmp_path / "a"))
    try:
        if is_quiet:
            keep_accumulators_quiet(SimpleNamespace(_accumulatorServer=server))  # type: ignore[arg-type]
        handle, handled = server.handle_error, threading.Event()
        server.handle_error = lambda *details: (handle(*details), handled.set())  # type: ignore[method-assign, assignment]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "a"))
        assert handled.wait(60)
    finally:
        server.shutdown()
    assert ("EOFError" not in capfd.readouterr().err) is is_quiet


def test_the_users_configuration_wins_but_for_what_engines_need() -> None:
    theirs = {
        "spark.driver.memory": "3g",
        "spark.ui.enabled": "true",
        "spark.driver.extraJavaOptions": "-Dmine=1",
        "spark.python.worker.reuse": "true",
        "spark.task.maxFailures": "4",
    }
    conf = spark_conf(SparkSettings(master="spark://somewhere:7077", conf=theirs), "app", 2)
    assert (conf["spark.master"], conf["spark.driver.memory"]) == ("spark://somewhere:7077", "3g")
    assert conf["spark.ui.enabled"] == "true"
    assert conf["spark.driver.extraJavaOptions"].startswith("-Dmine=1 ")
    assert (conf["spark.python.worker.reuse"], conf["spark.task.maxFailures"]) == ("false", "1")
    assert "spark.driver.host" not in conf


def test_a_log_configuration_of_the_users_is_kept() -> None:
    options = "-Dlog4j2.configurationFile=mine.properties"
    conf = spark_conf(SparkSettings(conf={"spark.driver.extraJavaOptions": options}), "app", 1)
    assert conf["spark.driver.extraJavaOptions"] == options


@pytest.mark.parametrize(
    ("master", "engines", "partitions", "expected"),
    [("local[3]", None, 8, 3), ("local[8]", None, 4, 4), ("local", 5, 2, 5), ("local[2]", 2, 8, 2)],
)
def test_engines_are_the_smaller_of_partitions_and_cores(
    master: str, engines: int | None, partitions: int, expected: int
) -> None:
    assert choose_engine_count(SparkSettings(master=master, engines=engines), partitions) == expected


def test_engines_that_would_never_get_a_core_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"local\[2\].*only 2 cores"):
        choose_engine_count(SparkSettings(master="local[2]", engines=3), 8)


@pytest.mark.long
def test_a_local_jvm_that_stood_still_holds_it_against_nobody() -> None:
    conf = {
        # What Spark says of itself: two minutes, ten seconds, a minute, sixty times.
        "spark.network.timeout": "3s",
        "spark.rpc.askTimeout": "120s",
        "spark.executor.heartbeatInterval": "1s",
        "spark.network.timeoutInterval": "1ms",
        "spark.executor.heartbeat.maxFailures": "3",
    }
    spark = Spark(SparkSettings(conf=conf), "test", 1)
    ended = threading.Event()
    try:
        spark.start()
        spark.watch(ended.set)
        assert spark.jvm_pid is not None
        # Spark forgives the first one. Three heartbeats that fail end the JVM.
        for seconds in (4, 5):
            os.kill(spark.jvm_pid, signal.SIGSTOP)
            time.sleep(4.5)  # the standstill itself is what is tested
            os.kill(spark.jvm_pid, signal.SIGCONT)
            assert not ended.wait(seconds), "the JVM ended itself"
        assert spark.context.parallelize([1, 2], 2).sum() == 3
    finally:
        spark.stop()


def test_the_package_travels_as_a_zip_that_python_imports_from(tmp_path: Path) -> None:
    archive = _package_zip(tmp_path)
    names = set(zipfile.ZipFile(archive).namelist())
    assert {"tidemill/__init__.py", "tidemill/spark/engine/process.py", "tidemill/pipeline/engine.py"} <= names
    assert not any("__pycache__" in name for name in names)


def test_signal_handlers_are_what_they_were_and_the_jvm_is_gone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    spark = Spark(SparkSettings(), "test", 1)
    spark.start()
    pid = spark.jvm_pid
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    assert ignored >> (signal.SIGTERM - 1) & 1
    assert ignored >> (signal.SIGINT - 1) & 1
    assert spark.is_alive()
    spark.stop()
    assert not spark.is_alive()
    assert not Path(f"/proc/{pid}").exists()
    spark.stop()


def test_what_the_jvm_says_goes_to_standard_error_as_it_is_now(capsys: pytest.CaptureFixture[str]) -> None:
    script = "echo WARNING: Using incubator modules: x; echo out of memory; printf end"
    with JvmOutput().pipe() as standard_error:
        subprocess.run(["sh", "-c", f"({script}) >&2"], stderr=standard_error, check=True)

    for thread in threading.enumerate():
        if thread.name == "tidemill-jvm-stderr":
            thread.join(60)
    assert capsys.readouterr().err == "out of memory\nend"


def test_a_line_that_cannot_be_shown_does_not_end_the_relay_of_the_jvm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(line: str) -> bool:
        if line.startswith("bad"):
            raise LookupError("no such entry")
        return False

    monkeypatch.setattr("tidemill.runtime.log.relayed_output.relay", show)
    with JvmOutput().pipe() as standard_error:
        subprocess.run(["sh", "-c", "printf 'bad\\ngood\\n' >&2"], stderr=standard_error, check=True)

    for thread in threading.enumerate():
        if thread.name == "tidemill-jvm-stderr":
            thread.join(60)
    assert capsys.readouterr().err == "good\n"


def test_a_master_that_cannot_be_is_named() -> None:
    spark = Spark(SparkSettings(master="nonsense"), "test", 1)
    with pytest.raises(RemoteError, match="'nonsense'"):
        spark.start()
    assert spark.jvm_pid is None


def test_sums_keep_what_gone_engines_did_but_not_what_they_had() -> None:
    gone = EngineProgress(
        consumed=5, tasks_running=2, committed={"t/0": 7}, slowest=[(9.0, "a", "x")], partitions=["t/0"]
    )
    here = EngineProgress(
        consumed=1, tasks_running=1, committed={"t/0": 4, "t/1": 1}, slowest=[(3.0, "b", "y")], lag={"t/0": 2}
    )
    total = sum_progress([gone], [here])
    assert (total.consumed, total.tasks_running) == (6, 1)
    assert total.committed == {"t/0": 7, "t/1": 1}
    assert total.partitions == []
    assert total.lag == {"t/0": 2}
    assert [task[1] for task in total.slowest] == ["a", "b"]


def test_what_happened_at_a_sink_is_added_up_and_the_last_error_is_the_latest() -> None:
    place = "sinks.http.out"
    gone = EngineProgress(
        sinks={place: SinkStats(delivered_count=1, delivered_payloads=5, last_error="late", last_error_at=9.0)}
    )
    here = EngineProgress(
        sinks={place: SinkStats(2, 7, error_count=1, last_error="early", last_error_at=3.0, last_delivered_at=4.0)}
    )
    other = EngineProgress(sinks={"sinks.kafka.out": SinkStats(skipped=1)})
    total = sum_progress([gone], [here, other]).sinks
    assert total[place] == SinkStats(3, 12, error_count=1, last_error="late", last_error_at=9.0, last_delivered_at=4.0)
    assert total["sinks.kafka.out"] == SinkStats(skipped=1)


def test_python_workers_run_this_interpreter() -> None:
    assert spark_conf(SparkSettings(), "app", 1)["spark.pyspark.python"] == sys.executable


def test_a_jvm_that_ends_at_once_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-javaagent:/nope.jar")
    with pytest.raises(RemoteError, match=r"exited with code 1 before it was ready: .*/nope.jar"):
        Spark(SparkSettings(), "app", 1).start()


def test_a_context_that_fails_says_the_innermost_cause() -> None:
    spark = Spark(SparkSettings(conf={"spark.driver.bindAddress": "192.0.2.1"}), "app", 1)
    with pytest.raises(RemoteError) as caught:
        spark.start()
    assert "master 'local[2]': BindException: " in str(caught.value)
    assert "Cannot assign requested address" in str(caught.value)


def test_a_user_whom_the_system_does_not_know_has_a_name_and_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    monkeypatch.setenv("HOME", "/home/of mine")
    assert JavaRuntime(Path("/jdk"), 17, "PATH").environment({})["SPARK_USER"] == "user-3999999999"
    assert JavaRuntime(Path("/jdk"), 17, "PATH").environment({"SPARK_USER": "me"})["SPARK_USER"] == "me"
    options = spark_conf(SparkSettings(), "app", 1)["spark.driver.extraJavaOptions"]
    assert "-Duser.home=/home/of mine" in shlex.split(options)
    own = SparkSettings(conf={"spark.driver.extraJavaOptions": "-Duser.home=/mine"})
    assert "/home/of" not in spark_conf(own, "app", 1)["spark.driver.extraJavaOptions"]


def test_a_user_whom_the_system_knows_is_left_to_it() -> None:
    assert "SPARK_USER" not in JavaRuntime(Path("/jdk"), 17, "PATH").environment({})
    assert "user.home" not in spark_conf(SparkSettings(), "app", 1)["spark.driver.extraJavaOptions"]


IN_A_FOLDER = """
    from tidemill.config.settings import SparkSettings
    from tidemill.spark.session.session import Spark

    spark = Spark(SparkSettings(), "app", 1)
    try:
        spark.start()
        print(spark.context.parallelize([1], 1).map(lambda n: n + 1).collect())
    finally:
        spark.stop()
"""


def run_in(folder: Path, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IN_A_FOLDER)],
        env={**os.environ, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), **environ},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.parametrize("locale", ["xx_XX.UTF-8", pytest.param("POSIX", marks=pytest.mark.nightly)])
def test_spark_starts_in_a_locale_that_does_not_exist_and_a_folder_whose_name_is_not_ascii(
    locale: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "größe").mkdir()
    assert run_in(folder, LC_ALL=locale) == "[2]"


def test_sockets_are_where_the_user_says_and_where_their_names_fit() -> None:
    conf = spark_conf(SparkSettings(conf={"spark.python.unix.domain.socket.dir": "/mine"}), "app", 1)
    assert redirect_sockets(conf, Path("/tmp/x")) == {}
    local = spark_conf(SparkSettings(), "app", 1)
    assert redirect_sockets(local, Path(f"/tmp/{'x' * 57}")) == {}
    assert list(redirect_sockets(local, Path(f"/tmp/{'x' * 56}"))) == ["spark.python.unix.domain.socket.dir"]


# All other tests have one into which the sockets fit.
@pytest.mark.long
@pytest.mark.parametrize("length", [pytest.param(61, marks=pytest.mark.nightly), 62])
def test_spark_starts_its_workers_however_long_the_name_of_its_folder_is(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = Path(tempfile.gettempdir())
    name = "x" * (length - len(f"{temporary}//tidemill-spark-12345678"))
    (temporary / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / name))
    spark = Spark(SparkSettings(), "app", 1)
    try:
        spark.start()
        folder = str(spark._folder.path)
        assert len(folder) == length
        with pytest.raises(Exception, match="Worker"):
            spark.context.parallelize([1], 1).foreach(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        (found,) = spark.context.parallelize([1], 1).map(lambda _: os.listdir(folder)).collect()
    finally:
        spark.stop()
        shutil.rmtree(temporary / name)
    assert any(name.endswith(".sock") for name in found) is (length == 61), "they end with Spark if they fit"
