"""The modules of the folder of DAGs, imported in a process that lives longer than they do.

Invariants: what is imported after a file has changed is the changed one; what was created from the old one keeps it; no
clock is asked, since those of files and of this process may differ.
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
#: Of a file that may have changed while it was imported; no file has it.
_UNSURE: _Mark = (-1, -1)


class FolderCode:
    """The code of a folder.

    Args:
        folder: The folder; it is put on the path of imports.
    """

    def __init__(self, folder: Path) -> None:
        """Import nothing yet."""
        # By its link, if it has one: what that leads to may be replaced.
        self._folder = Path(os.path.abspath(folder))  # noqa: PTH100
        if str(self._folder) not in sys.path:
            sys.path.insert(0, str(self._folder))
        self._marks: dict[str, _Mark] = {}
        #: Files of modules that have been looked at, of this folder or not: there are thousands, and `Path` takes long.
        self._paths: dict[str, Path | None] = {}
        self._imported = _watch_imports(self._folder)

    def forget_changed(self) -> list[str]:
        """Forget all modules of the folder if a file of one has changed, and return the names of those that have.

        All, because modules that have not changed may hold what those that have defined before.
        """
        modules = self._find_modules()
        changed = sorted(name for name, mark in self._marks.items() if name in modules and mark != _mark(modules[name]))
        if changed:
            for name in modules:
                sys.modules.pop(name, None)
            self._marks.clear()
            self._imported.digests.clear()
            importlib.invalidate_caches()
            log.info("code of triggers has changed; it is imported again", changed=changed)
        # What code of triggers has imported by itself.
        self.note_imported()
        return changed

    def note_imported(self) -> None:
        """Note how the files of modules are that have been imported; one that was saved meanwhile counts as changed."""
        for name, path in self._find_modules().items():
            if name not in self._marks:
                mark, known = _mark(path), self._imported.digests.get(str(path))
                self._marks[name] = mark if known in (None, digest_file(path)) else _UNSURE

    def import_modules(self, names: Iterable[str]) -> None:
        """Import modules, on any thread; what fails is told when it is used."""
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
        """Return the path of a file of this folder; None for other files."""
        try:
            return self._paths[file]
        except KeyError:
            path = Path(file)
            return self._paths.setdefault(file, path if self._folder in path.parents else None)


def _watch_imports(folder: Path) -> ImportedFiles:
    """Return what hashes the modules of a folder before they are imported, in this process from now on."""
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
