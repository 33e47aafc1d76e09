"""What is kept of a launch of the JVM: used only where it is certain to be right, and never needed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tidemill.runtime.embedded.java import JavaRuntime
from tidemill.spark.session import kept_launch
from tidemill.spark.session.kept_launch import MAIN_CLASS, KeptLaunch, find_kept_launch

CONF = {
    "spark.driver.memory": "1g",
    "spark.driver.defaultJavaOptions": "-XX:+UseSerialGC",
    "spark.driver.extraJavaOptions": "'-Dtheir password=hunter2'",
}


@pytest.fixture
def java(tmp_path: Path) -> Path:
    program = tmp_path / "java" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    (tmp_path / "spark" / "jars" / "spark.jar").write_bytes(b"jar")
    return tmp_path / "spark"


def find(java: Path, home: Path, identity: str = "one", **changed: str) -> KeptLaunch | None:
    runtime = JavaRuntime(java.parent.parent, 17, "PATH", identity)
    conf = {**CONF, **{name: value for name, value in changed.items() if name.startswith("spark.")}}
    environ = {name: value for name, value in changed.items() if not name.startswith("spark.")}
    return find_kept_launch(runtime, home, conf, {"XDG_CACHE_HOME": str(java.parent / "cache"), **environ})


def learn(kept: KeptLaunch, java: Path, monkeypatch: pytest.MonkeyPatch, memory: str = "1g") -> None:
    """Let it learn from a JVM as the launcher would have started it."""
    options = ["-XX:+UseSerialGC", "-Dtheir password=hunter2", *kept.sharing_options(Path("/tmp/x"))]
    words = [str(java), "-cp", "jars/*", f"-Xmx{memory}", *options, "--add-opens=a", MAIN_CLASS, "--conf", "a=b"]
    monkeypatch.setattr(kept_launch, "read_arguments", lambda pid: words)
    kept.learn(1)


def found(kept: KeptLaunch | None) -> KeptLaunch:
    assert kept is not None
    return kept


def test_a_command_is_known_after_the_first_launch(java: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = found(find(java, home))
    assert kept.command(["x"]) is None
    learn(kept, java, monkeypatch)
    expected = [
        *(str(java), "-cp", "jars/*", "-Xmx1g", "-XX:+UseSerialGC", "-Dtheir password=hunter2"),
        *("--add-opens=a", MAIN_CLASS, "x"),
    ]
    assert found(find(java, home)).command(["x"]) == expected


def test_options_are_those_of_now_and_are_not_kept(java: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(found(find(java, home)), java, monkeypatch)
    changed = {"spark.driver.memory": "3g", "spark.driver.extraJavaOptions": "-Dmine=1"}
    kept = found(find(java, home, **changed))
    expected = [str(java), "-cp", "jars/*", "-Xmx3g", "-XX:+UseSerialGC", "-Dmine=1", "--add-opens=a", MAIN_CLASS]
    assert kept.command([]) == expected
    assert all(b"hunter2" not in file.read_bytes() for file in kept.folder.iterdir())
    assert kept.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"spark.driver.extraClassPath": "mine.jar"},
        {"spark.driver.extraLibraryPath": "/opt/lib"},
        {"SPARK_CONF_DIR": "/etc/spark"},
        {"SPARK_SUBMIT_OPTS": "-Dx=1"},
        {"PYSPARK_SUBMIT_ARGS": "--driver-memory 4g pyspark-shell"},
        {"HADOOP_CONF_DIR": "/etc/hadoop"},
    ],
)
def test_nothing_is_kept_of_launches_that_the_launcher_has_to_decide(
    changed: Mapping[str, str], java: Path, home: Path
) -> None:
    assert find(java, home, **changed) is None


@pytest.mark.parametrize("name", ["spark-env.sh", "spark-defaults.conf", "java-opts"])
def test_nothing_is_kept_where_spark_has_files_of_the_users(name: str, java: Path, home: Path) -> None:
    (home / "conf").mkdir()
    (home / "conf" / name).touch()
    assert find(java, home) is None


def test_a_script_that_chooses_a_java_is_not_relied_on(java: Path, home: Path) -> None:
    assert find(java, home, identity="") is None


def test_another_java_and_other_jars_begin_again(java: Path, home: Path) -> None:
    first = found(find(java, home)).folder
    assert found(find(java, home)).folder == first
    assert found(find(java, home, identity="two")).folder != first
    (home / "jars" / "spark.jar").write_bytes(b"other")
    assert found(find(java, home)).folder != first


def test_a_command_line_that_is_not_as_expected_is_not_kept(
    java: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = found(find(java, home))
    learn(kept, java, monkeypatch, memory="2g")
    assert not kept.folder.exists()
    monkeypatch.setattr(kept_launch, "read_arguments", lambda pid: [])
    kept.learn(1)
    assert kept.command([]) is None


def keep_archive(kept: KeptLaunch) -> None:
    made = kept.folder / "made"
    made.write_bytes(b"archive")
    kept.keep_archive(made)


def test_what_others_can_write_is_not_used(java: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = found(find(java, home))
    learn(kept, java, monkeypatch)
    keep_archive(kept)
    kept.folder.chmod(0o777)
    again = found(find(java, home))
    assert again.command([]) is None
    assert again.sharing_options(None) == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"before": [], "after": []}', b'{"before": ["/gone"], "after": []}'])
def test_a_damaged_command_is_not_used(content: bytes, java: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = found(find(java, home))
    learn(kept, java, monkeypatch)
    (kept.folder / "command.json").write_bytes(content)
    assert kept.command([]) is None


@pytest.mark.skipif(os.getuid() == 0, reason="root can write everywhere")
def test_a_read_only_cache_folder_keeps_nothing(java: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = found(find(java, home))
    kept.folder.parent.mkdir(parents=True)
    kept.folder.parent.chmod(0o500)
    learn(kept, java, monkeypatch)
    assert kept.command([]) is None


def test_a_cache_folder_that_is_a_file_keeps_nothing(java: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (java.parent / "cache").write_text("")
    kept = found(find(java, home))
    learn(kept, java, monkeypatch)
    assert kept.command([]) is None
    kept.note_failure()
    kept.forget()


def test_an_archive_is_recorded_then_used_and_not_where_the_user_has_one(java: Path, home: Path) -> None:
    kept = found(find(java, home))
    assert kept.sharing_options(Path("list")) == ["-XX:DumpLoadedClassList=list"]
    kept.prepare()
    keep_archive(kept)
    assert kept.sharing_options(Path("list"))[0] == f"-XX:SharedArchiveFile={kept.archive}"
    assert not kept.wants_archive
    theirs = found(find(java, home, **{"spark.driver.extraJavaOptions": "-XX:SharedArchiveFile=mine.jsa"}))
    assert theirs.sharing_options(Path("list")) == []


EXTRA = "spark.driver.extraJavaOptions"


@pytest.mark.parametrize(
    ("options", "silenced"),
    [
        ({EXTRA: "-Xlog:gc"}, False),
        ({EXTRA: "-verbose:gc"}, False),
        ({EXTRA: "-Xloggc:gc.log"}, False),
        ({"JAVA_TOOL_OPTIONS": "-Da=b -Xlog:gc"}, False),
        ({"JDK_JAVA_OPTIONS": "-Da=b @more"}, False),
        ({"JDK_JAVA_OPTIONS": "-Dmail=a@b"}, True),
    ],
)
def test_jvm_logging_that_the_user_wants_is_not_silenced(
    options: dict[str, str], silenced: bool, java: Path, home: Path
) -> None:
    found(find(java, home)).prepare()
    keep_archive(found(find(java, home)))
    kept = found(find(java, home, **options))
    assert ("-Xlog:disable" in kept.sharing_options(None)) is silenced
    assert kept.uses_archive


@pytest.mark.parametrize("variable", [EXTRA, "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"])
@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("-Xlog:gc*:file=gc.log", False),
        ("-Xlog:gc:gc.log:uptime", False),
        ("-Xloggc:gc.log", False),
        ("-javaagent:agent.jar", False),
        ("-agentlib:jdwp=transport=dt_socket,server=y,address=5005", False),
        ("-agentpath:/opt/agent.so", False),
        ("-Dcom.sun.management.jmxremote.port=9010", False),
        ("-XX:StartFlightRecording=filename=all.jfr", False),
        ("-Xlog:gc:stderr:uptime", True),
        ("-Xlog:gc::uptime", True),
    ],
)
def test_no_archive_is_made_with_options_that_cannot_be_used_twice(
    option: str, wanted: bool, variable: str, java: Path, home: Path
) -> None:
    kept = found(find(java, home, **{variable: f"-Da=b {option}"}))
    assert kept.wants_archive is wanted
    assert bool(kept.sharing_options(Path("list"))) is wanted


def test_the_options_that_use_an_archive_are_not_kept_as_sparks(
    java: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = found(find(java, home))
    kept.prepare()
    keep_archive(kept)
    assert len(kept.sharing_options(None)) > 1
    learn(kept, java, monkeypatch)
    kept.archive.unlink()
    command = found(find(java, home)).command([])
    assert command is not None
    assert command[command.index("-Dtheir password=hunter2") + 1 :] == ["--add-opens=a", MAIN_CLASS]


@pytest.mark.parametrize("damage", ["cut off", "longer", "no size", "a bad size"])
def test_an_archive_of_another_size_than_it_was_made_with_is_not_used_and_made_again(
    damage: str, java: Path, home: Path
) -> None:
    kept = found(find(java, home))
    kept.prepare()
    keep_archive(kept)
    size = kept.folder / "classes.size"
    match damage:
        case "cut off":
            kept.archive.write_bytes(b"arch")
        case "longer":
            kept.archive.write_bytes(b"archives")
        case "no size":
            size.unlink()
        case _:
            size.write_bytes(b"\xff")
    assert kept.sharing_options(Path("list")) == ["-XX:DumpLoadedClassList=list"]
    assert kept.wants_archive


def test_after_a_failure_no_archive_is_tried_for_a_day(java: Path, home: Path) -> None:
    kept = found(find(java, home))
    kept.prepare()
    assert kept.wants_archive
    kept.note_failure()
    assert not kept.wants_archive
    assert kept.sharing_options(Path("list")) == []
    yesterday = time.time() - kept_launch.FAILED_SECONDS - 1
    os.utime(kept.folder / "failed", (yesterday, yesterday))
    assert kept.wants_archive


def test_archives_that_nobody_uses_are_removed(java: Path, home: Path) -> None:
    kept = found(find(java, home))
    old, young = kept.folder.parent / "old", kept.folder.parent / "young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "classes.jsa").write_bytes(b"archive")
    long_ago = time.time() - kept_launch.UNUSED_SECONDS - 1
    os.utime(old, (long_ago, long_ago))
    kept.prepare()
    assert not old.exists()
    assert young.exists()
