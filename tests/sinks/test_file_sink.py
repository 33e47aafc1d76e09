"""The file sink against a real file system, real processes and real limits of the kernel."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests import prepared

from tidemill.config.sections.sink_settings import FilesystemSinkSettings
from tidemill.core.errors import ConfigError, RemoteError, TargetMissingError
from tidemill.sinks import base_folder, file_replacement, files
from tidemill.sinks.base import Sink
from tidemill.sinks.files import FilesystemSink
from tidemill.sinks.payloads import FilePayload
from tidemill.testing.contract import JsonSinkContract, deliver, deliver_through_outbox


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
def test_a_path_that_is_not_a_file_below_the_base_is_refused(tmp_path: Path, path: Any) -> None:
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
        assert "leads outside the base path" in refusal.error
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
    write = file_replacement.write_whole

    def full(descriptor: int, data: bytes) -> None:
        if len(data) > 10:
            raise OSError(number, os.strerror(number))
        write(descriptor, data)

    monkeypatch.setattr(file_replacement, "write_whole", full)
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

    def count_open() -> int:
        places = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return sum(section.startswith(str(tmp_path.resolve())) for section in places)

    for start in (0, 100):
        payloads = [FilePayload(path=f"{start + n}.jsonl", data=n) for n in range(100)]
        assert list(await deliver(sink, payloads)) == [None] * 100
    assert count_open() == files.MAX_OPEN_FILES + 1, "and the base path"
    await sink.close()
    assert count_open() == 0
    assert len(list(tmp_path.iterdir())) == 200


async def test_many_different_paths_need_bounded_memory(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    for number in range(files.MAX_KNOWN_PATHS + 10):
        sink.encode(FilePayload(path=f"{number}.jsonl", data=0))
    assert len(sink._known) == 10


async def test_a_file_locked_by_another_process_is_retried_later(tmp_path: Path) -> None:
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


async def test_closing_waits_for_the_write_in_progress(tmp_path: Path) -> None:
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


# -- locks, links and the base path ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTDIR, errno.ENOENT])
async def test_no_lock_outlives_a_file_that_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sink = make_sink(tmp_path)
    await sink.connect()
    assert list(await deliver(sink, [FilePayload(path="a.jsonl", data=1)])) == [None]
    real, failures = os.stat, [number]

    def stat(path: Any, **options: Any) -> Any:
        if not options and os.fsencode(path).endswith(b"a.jsonl") and failures:
            raise OSError(failures.pop(), "cannot be looked at")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    try:
        (answer,) = await deliver(sink, [FilePayload(path="a.jsonl", data=2), FilePayload(path="b.jsonl", data=1)][:1])
    except RemoteError as error:
        assert error.retryable  # noqa: PT017
    else:
        assert answer is None or answer.retryable
    with (tmp_path / "a.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    await sink.close()


async def test_a_folder_that_becomes_a_link_between_check_and_open_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, outside = tmp_path / "base", tmp_path / "outside"
    (base / "folder" / "deep").mkdir(parents=True)
    (outside / "deep").mkdir(parents=True)
    sink = make_sink(base)
    await sink.connect()
    look = base_folder._is_link

    def look_and_swap(name: bytes, folder: int) -> bool:
        found = look(name, folder)
        if name == os.fsencode(swap[0]) and not (base / swap[0]).is_symlink():
            (base / swap[0]).rename(tmp_path / f"was-{swap[0]}")
            (base / swap[0]).symlink_to(outside)
        return found

    swap = [""]

    monkeypatch.setattr(base_folder, "_is_link", look_and_swap)
    for op, path in (("append", "folder/deep/x"), ("replace", "other/x")):
        swap[0] = path.partition("/")[0]
        (base / "other").mkdir(exist_ok=True)
        (refusal,) = await deliver(sink, [FilePayload(path=path, data="x", op=op)])  # type: ignore[arg-type]
        assert refusal is not None
    (base / "file").write_text("")
    (outside / "file").write_text("untouched")
    swap[0] = "file"
    (refusal,) = await deliver(sink, [FilePayload(path="file", data="x")])
    await sink.close()
    assert refusal is not None
    assert sorted(str(path.relative_to(outside)) for path in outside.rglob("*")) == ["deep", "file"]
    assert (outside / "file").read_text() == "untouched"


@pytest.mark.parametrize("op", ["append", "replace"])
async def test_somebody_who_swaps_a_folder_for_a_link_all_the_time_gets_nothing_out(tmp_path: Path, op: Any) -> None:
    base, outside = tmp_path / "base", tmp_path / "outside"
    (base / "folder").mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "link").symlink_to(outside)
    swapper = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import ctypes, sys\nlibc = ctypes.CDLL(None)\nprint(flush=True)\n"
            "while not libc.renameat2(-100, sys.argv[1].encode(), -100, sys.argv[2].encode(), 2): pass",  # exchange
            *(str(path) for path in (base / "folder", tmp_path / "link")),
        ],
        stdout=subprocess.PIPE,
    )
    assert swapper.stdout is not None
    swapper.stdout.readline()
    sink = make_sink(base)
    await sink.connect()
    written = 0
    try:
        for number in range(100):
            batch = [FilePayload(path=f"folder/{number}-{n}", data=1, op=op) for n in range(100)]
            written += list(await deliver(sink, batch)).count(None)
    finally:
        swapper.kill()
        swapper.communicate()
    await sink.close()
    assert list(outside.iterdir()) == []
    assert 0 < written < 10_000, "the race took place"


async def test_links_that_stay_below_the_base_are_followed_and_loops_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "relative").symlink_to("a/b")
    (tmp_path / "a" / "b" / "up").symlink_to("../../a")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "new.jsonl").symlink_to("a/made.jsonl")
    (tmp_path / "self").symlink_to(".")
    sink = make_sink(tmp_path)
    await sink.connect()
    paths = ("relative/x", "relative/up/b/x", "new.jsonl", "loop/x", "loop", "self")
    answers = await deliver(sink, [FilePayload(path=path, data=1) for path in paths])
    await sink.close()
    assert [None if answer is None else answer.retryable for answer in answers] == [None] * 3 + [False] * 3
    assert (tmp_path / "a/b/x").read_text() == "1\n1\n"
    assert (tmp_path / "a/made.jsonl").read_text() == "1\n"


async def test_a_path_of_bytes_that_are_not_utf8_is_the_file_of_that_name(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    sink = make_sink(tmp_path)
    await sink.connect()
    assert list(await deliver(sink, [FilePayload(path=name, data=1)])) == [None]
    await sink.close()
    assert os.listdir(os.fsencode(tmp_path)) == [b"caf\xe9.jsonl"]
    for bad in ("\ud800.jsonl", "x/" * 3000 + "y"):
        with pytest.raises(ValueError, match=r"surrogates not allowed|at most 4095"):
            sink.encode(FilePayload(path=bad, data=1))


@pytest.mark.parametrize("becomes", ["a file", "nothing", "a link"])
@pytest.mark.parametrize("op", ["append", "replace"])
async def test_a_base_path_that_is_no_longer_a_folder_holds_everything_and_says_so(
    tmp_path: Path, becomes: str, op: Any
) -> None:
    base, moved = tmp_path / "base", tmp_path / "moved"
    sink = make_sink(base)
    await sink.connect()
    payloads = [FilePayload(path=f"{n % 3}/a.jsonl", data=str(n), op=op) for n in range(6)]
    assert list(await deliver(sink, payloads)) == [None] * 6
    before = (base / "0/a.jsonl").read_text()
    base.rename(moved)
    if becomes == "a file":
        base.write_text("x")
    elif becomes == "a link":
        base.symlink_to(moved)
    for _ in range(2):
        with pytest.raises(
            TargetMissingError, match=r"base_path '.*base' is no longer a folder .*writing resumes"
        ) as caught:
            await deliver(sink, payloads)
        assert caught.value.retryable
    if becomes != "nothing":
        base.unlink()
    base.mkdir()
    assert list(await deliver(sink, payloads)) == [None] * 6
    await sink.close()
    assert (base / "0/a.jsonl").read_text() == before
    assert (moved / "0/a.jsonl").read_text() == before, "nothing went to the folder that was moved away"


async def test_a_base_path_that_vanishes_costs_no_letters(tmp_path: Path) -> None:
    base = tmp_path / "base"
    sink = make_sink(base)
    sent = sink.send
    calls = 0

    async def send(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            base.rmdir()
            base.write_text("in the way")
        if calls == 4:
            base.unlink()
            base.mkdir()
        return await sent(batch)

    sink.send = send  # type: ignore[method-assign]
    payloads = [FilePayload(path=f"{n}.jsonl", data=n) for n in range(50)]
    # Not even after the time in which a payload is tried.
    limits = {"max_seconds": 0.001, "breaker": {"failures": 1, "when_open": "dlq"}}
    assert await deliver_through_outbox(sink, payloads, **limits) == []
    assert len(list(base.iterdir())) == 50


# -- whole files ----------------------------------------------------------------------------------------------------


async def test_a_whole_file_is_text_bytes_or_json(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, fsync=True)
    await sink.connect()
    contents = {"t.txt": "caf\u00e9\nx", "b.bin": b"\x00\xff\n", "sub/j.json": {"n": 1}, "empty": ""}
    for _ in range(2):
        payloads = [FilePayload(path=path, data=data, op="replace") for path, data in contents.items()]
        assert list(await deliver(sink, payloads)) == [None] * 4
    await sink.close()
    assert (tmp_path / "t.txt").read_bytes() == "caf\u00e9\nx".encode()
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\xff\n"
    assert (tmp_path / "sub/j.json").read_bytes() == b'{"n":1}'
    assert (tmp_path / "empty").read_bytes() == b""
    assert sorted(os.listdir(tmp_path)) == ["b.bin", "empty", "sub", "t.txt"]


async def test_appended_and_replaced_files_have_their_payloads_in_order(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    await sink.connect()

    def write(data: Any, op: Any = "append") -> FilePayload:
        return FilePayload(path="a", data=data, op=op)

    encoded = [sink.encode(each) for each in (write(1), write("new\n", "replace"), write(2), write(3))]
    assert len({item.key for item in encoded}) == 1
    assert list(await sink.send(encoded)) == [None] * 4
    assert (tmp_path / "a").read_text() == "new\n2\n3\n"
    assert list(await deliver(sink, [write(4)])) == [None], "the file that is there now is appended to"
    assert (tmp_path / "a").read_text() == "new\n2\n3\n4\n"
    # As after a crash before the confirmation: the same batch comes again.
    assert list(await sink.send(encoded)) == [None] * 4
    assert (tmp_path / "a").read_text() == "new\n2\n3\n"
    assert list(await deliver(sink, [write("x", "replace"), write("last", "replace")])) == [None] * 2
    assert (tmp_path / "a").read_text() == "last"
    await sink.close()


async def test_what_cannot_be_replaced_is_refused_alone_and_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "kept").write_text("old")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_text("untouched")
    (tmp_path / "link").symlink_to(outside)
    sink = make_sink(tmp_path)
    await sink.connect()
    paths = ("folder", "pipe", "link", "x" * 300, "fine")
    answers = await deliver(sink, [FilePayload(path=path, data="new", op="replace") for path in paths])
    assert [None if answer is None else answer.retryable for answer in answers] == [False] * 4 + [None]
    assert outside.read_text() == "untouched"

    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_replacement, "write_whole", full)
    with pytest.raises(RemoteError, match="No space left"):
        await deliver(sink, [FilePayload(path="kept", data="new", op="replace")])
    await sink.close()
    assert (tmp_path / "kept").read_text() == "old"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(file_replacement.TEMPORARY)]
    with pytest.raises(ValueError, match="use append or replace"):
        sink.encode(FilePayload(path="a", data=1, op="write"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a valid file name"):
        sink.encode(FilePayload(path=".tidemill-1", data=1))


async def test_the_disk_has_content_and_name_before_a_replaced_file_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def note_rename(*args: Any, **options: Any) -> None:
        done.append("rename")
        rename(*args, **options)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    for durable, expected in ((True, ["folder", "file", "rename", "folder"]), (False, ["rename"])):
        done.clear()
        sink = make_sink(tmp_path, fsync=durable)
        await sink.connect()
        path = f"sub-{durable}/a"
        assert list(await deliver(sink, [FilePayload(path=path, data="x", op="replace")])) == [None]
        await sink.close()
        assert done == expected


# -- with processes of their own ------------------------------------------------------------------------------

SETUP = """
import asyncio, json, os, resource, signal, sys
from tidemill.config.sections.sink_settings import FilesystemSinkSettings
from tidemill.sinks.files import FilesystemSink
from tidemill.sinks.payloads import FilePayload

