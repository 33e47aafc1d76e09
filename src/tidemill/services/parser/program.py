"""Reads one DAG file in a forked process, whose group is killed at the time limit.

All effects of the file end with this process. Its output is shown to users, but is not part of the result.

Invariant: the result is written last and in one piece, by the requested process and by none of its forks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core.errors import escape_surrogates

#: The length of the prefix that gives the length of the result.
LENGTH_BYTES = 8
#: Longer tracebacks are shortened in the middle.
MAX_ERROR = 64 << 10


class ParseRequest(msgspec.Struct, frozen=True):
    """The file to read.

    Attributes:
        path: The file.
        folder: The folder of DAG files.
        timeout_seconds: After this time the process writes its traceback to the output, because it is about to be
            killed.
    """

    path: str
    folder: str
    timeout_seconds: float = 30.0


class ParseResult(msgspec.Struct, frozen=True):
    """The result of reading a file.

    Attributes:
        modules: The file and its imports below the folder, with the SHA-256 of their contents.
        digest: One hash of all of these.
        structures: Its DAGs as JSON (`dags.structure.structures`).
        error: The traceback if the file failed.
        opened: Other files that it read (paths relative to the folder, or absolute), with their signatures.
        unshared: A description, for users, of results of the import that a forked process would lack; None if there are
            none.
    """

    modules: dict[str, str]
    digest: str
    structures: tuple[bytes, ...] = ()
    error: str | None = None
    opened: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    unshared: str | None = None


def parse(request: bytes, fds: list[int]) -> int:
    """Read a file in this process; called in a fork of a zygote.

    Args:
        request: A `ParseRequest` as msgpack.
        fds: The descriptors for the result and for the output of the file.
    """
    result_fd, output_fd = fds
    pid = os.getpid()
    asked = msgspec.msgpack.decode(request, type=ParseRequest)
    for standard in (1, 2):
        os.dup2(output_fd, standard)
    for fd in fds:
        os.set_inheritable(fd, False)
    faulthandler.dump_traceback_later(asked.timeout_seconds, file=output_fd)
    result = parse_file(Path(asked.path), Path(asked.folder))
    if os.getpid() != pid:
        os._exit(0)  # the file forked, and this is the child
    faulthandler.cancel_dump_traceback_later()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the file closed the stream
            continue
    text = msgspec.msgpack.encode(result)
    _write(result_fd, len(text).to_bytes(LENGTH_BYTES) + text)
    # A normal exit would wait for threads of the file.
    os._exit(0)


def parse_file(path: Path, folder: Path) -> ParseResult:
    """Load a DAG file in this process; returns its DAGs or the traceback."""
    # Imported here, so that a zygote that preloads this module imports no more than its own list.
    from tidemill.dags.loading import ImportedFiles, combine_digests, find_imports, load_file
    from tidemill.dags.structure.building import serialize_dag
    from tidemill.services.parser.thread_watch import ThreadWatch
    from tidemill.services.worker.task.residue import explain_unshareable, list_unshareable

    error: str | None = None
    structures: tuple[bytes, ...] = ()
    unshared = ""
    imported = ImportedFiles(folder.resolve())
    before = list_unshareable()
    try:
        with ThreadWatch() as threads:
            loaded = load_file(path, folder, imported)
        unshared = explain_unshareable(before)
        if unshared and threads.cause:
            unshared = f"{unshared}, since it imports {threads.cause}"
        structures = tuple(serialize_dag(loaded.dags[dag_id]) for dag_id in sorted(loaded.dags))
    except BaseException as raised:
        error = describe_failure(raised)
    modules = find_imports(path, folder, imported.digests)
    opened = imported.list_opened(modules)
    return ParseResult(modules, combine_digests(modules), structures, error, opened, unshared or None)


def describe_failure(error: BaseException) -> str:
    """Return the traceback of an error of a file, starting in the file."""
    # Imported here for the same reason as above.
    from tidemill.dags.file_errors import find_hint, find_location

    if isinstance(error, SystemExit):
        error = RuntimeError(f"the file called sys.exit({error.code!r})").with_traceback(error.__traceback__)
    try:
        frames = error.__traceback__
        while frames is not None and not _is_users(frames):
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        text += find_location(error) + find_hint(error)  # lists show the last line
    except Exception:
        return f"{type(error).__name__}: its text cannot be read"
    # Databases reject NUL and text that is not Unicode.
    text = escape_surrogates(text).replace("\0", "\\x00")
    return text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR // 2]}\n...\n{text[-MAX_ERROR // 2 :]}"


def _is_users(frame: Any) -> bool:
    name = str(frame.tb_frame.f_globals.get("__name__", ""))
    return not name.startswith("tidemill.") and not name.startswith("importlib")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
