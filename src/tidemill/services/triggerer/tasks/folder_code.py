"""Imports the modules of the DAG folder in a process that outlives their versions.

Invariants: an import after a file has changed gets the new code; objects that were created from old code keep it. No
clock is used, because the clocks of the file system and of this process may differ.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from tidemill.dags.loading import ImportedFiles, digest_file

log = structlog.get_logger(__name__)

_Mark = tuple[int, ...] | None
#: The mark of a file that may have changed while it was imported; it equals no file's mark.
_UNSURE: _Mark = (-1, -1)


class FolderCode:
    """The code of a folder.

    Args:
        folder: The folder; it is added to the import path.
    """

    def __init__(self, folder: Path) -> None:
        # Keep symbolic links unresolved, because their targets may be replaced.
        self._folder = Path(os.path.abspath(folder))  # noqa: PTH100
        if str(self._folder) not in sys.path:
            sys.path.insert(0, str(self._folder))
        self._marks: dict[str, _Mark] = {}
        #: Caches the paths of all module files, inside the folder or not: there are thousands, and `Path` is slow.
        self._paths: dict[str, Path | None] = {}
        self._imported = _watch_imports(self._folder)

    def forget_changed(self) -> list[str]:
        """Forget all modules of the folder if the file of any has changed; return the names of the changed modules.

        All are forgotten because unchanged modules may refer to objects of changed ones.
        """
        modules = self._find_modules()
        changed = sorted(name for name, mark in self._marks.items() if name in modules and mark != _mark(modules[name]))
        if changed:
            for name in modules:
                sys.modules.pop(name, None)
            self._marks.clear()
            self._imported.digests.clear()
            importlib.invalidate_caches()
            log.info("the code of triggers has changed; importing it again", changed=changed)
        # Covers modules that the triggers' code has imported by itself.
        self.note_imported()
        return changed

    def note_imported(self) -> None:
        """Store the marks of newly imported modules' files. A file saved during its import counts as changed."""
        for name, path in self._find_modules().items():
            if name not in self._marks:
                mark, known = _mark(path), self._imported.digests.get(str(path))
                self._marks[name] = mark if known in (None, digest_file(path)) else _UNSURE

    def import_modules(self, names: Iterable[str]) -> None:
        """Import modules; callable from any thread.

        Errors are ignored here, and reported when a trigger uses the module.
        """
        importlib.invalidate_caches()
        for name in names:
            _try(lambda name=name: importlib.import_module(name))  # type: ignore[misc]
        self.note_imported()

    def _find_modules(self) -> dict[str, Path]:
        found = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and name != "__main__" and (path := self._find_path(file)) is not None:
                found[name] = path
        return found

    def _find_path(self, file: str) -> Path | None:
        """Return the path of a file of this folder, or None for other files."""
        try:
            return self._paths[file]
        except KeyError:
            path = Path(file)
            return self._paths.setdefault(file, path if self._folder in path.parents else None)


def _watch_imports(folder: Path) -> ImportedFiles:
    """Install and return an import hook that hashes the modules of a folder before this process imports them."""
    found = [finder for finder in sys.meta_path if isinstance(finder, ImportedFiles) and finder.folder == str(folder)]
    if not found:
        found = [ImportedFiles(folder)]
        sys.meta_path.insert(0, found[0])
    return found[0]


def _mark(path: Path) -> _Mark:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _try(step: Callable[[], object]) -> None:
    try:
        step()
    except (Exception, SystemExit) as error:
        log.debug("a module of triggers cannot be imported", exc_info=error)
