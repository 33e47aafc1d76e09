"""The modules of the folder of DAGs, imported in a process that lives longer than they do.

Invariant: what is imported after a file has changed is the changed one; what was created from the old one keeps it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_Mark = tuple[int, int] | None


class FolderCode:
    """The code of a folder.

    Args:
        folder: The folder; it is put on the path of imports.
    """

    def __init__(self, folder: Path) -> None:
        """Import nothing yet."""
        self._folder = folder.resolve()
        if str(self._folder) not in sys.path:
            sys.path.insert(0, str(self._folder))
        self._marks: dict[str, _Mark] = {}

    def forget_changed(self) -> list[str]:
        """Forget all modules of the folder if a file of one has changed, and return the names of those that have.

        All, because modules that have not changed may hold what those that have defined before.
        """
        modules = self._find_modules()
        changed = sorted(name for name, path in modules.items() if self._marks.get(name, _mark(path)) != _mark(path))
        if changed:
            for name in modules:
                sys.modules.pop(name, None)
            self._marks.clear()
            importlib.invalidate_caches()
            log.info("code of triggers has changed; it is imported again", changed=changed)
        for name in self._find_modules().keys() - self._marks.keys():
            self._marks[name] = _mark(modules[name])
        return changed

    def import_modules(self, names: Iterable[str]) -> None:
        """Import modules, on any thread; what fails is told when it is used."""
        importlib.invalidate_caches()
        for name in names:
            _try(lambda name=name: importlib.import_module(name))  # type: ignore[misc]

    def _find_modules(self) -> dict[str, Path]:
        found = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and name != "__main__" and self._folder in (path := Path(file)).parents:
                found[name] = path
        return found


def _mark(path: Path) -> _Mark:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _try(step: Callable[[], object]) -> None:
    try:
        step()
    except (Exception, SystemExit) as error:
        log.debug("a module of triggers cannot be imported", exc_info=error)
