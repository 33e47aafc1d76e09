"""The archive of the JVM's classes: made once and whole, by a process that never outlives this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import msgspec
import pytest
from tests.until import wait_until

from tidemill.runtime.files.lock import lock_file
from tidemill.runtime.process.table import find_marked
from tidemill.spark.session.archive import ArchiveMaker
from tidemill.spark.session.kept_launch import KeptLaunch

MAKES = 'for arg do case "$arg" in -XX:SharedArchiveFile=*) echo whole > "${arg#*=}";; esac; done\n'
#: As a JVM does: it writes for a while.
HANGS = MAKES + "sleep 1000\n"


def make_kept(folder: Path, work: str) -> KeptLaunch:
    """Make what is kept for a Java that does something else."""
    java = folder / "java"
    java.write_text(f"#!/bin/sh\n{work}")
    java.chmod(0o755)
    kept = KeptLaunch(folder / "cache" / "spark" / "key", "1g", [])
    kept.prepare()
    command = {"before": [str(java), "-cp", "jars"], "after": []}
    (kept.folder / "command.json").write_bytes(msgspec.json.encode(command))
    return kept


def make_classes(folder: Path, count: int = 2_000) -> Path:
    classes = folder / "classes"
    classes.write_text("".join(f"java/lang/C{n}\n" for n in range(count)) + "java/lang/Trunc")
    return classes


def make(kept: KeptLaunch, classes: Path) -> None:
    maker = ArchiveMaker(kept, classes, dict(os.environ))
    maker.start()
    assert maker.wait(60)


def leftovers(kept: KeptLaunch) -> set[str]:
    return {file.name for file in kept.folder.iterdir()} - {"command.json", ".lock"}


def test_it_is_made_once_of_whole_lines(tmp_path: Path) -> None:
    kept = make_kept(
        tmp_path, f"echo run >> {tmp_path}/runs\ncp {tmp_path}/cache/spark/key/new.classes {tmp_path}/seen\n{MAKES}"
    )
    for _ in range(2):
        make(kept, make_classes(tmp_path))
    assert kept.archive.read_text() == "whole\n"
    assert leftovers(kept) == {"classes.jsa", "classes.size"}
    assert kept.has_archive
    assert (tmp_path / "runs").read_text() == "run\n"
    assert "Trunc" not in (tmp_path / "seen").read_text()
    assert "java/lang/C1999\n" in (tmp_path / "seen").read_text()


def test_the_kernel_kills_it_before_anything_else(tmp_path: Path) -> None:
    before = Path("/proc/self/oom_score_adj").read_text()
    make(make_kept(tmp_path, f"cp /proc/self/oom_score_adj {tmp_path}/maker\n{MAKES}"), make_classes(tmp_path))
    assert (tmp_path / "maker").read_text() == "1000\n"
    assert Path("/proc/self/oom_score_adj").read_text() == before


@pytest.mark.parametrize("work", [f"{MAKES}exit 1\n", "exit 0\n"], ids=["a full disk", "nothing"])
def test_one_that_fails_leaves_nothing_and_is_not_tried_again(work: str, tmp_path: Path) -> None:
    kept = make_kept(tmp_path, work)
    make(kept, make_classes(tmp_path))
    assert leftovers(kept) == {"failed"}
    assert not kept.wants_archive


def test_a_short_list_is_not_archived(tmp_path: Path) -> None:
    kept = make_kept(tmp_path, MAKES)
    make(kept, make_classes(tmp_path, 10))
    make(kept, tmp_path / "nowhere")
    assert leftovers(kept) == set()


def test_one_process_makes_it_at_a_time(tmp_path: Path) -> None:
    kept = make_kept(tmp_path, MAKES)
    lock = lock_file(kept.folder / ".lock")
    make(kept, make_classes(tmp_path))
    assert leftovers(kept) == set()
    os.close(lock)


def test_a_folder_that_others_can_write_gets_none(tmp_path: Path) -> None:
    kept = make_kept(tmp_path, MAKES)
    kept.folder.chmod(0o777)
    make(kept, make_classes(tmp_path))
    assert leftovers(kept) == set()


def test_a_stop_kills_it_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"ARCHIVE_TEST={uuid.uuid4().hex}"
    kept = make_kept(tmp_path, HANGS)
    maker = ArchiveMaker(kept, make_classes(tmp_path), {**os.environ, **dict([mark.split("=")])})
    maker.start()
    wait_until(lambda: "new.jsa" in leftovers(kept))
    maker.stop()
    assert maker.wait(60)
    wait_until(lambda: not find_marked(mark))
    assert leftovers(kept) == set()
    assert kept.wants_archive
    maker.stop()


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    mark = f"ARCHIVE_TEST={uuid.uuid4().hex}"
    kept = make_kept(tmp_path, HANGS)
    script = f"""
        import os, sys
        from pathlib import Path
        from tidemill.spark.session.archive import ArchiveMaker
        from tidemill.spark.session.kept_launch import KeptLaunch
        kept = KeptLaunch(Path({str(kept.folder)!r}), "1g", [])
        ArchiveMaker(kept, Path({str(make_classes(tmp_path))!r}), dict(os.environ)).start()
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        env={**os.environ, **dict([mark.split("=")])},
    )
    with process:
        wait_until(lambda: "new.jsa" in leftovers(kept))
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not find_marked(mark))
    assert not kept.archive.exists()
