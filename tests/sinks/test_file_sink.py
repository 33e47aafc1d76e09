"""The file sink against a real file system, real processes and real limits of the kernel."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.settings import FilesystemSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.sinks import files
from tidemill.sinks.base import Sink
from tidemill.sinks.files import FilesystemSink
from tidemill.sinks.payloads import FilePayload
from tidemill.testing.contract import JsonSinkContract, deliver


def make_sink(base: Path, **options: Any) -> FilesystemSink:
    fsync = options.pop("fsync", False)
    return FilesystemSink("out", FilesystemSinkSettings(base_path=str(base), fsync=fsync), **options)


class TestFilesContract(JsonSinkContract):
    @pytest.fixture(autouse=True)
    def _base(self, tmp_path: Path) -> None:
        self.base = tmp_path

    def make(self) -> Sink:
        return make_sink(self.base / "files")

    def make_unusable(self) -> Sink:
        (self.base / "occupied").write_text("a file")
        return make_sink(self.base / "occupied" / "below")

    def payload(self, data: Any, key: str = "k") -> Any:
        return FilePayload(path=f"{key}.jsonl", data=data)

    def bad_payload(self) -> Any:
        return FilePayload(path="a.jsonl", data=b"two\nlines")

    async def received(self, count: int) -> list[bytes]:
        lines = (self.base / "files" / "k.jsonl").read_bytes().split(b"\n")
        assert lines.pop() == b""
        assert len(lines) == count
        return lines


async def test_parents_are_created_and_equal_paths_are_one_file(tmp_path: Path) -> None:
    sink = make_sink(tmp_path / "new" / "base")
    await sink.connect()
    await deliver(sink, [FilePayload(path=path, data=1) for path in ("a/b/c.jsonl", "a//b/./c.jsonl")])
    await sink.close()
    assert (tmp_path / "new/base/a/b/c.jsonl").read_text() == "1\n1\n"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a/..", "", ".", "a/", "a\0b", None])
def test_a_path_that_is_no_file_below_the_base_is_refused(tmp_path: Path, path: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        make_sink(tmp_path).encode(FilePayload(path=path, data=1))


async def test_links_cannot_lead_out_of_the_base(tmp_path: Path) -> None:
    base, outside = tmp_path / "base", tmp_path / "outside"
    base.mkdir()
    outside.mkdir()
    (base / "folder").symlink_to(outside)
    (base / "file.jsonl").symlink_to(outside / "file.jsonl")
    (base / "inside").mkdir()
    (base / "inner").symlink_to(base / "inside")
    sink = make_sink(base)
    await sink.connect()
    paths = ("folder/x.jsonl", "folder/deep/x.jsonl", "file.jsonl", "inner/x.jsonl")
    answers = await deliver(sink, [FilePayload(path=path, data=1) for path in paths])
    await sink.close()
    for refusal in answers[:3]:
        assert refusal is not None
        assert "leads out of the base path" in refusal.error
        assert not refusal.retryable
    assert answers[3] is None
    assert (base / "inside/x.jsonl").read_text() == "1\n"
    assert list(outside.iterdir()) == []


async def test_one_file_that_cannot_be_written_refuses_only_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    sink = make_sink(tmp_path)
    await sink.connect()
    paths = ("ok.jsonl", "folder.jsonl", "pipe.jsonl", "x" * 300, "ok.jsonl")
    answers = await deliver(sink, [FilePayload(path=path, data=1) for path in paths])
    await sink.close()
    assert [answers[0], answers[4]] == [None, None]
    assert [answer.retryable for answer in answers[1:4] if answer is not None] == [False, False, False]
    assert (tmp_path / "ok.jsonl").read_text() == "1\n1\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE])
async def test_where_no_file_can_be_written_the_sink_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The disk is full for all but short texts."""
    write = files._write_whole

    def full(descriptor: int, data: bytes) -> None:
        if len(data) > 10:
            raise OSError(number, os.strerror(number))
        write(descriptor, data)

    monkeypatch.setattr(files, "_write_whole", full)
    sink = make_sink(tmp_path)
    await sink.connect()
    long = "x" * 20
    with pytest.raises(RemoteError, match=rf"sinks\.filesystem\.out: .\.jsonl: {os.strerror(number)}") as caught:
        await deliver(sink, [FilePayload(path=path, data=long) for path in ("a.jsonl", "b.jsonl", "a.jsonl")])
    assert caught.value.retryable
    some = await deliver(sink, [FilePayload(path="a.jsonl", data=long), FilePayload(path="b.jsonl", data=1)])
    assert [None if answer is None else answer.retryable for answer in some] == [True, None]
    (tmp_path / "folder.jsonl").mkdir()
    none = await deliver(sink, [FilePayload(path="a.jsonl", data=long), FilePayload(path="folder.jsonl", data=1)])
    assert [None if answer is None else answer.retryable for answer in none] == [True, False]
    await sink.close()
    assert (tmp_path / "a.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b'{"n":1}\n{"n":2}\n{"n', b'{"n":1}\n{"n":2}\n'),
        (b'{"half', b""),
        (b"whole\n" + b"x" * 200_000, b"whole\n"),
        (b"x" * (2 * 64 * 1024), b""),
        (b"whole\n", b"whole\n"),
    ],
)
async def test_half_a_line_that_a_crash_left_is_cut_off(tmp_path: Path, before: bytes, kept: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(before)
    sink = make_sink(tmp_path)
    await sink.connect()
    assert list(await deliver(sink, [FilePayload(path="a.jsonl", data=3)])) == [None]
    await sink.close()
    assert (tmp_path / "a.jsonl").read_bytes() == kept + b"3\n"


async def test_a_rotated_or_removed_file_is_opened_again(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, fsync=True)
    await sink.connect()
    path = tmp_path / "sub" / "a.jsonl"
    await deliver(sink, [FilePayload(path="sub/a.jsonl", data=1)])
    path.rename(tmp_path / "a.1")
    await deliver(sink, [FilePayload(path="sub/a.jsonl", data=2)])
    path.unlink()
    path.parent.rmdir()
    await deliver(sink, [FilePayload(path="sub/a.jsonl", data=3)])
    await sink.close()
    assert ((tmp_path / "a.1").read_text(), path.read_text()) == ("1\n", "3\n")


async def test_a_limited_number_of_files_stays_open(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    await sink.connect()
    before = len(os.listdir("/proc/self/fd"))
    for start in (0, 100):
        payloads = [FilePayload(path=f"{start + n}.jsonl", data=n) for n in range(100)]
        assert list(await deliver(sink, payloads)) == [None] * 100
    assert len(os.listdir("/proc/self/fd")) - before == files.MAX_OPEN_FILES
    await sink.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(list(tmp_path.iterdir())) == 200


async def test_many_different_paths_need_bounded_memory(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    for number in range(files.MAX_KNOWN_PATHS + 10):
        sink.encode(FilePayload(path=f"{number}.jsonl", data=0))
    assert len(sink._known) == 10


async def test_a_file_locked_by_another_process_is_tried_again_later(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, lock_seconds=0.05)
    await sink.connect()
    with (tmp_path / "a.jsonl").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        (refusal,) = await deliver(sink, [FilePayload(path="a.jsonl", data=1)])
        assert refusal is not None
        assert refusal.retryable
        assert "locked by another process" in refusal.error
        fcntl.flock(other, fcntl.LOCK_UN)
    assert list(await deliver(sink, [FilePayload(path="a.jsonl", data=1)])) == [None]
    await sink.close()


async def test_closing_waits_for_the_write_that_goes_on(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    await sink.connect()
    sending = asyncio.ensure_future(deliver(sink, [FilePayload(path="a.jsonl", data="x" * 1_000_000)] * 20))
    await asyncio.sleep(0)
    await sink.close()
    assert list(await sending) == [None] * 20
    assert (tmp_path / "a.jsonl").stat().st_size == 20 * 1_000_003


async def test_sending_without_a_connection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not connected"):
        await deliver(make_sink(tmp_path), [FilePayload(path="a.jsonl", data=1)])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_base_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="cannot be written"):
        await make_sink(tmp_path).connect()


async def test_a_base_path_that_is_a_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file' is not a folder"):
        await make_sink(tmp_path / "file").connect()


# -- with processes of their own ------------------------------------------------------------------------------

SETUP = """
import asyncio, json, os, resource, signal, sys
from tidemill.config.settings import FilesystemSinkSettings
from tidemill.sinks.files import FilesystemSink
from tidemill.sinks.payloads import FilePayload
from tidemill.testing.contract import JsonSinkContract, deliver

def sink(**options):
    return FilesystemSink("out", FilesystemSinkSettings(base_path=sys.argv[1]), **options)

async def send(sink, *data, path="a.jsonl"):
    return await sink.send([sink.encode(FilePayload(path=path, data=each)) for each in data])
"""


def run_script(body: str, base: Path, *arguments: str) -> subprocess.Popen[bytes]:
    script = SETUP + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", script, str(base), *arguments], stdout=subprocess.PIPE)


def test_what_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    # The kernel's limit on the size of files behaves like a full disk: a part is written, then nothing more.
    process = run_script(
        """
        async def main():
            out = sink()
            await out.connect()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            answers = [await send(out, "first"), await send(out, *["x" * 30] * 10), await send(out, "last")]
            await out.close()
            print(json.dumps([[a and [a.retryable, a.error] for a in each] for each in answers]))
        asyncio.run(main())
        """,
        tmp_path,
    )
    output, _ = process.communicate(timeout=30)
    first, large, last = json.loads(output)
    assert (first, last) == ([None], [None])
    assert large == [[True, "a.jsonl: File too large"]] * 10
    assert (tmp_path / "a.jsonl").read_text() == '"first"\n"last"\n'


def test_several_processes_write_one_file_without_mixing_or_tearing_lines(tmp_path: Path) -> None:
    body = """
    async def main():
        out = sink()
        await out.connect()
        for batch in range(100):
            answers = await send(out, *[{"writer": sys.argv[2], "n": batch * 20 + n, "x": "y" * (n * 50)}
                                        for n in range(20)])
            assert answers == [None] * 20, answers
        await out.close()
    asyncio.run(main())
    """
    writers = [run_script(body, tmp_path, str(number)) for number in range(4)]
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    numbers: dict[str, list[int]] = {}
    for line in (tmp_path / "a.jsonl").read_bytes().splitlines():
        record = json.loads(line)
        numbers.setdefault(record["writer"], []).append(record["n"])
    assert numbers == {str(writer): list(range(2_000)) for writer in range(4)}


def test_a_writer_that_is_killed_leaves_only_whole_lines_to_the_next(tmp_path: Path) -> None:
    body = """
    async def main():
        out = sink()
        await out.connect()
        print("ready", flush=True)
        for number in range(10**9):
            await send(out, *[{"n": number, "x": "y" * 100_000}] * 20)
    asyncio.run(main())
    """
    writers = [run_script(body, tmp_path) for _ in range(4)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=10)
    with (tmp_path / "a.jsonl").open("ab") as torn:
        torn.write(b'{"n":1,"x":"y')
    last = run_script(
        """
        async def main():
            out = sink()
            await out.connect()
            assert await send(out, "the end") == [None]
            await out.close()
        asyncio.run(main())
        """,
        tmp_path,
    )
    last.communicate(timeout=30)
    assert last.returncode == 0
    lines = (tmp_path / "a.jsonl").read_bytes().split(b"\n")
    assert lines[-2:] == [b'"the end"', b""]
    for line in lines[:-2]:
        assert len(json.loads(line)["x"]) == 100_000
