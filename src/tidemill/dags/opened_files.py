"""Records which files and folders a DAG file opens during its import, with their signatures at that time.

DAGs that are generated from a data file must be parsed again when that file changes, so the parser and the workers
compare these signatures with the current ones. Not recorded are modules of Python and of installed packages, system
files (`/proc`, `/dev`, `/sys`), and files that the DAG file itself writes. Files opened by compiled code are not seen.

Invariant: a signature is taken before the file is read, so a file that changes during the read counts as changed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.util import source_from_cache
from pathlib import Path

#: Modification time, size, inode and change time of a file; empty if it does not exist.
Signature = tuple[int, ...]
#: The number of files that are compared. A DAG file that opens more is also parsed every `dags.reparse_seconds`.
MAX_FILES = 500
_IMPORTER = "importlib._bootstrap_external"
_FOLDER_EVENTS = ("os.listdir", "os.scandir")
#: Modules of Python and of this package, and pseudo files.
_IGNORED = (f"{Path(os.__file__).parent}/", f"{Path(__file__).parent.parent}/", "/proc/", "/sys/", "/dev/")
_PACKAGES = ("/site-packages/", "/dist-packages/")
_CHANGING_EVENTS = ("os.remove", "os.rename", "os.truncate", "os.mkdir", "os.rmdir")


def sign_file(file: Path | str) -> Signature:
    """Return a signature that changes whenever the file does, without reading the file; empty if it does not exist."""
    try:
        stat = os.stat(file)  # noqa: PTH116 - called for each file of each attempt; `Path.stat` is slower
    except (OSError, ValueError):
        return ()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_ctime_ns


class OpenedFiles:
    """Collects the files that are opened while it watches."""

    def __init__(self) -> None:
        self._signatures: dict[str, Signature] = {}
        self._changed: set[str] = set()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record the files that this process opens inside the block."""
        with _AUDIT.notify(self):
            yield

    def list_signatures(self) -> dict[str, Signature]:
        """Return the signatures of the files that were read, by absolute path."""
        written = self._changed | {os.path.dirname(path) for path in self._changed}  # noqa: PTH120
        return {path: signature for path, signature in self._signatures.items() if path not in written}

    def note(self, event: str, arguments: tuple[object, ...]) -> None:
        """Process one event of `sys.audit`."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & os.O_ACCMODE != os.O_RDONLY:
                self._note_changed(path)
            else:
                self._note_read(path)
        elif event in _FOLDER_EVENTS:
            if not _is_importer():
                self._note_read(arguments[0] or ".")
        elif event in _CHANGING_EVENTS:
            for path in arguments[:2] if event == "os.rename" else arguments[:1]:
                self._note_changed(path)

    def _note_read(self, path: object) -> None:
        found = _find_path(path)
        if found is None or _is_ignored(found):
            return
        # Users edit the source; Python rewrites the bytecode whenever it likes.
        if found.endswith(".pyc"):
            with contextlib.suppress(ValueError, NotImplementedError):
                found = source_from_cache(found)
        if found not in self._signatures and len(self._signatures) < MAX_FILES:
            self._signatures[found] = sign_file(found)

    def _note_changed(self, path: object) -> None:
        found = _find_path(path)
        if found is not None:
            self._changed.add(found)


class _Audit:
    """Forwards the events of `sys.audit`. Python cannot remove an audit hook, so the process installs a single one."""

    def __init__(self) -> None:
        self._installed = False
        self._current: OpenedFiles | None = None

    @contextlib.contextmanager
    def notify(self, opened: OpenedFiles) -> Iterator[None]:
        if not self._installed:
            self._installed = True
            sys.addaudithook(self._hook)
        before, self._current = self._current, opened
        try:
            yield
        finally:
            self._current = before

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._current is not None and event.startswith(("open", "os.")):
            self._current.note(event, arguments)


_AUDIT = _Audit()


def _is_ignored(path: str) -> bool:
    if path.startswith(_IGNORED):
        return not path.startswith("/dev/shm/")  # noqa: S108 - files, for those who want them there
    return any(name in path for name in _PACKAGES)


def _find_path(path: object) -> str | None:
    """Return an absolute path; None for a file descriptor or a value that is not a path."""
    if isinstance(path, int):
        return None
    try:
        return os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]  # noqa: PTH100
    except (TypeError, ValueError, OSError):
        return None


def _is_importer() -> bool:
    """Return whether the import system lists the folder to find a module, rather than the file's own code."""
    frame = sys._getframe(3)
    return frame.f_globals.get("__name__") == _IMPORTER or "importlib" in frame.f_code.co_filename
