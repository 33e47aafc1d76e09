"""Runs a DAG file in this process, and finds the DAGs in it and the files below the folder that it imported.

The file is compiled from its text each time, and nothing is written beside it: a stored compilation could be older than
the text, since it is compared by size and second only.

Invariants: what the file does to `sys.path` and to the warnings stays with it; modules that it imported stay imported;
a hash is that of what was run, or older, so that a file that is saved while it is imported is seen to have changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType

from tidemill.dags.definition import DAG
from tidemill.dags.exceptions import DagError
from tidemill.dags.opened_files import OpenedFiles, Signature
from tidemill.dags.scope import DAG_MODULE, collect_dags


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """What a DAG file holds.

    Attributes:
        dags: By id.
        modules: The files below the folder that it imported, relative to it, with the SHA-256 of their contents; the
            file itself is among them.
        opened: What else it read while it was imported, by its path below the folder, or absolute, with how that
            looked then.
    """

    dags: dict[str, DAG]
    modules: dict[str, str]
    opened: dict[str, Signature]

    @property
    def digest(self) -> str:
        """A hash of all these files: whether the DAGs may be different now."""
        return combine_digests(self.modules)


class ImportedFiles:
    """Finds no module, but hashes those below a folder right before they are imported; for `sys.meta_path`.

    Args:
        folder: The folder, resolved.

    Attributes:
        folder: The folder.
        digests: The SHA-256 of each of them, by path.
        opened: What else is read meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        """Hash nothing yet."""
        self.folder = str(folder)
        self.digests: dict[str, str] = {}
        self.opened = OpenedFiles()

    def list_opened(self, modules: Collection[str]) -> dict[str, Signature]:
        """Return what was read beside modules, with how it looked: by its path below the folder, else absolute."""
        found = {self._shorten(path): signature for path, signature in self.opened.list_signatures().items()}
        return {name: signature for name, signature in found.items() if name not in modules}

    def _shorten(self, path: str) -> str:
        return path.removeprefix(f"{self.folder}/")

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Hash a module that is about to be imported; others say where it is."""
        places = [place for place in (sys.path if path is None else path) if self._is_below(place)]
        # The finder remembers what is in a folder, by the time of its last change.
        found = PathFinder.find_spec(name, places) if places else None
        if found is not None and found.origin is not None and found.has_location:
            self.note(found.origin, _read(Path(found.origin)))
        return None

    def note(self, path: str, content: bytes) -> None:
        """Keep the hash of a file; the first one counts."""
        self.digests.setdefault(path, _digest(content))

    def _is_below(self, place: object) -> bool:
        # The user's code may have put anything there.
        return isinstance(place, str) and (place == self.folder or place.startswith(f"{self.folder}/"))


def load_file(path: Path | str, folder: Path | str, imported: ImportedFiles | None = None) -> LoadedFile:
    """Run a DAG file.

    Args:
        path: The file.
        folder: The folder of DAGs; modules in it can be imported.
        imported: Where the hashes are kept, for one who needs them also if this raises.

    Raises:
        DagError: Two DAGs of the file have the same id, or one is wrong.
        Exception: Whatever the file raises; also `SystemExit`.
    """
    path, folder = locate_file(Path(path), Path(folder))
    imported = imported or ImportedFiles(folder)
    source = path.read_bytes()
    imported.note(str(path), source)
    name = f"{DAG_MODULE}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    before, wrote = list(sys.path), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    sys.modules[name] = module
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, imported)
    try:
        with collect_dags() as opened, imported.opened.watch():
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the user's file
    finally:
        with contextlib.suppress(ValueError):  # the file may have changed the list
            sys.meta_path.remove(imported)
        # The folder stays: tasks import modules as well, when they run.
        sys.path[:] = before if str(folder) in before else [str(folder), *before]
        sys.dont_write_bytecode = wrote
    found = [*opened, *(value for value in vars(module).values() if isinstance(value, DAG))]
    modules = find_imports(path, folder, imported.digests)
    return LoadedFile(_check_dags(found, path), modules, imported.list_opened(modules))


def locate_file(path: Path, folder: Path) -> tuple[Path, Path]:
    """Return a DAG file and its folder, as one import sees them.

    The folder is where its link points to now, and the file is below it, also if a link leads to the file: a folder
    that another process replaces meanwhile (git-sync) is not half the old and half the new one.
    """
    given, resolved = Path(os.path.abspath(path)), folder.resolve()  # noqa: PTH100 - links stay
    for base in (Path(os.path.abspath(folder)), resolved):  # noqa: PTH100
        if given.is_relative_to(base):
            return resolved / given.relative_to(base), resolved
    return given, resolved


def combine_digests(modules: dict[str, str]) -> str:
    """Return one hash of files and theirs."""
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(modules.items()))
    return _digest(text.encode())


def digest_files(folder: Path, names: list[str]) -> str:
    """Return what `LoadedFile.digest` is for these files as they are now; one that is gone counts as empty."""
    return combine_digests({name: digest_file(folder / name) for name in names})


def _check_dags(found: list[DAG], path: Path) -> dict[str, DAG]:
    dags: dict[str, DAG] = {}
    for dag in found:
        if dags.setdefault(dag.dag_id, dag) is not dag:
            raise DagError(f"the file has two DAGs {dag.dag_id!r}; give them different ids")
        dag.fileloc = str(path)
    for dag in dags.values():
        dag.validate()
    return dags


def find_imports(path: Path, folder: Path, known: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return a DAG file and the files below the folder that were imported, with the SHA-256 of their contents.

    Also where reading the file failed: what it imported until then may be the reason.

    Args:
        path: The file.
        folder: The folder.
        known: The hashes that `ImportedFiles` has kept, by path; others are computed.
    """
    path, folder = locate_file(path, folder)
    name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
    found = {name: known.get(str(path)) or digest_file(path)}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Most modules are elsewhere, and paths are slow.
        if not isinstance(file, str) or not file.startswith(f"{folder}/") or name.startswith(DAG_MODULE):
            continue
        place = Path(file)
        if place.is_relative_to(folder) and place != path:
            found[place.relative_to(folder).as_posix()] = known.get(file) or digest_file(place)
    return found


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file as it is now; one that is gone counts as empty."""
    return _digest(_read(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