def sink(**options):
    return FilesystemSink("out", FilesystemSinkSettings(base_path=sys.argv[1]), **options)

async def send(sink, *data, path="a.jsonl"):
    return await sink.send([sink.encode(FilePayload(path=path, data=each)) for each in data])
"""


class Script:
    """A process that runs a script, and what it says."""

    def __init__(self, script: str, *arguments: str) -> None:
        read_end, write_end = os.pipe()
        with open(write_end, "wb") as out, open(os.dup(2), "wb") as errors:
            self.process = prepared.start(
                arguments, cwd=Path.cwd(), env=os.environ, code=script, stdout=out, stderr=errors
            )
        self.stdout = open(read_end, "rb")  # noqa: SIM115  # until its end is waited for

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> bytes:
        """Wait for its end; return what it said that was not read."""
        with self.stdout:
            said = self.stdout.read()
        self.process.wait(60)
        return said


def run_script(body: str, base: Path, *arguments: str) -> Script:
    return Script(SETUP + textwrap.dedent(body), str(base), *arguments)


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
    output = process.wait()
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
        writer.wait()
        assert writer.process.returncode == 0
    numbers: dict[str, list[int]] = {}
    for line in (tmp_path / "a.jsonl").read_bytes().splitlines():
        record = json.loads(line)
        numbers.setdefault(record["writer"], []).append(record["n"])
    assert numbers == {str(writer): list(range(2_000)) for writer in range(4)}


def test_a_file_that_is_replaced_is_whole_at_every_moment_and_what_a_kill_leaves_is_removed(tmp_path: Path) -> None:
    body = """
    async def main():
        out = sink()
        await out.connect()
        for number in range(10**9):
            whole = out.encode(FilePayload(path="a", data=str(number % 10) * 500_000, op="replace"))
            assert await out.send([whole]) == [None]
            if number == 0:
                print("ready", flush=True)
    asyncio.run(main())
    """
    writers = [run_script(body, tmp_path) for _ in range(2)]
    for writer in writers:
        assert b"ready\n" in iter(writer.stdout.readline, b"")
    for _ in range(100):
        content = (tmp_path / "a").read_bytes()
        assert content == content[:1] * 500_000
    (tmp_path / ".tidemill-0123456789abcdef").write_text("half")
    for writer in writers:
        writer.kill()
    last = run_script(
        """
        async def main():
            out = sink()
            await out.connect()
            assert await out.send([out.encode(FilePayload(path="a", data="the end", op="replace"))]) == [None]
            await out.close()
        asyncio.run(main())
        """,
        tmp_path,
    )
    last.wait()
    assert last.process.returncode == 0
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "the end"


def test_a_file_that_another_process_took_for_left_over_before_it_was_locked_is_written_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    lock, removed = fcntl.flock, []

    def lock_late(descriptor: int, how: int) -> None:
        if not removed and not how & fcntl.LOCK_NB:
            removed.append(None)
            assert file_replacement.remove_left_over(folder) == 1
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    file_replacement.replace(folder, b"a", b"whole", fsync=False)
    os.close(folder)
    assert removed
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"whole"


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
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        writer.kill()
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
    last.wait()
    assert last.process.returncode == 0
    lines = (tmp_path / "a.jsonl").read_bytes().split(b"\n")
    assert lines[-2:] == [b'"the end"', b""]
    for line in lines[:-2]:
        assert len(json.loads(line)["x"]) == 100_000
