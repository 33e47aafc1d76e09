"""Notices when files of the user's code are saved.

Folders are watched instead of files, because editors replace files. Each folder is watched without its subfolders, so
that a folder full of results costs nothing. The content decides: a file that is written again unchanged is no change.
"""

from __future__ import annotations

import collections
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

#: Files that are saved within this time of each other are one change.
SETTLE_MS = 50
#: The longest time over which changes are collected.
COLLECT_MS = 400
#: The maximum number of folders to search. A project has fewer; a home folder or one full of results has more.
MAX_FOLDERS = 1_000
#: Names of folders with packages, builds and output in projects.
_SKIPPED = ("__pycache__", "node_modules", "site-packages", "build", "dist", "output", "demo-output")


def find_code_folders(root: Path) -> set[Path]:
    """Return the folders of a project that contain Python files, including its own.

    Virtual environments, hidden folders and those that `init` makes Git ignore are skipped. If there are very many
    folders, the deepest are not searched.
    """
    found = {root}
    waiting = collections.deque([root])
    for _ in range(MAX_FOLDERS):
        if not waiting:
            break
        folder = waiting.popleft()
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue  # the folder was removed, or is private
        if any(entry.name == "pyvenv.cfg" for entry in listed):
            continue
        if any(entry.name.endswith(".py") for entry in listed):
            found.add(folder)
        waiting.extend(Path(entry.path) for entry in listed if _may_have_code(entry))
    return found


def _may_have_code(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.name not in _SKIPPED and entry.is_dir(follow_symlinks=False)


class FirstFiles:
    """The files of a project at the moment before any of them is read; importing this module is cheap.

    Args:
        config: The YAML file; None is the file in TIDEMILL_CONFIG.
    """

    def __init__(self, config: Path | None) -> None:
        """Take the fingerprint."""
        self.root = Path.cwd()
        file = config or (Path(name) if (name := os.environ.get("TIDEMILL_CONFIG")) else None)
        self.others = [] if file is None else [file]
        folders = find_code_folders(self.root)
        self._saved = SavedFiles(lambda: folders, self.others)
        self.fingerprint = self._saved.fingerprint()

    def have_changed(self) -> bool:
        """Return whether one of the files was saved since then."""
        return self._saved.fingerprint() != self.fingerprint


def is_code(name: str) -> bool:
    """Return whether a file is code of a pipeline, rather than of its tests.

    Example:
        >>> is_code("handler.py"), is_code("test_handler.py"), is_code("results.jsonl")
        (True, False, False)
    """
    if not name.endswith(".py") or name.startswith("."):
        return False
    return not (name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py")


class SavedFiles:
    """The Python files of some folders, and some other files.

    Args:
        list_folders: Returns the folders; called again after each change.
        others: Files that count whatever their names are.
    """

    def __init__(self, list_folders: Callable[[], Iterable[Path]], others: Collection[Path] = ()) -> None:
        self._list_folders = list_folders
        self._others = frozenset(path.resolve() for path in others)
        #: The digest of each file, by the attributes that change when it is written.
        self._digests: dict[tuple[str, int, int, int], bytes] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def fingerprint(self) -> str:
        """Return a digest of the names and contents of all files."""
        with self._lock:
            digests: dict[tuple[str, int, int, int], bytes] = {}
            for path in sorted(self._find_files()):
                try:
                    stat = path.stat()
                    key = (str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size)
                    known = self._digests.get(key)
                    digests[key] = known or hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
                except OSError:
                    continue  # it was removed or replaced a moment ago; another change follows
            self._digests = digests
            whole = hashlib.blake2b(digest_size=16)
            for (name, *_), digest in digests.items():
                whole.update(os.fsencode(name) + b"\0" + digest)
            return whole.hexdigest()

    def _find_files(self) -> set[Path]:
        found = {path for path in self._others if path.is_file()}
        for folder in self._list_folders():
            try:
                found.update(Path(entry.path) for entry in os.scandir(folder) if is_code(entry.name))
            except OSError:
                continue
        return found

    def watch(self, on_saved: Callable[[], None]) -> None:
        """Call a function, in a thread of its own, after files were saved, until `close`."""
        threading.Thread(target=self._watch, args=(on_saved,), name="tidemill-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching, without waiting for the thread."""
        self._ended.set()

    def _watch(self, on_saved: Callable[[], None]) -> None:
        poll = False
        while not self._ended.is_set():
            try:
                self._watch_folders(on_saved, poll=poll)
            except Exception as error:
                if poll:
                    log.warning("files are no longer watched; restart to load changes", error=str(error))
                    return
                log.warning("the system cannot watch files; polling them instead", error=str(error))
                poll = True

    def _watch_folders(self, on_saved: Callable[[], None], *, poll: bool) -> None:
        """Watch until the set of folders changes."""
        import watchfiles

        folders = self._watched()
        changes = watchfiles.watch(
            *sorted(folders),
            watch_filter=lambda _, path: is_code(Path(path).name) or Path(path) in self._others,
            step=SETTLE_MS,
            debounce=COLLECT_MS,
            stop_event=self._ended,
            rust_timeout=1_000,
            yield_on_timeout=True,
            recursive=False,
            raise_interrupt=False,
            force_polling=poll or None,
        )
        # The system watches these folders only once the first changes are waited for, so files saved before are found
        # by their content.
        on_saved()
        first = True
        for changed in changes:
            if changed or first:
                on_saved()
            first = False
            if self._watched() != folders:
                return

    def _watched(self) -> set[Path]:
        wanted = {*self._list_folders(), *(path.parent for path in self._others)}
        return {folder for folder in wanted if folder.is_dir()}
