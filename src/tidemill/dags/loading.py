"""Executes a DAG file in this process, and collects its DAGs and the files of the folder that it imported.

The file is compiled from source each time, and no bytecode is written: cached bytecode is validated only by size and
whole seconds of the modification time, so it could be stale.

Invariants: changes that the file makes to `sys.path` and to the warnings are undone; modules that it imported stay
imported. A hash belongs to the content that was executed or to an older one, so a file that is saved during its import
counts as changed.
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
    """The contents of a DAG file.

    Attributes:
        dags: The DAGs by id.
        modules: The imported files of the folder, including the DAG file, by relative path, with the SHA-256 of their
            contents.
        opened: Other files that were read during the import, by path relative to the folder or absolute, with their
            signatures at that time.
    """

    dags: dict[str, DAG]
    modules: dict[str, str]
    opened: dict[str, Signature]

    @property
    def digest(self) -> str:
        """A hash over all imported files; if it is unchanged, so are the DAGs."""
        return combine_digests(self.modules)


class ImportedFiles:
    """A finder for `sys.meta_path` that finds nothing, but hashes a folder's modules right before their import.

    Args:
        folder: The folder, with links resolved.

    Attributes:
        folder: The folder.
        digests: The SHA-256 of each module, by path.
        opened: Other files that are read during the import.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.digests: dict[str, str] = {}
        self.opened = OpenedFiles()

    def list_opened(self, modules: Collection[str]) -> dict[str, Signature]:
        """Return the signatures of the files that were read besides modules, by relative path or else absolute path."""
        found = {self._shorten(path): signature for path, signature in self.opened.list_signatures().items()}
        return {name: signature for name, signature in found.items() if name not in modules}

    def _shorten(self, path: str) -> str:
        return path.removeprefix(f"{self.folder}/")

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Hash a module that is about to be imported, and leave finding it to the other finders."""
        folders = [entry for entry in (sys.path if path is None else path) if self._is_below(entry)]
        # `PathFinder` caches folder listings by modification time, so this lookup costs little.
        found = PathFinder.find_spec(name, folders) if folders else None
        if found is not None and found.origin is not None and found.has_location:
            self.note(found.origin, _read(Path(found.origin)))
        return None

    def note(self, path: str, content: bytes) -> None:
        """Store the hash of a file; the first hash of a file wins."""
        self.digests.setdefault(path, _digest(content))

    def _is_below(self, path: object) -> bool:
        # User code may have put any object into `sys.path`.
        return isinstance(path, str) and (path == self.folder or path.startswith(f"{self.folder}/"))


def load_file(path: Path | str, folder: Path | str, imported: ImportedFiles | None = None) -> LoadedFile:
    """Execute a DAG file.

    Args:
        path: The file.
        folder: The folder of DAGs; modules in it can be imported.
        imported: Collects the hashes, for callers that need them even if this function raises.

    Raises:
        DagError: Two DAGs of the file have the same id, or a DAG is invalid.
        Exception: Any exception of the file, including `SystemExit`.
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
        # Keep the folder on the path: tasks import modules when they run.
        sys.path[:] = before if str(folder) in before else [str(folder), *before]
        sys.dont_write_bytecode = wrote
    found = [*opened, *(value for value in vars(module).values() if isinstance(value, DAG))]
    modules = find_imports(path, folder, imported.digests)
    return LoadedFile(_check_dags(found, path), modules, imported.list_opened(modules))


def locate_file(path: Path, folder: Path) -> tuple[Path, Path]:
    """Return a DAG file and its folder as a single import sees them.

    The folder's link is resolved once, and the file is located below the result, even if a link leads to the file
    itself. So an import never mixes the old and the new checkout when another process (git-sync) replaces the link.
    """
    given, resolved = Path(os.path.abspath(path)), folder.resolve()  # noqa: PTH100 - links stay
    for base in (Path(os.path.abspath(folder)), resolved):  # noqa: PTH100
        if given.is_relative_to(base):
            return resolved / given.relative_to(base), resolved
    return given, resolved


def combine_digests(modules: dict[str, str]) -> str:
    """Return one hash over all files and their hashes."""
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(modules.items()))
    return _digest(text.encode())


def digest_files(folder: Path, names: list[str]) -> str:
    """Return the value of `LoadedFile.digest` for the current contents of these files; missing files count as empty."""
    return combine_digests({name: digest_file(folder / name) for name in names})


def _check_dags(found: list[DAG], path: Path) -> dict[str, DAG]:
    dags: dict[str, DAG] = {}
    for dag in found:
        if dags.setdefault(dag.dag_id, dag) is not dag:
            raise DagError(_describe_double(dag.dag_id, path))
        dag.fileloc = str(path)
    for dag in dags.values():
        dag.validate()
    return dags


def _describe_double(dag_id: str, path: Path) -> str:
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(path) and not name.startswith(DAG_MODULE):
            return (
                f"the file is also imported, as module {name!r}, which creates its DAG {dag_id!r} again; move what is "
                "imported from it, such as triggers, to a module next to the file"
            )
    return f"the file has two DAGs {dag_id!r}; give them different ids"


def find_imports(path: Path, folder: Path, known: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return a DAG file and the imported files below its folder, with the SHA-256 of their contents.

    This also works after a failed import, whose cause may be one of these files.

    Args:
        path: The file.
        folder: The folder.
        known: The hashes collected by `ImportedFiles`, by path; missing ones are computed.
    """
    path, folder = locate_file(path, folder)
    name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
    found = {name: known.get(str(path)) or digest_file(path)}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Most modules lie elsewhere; compare strings first, because `Path` is slow.
        if not isinstance(file, str) or not file.startswith(f"{folder}/") or name.startswith(DAG_MODULE):
            continue
        found_path = Path(file)
        if found_path.is_relative_to(folder) and found_path != path:
            found[found_path.relative_to(folder).as_posix()] = known.get(file) or digest_file(found_path)
    return found


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's current contents; a missing file counts as empty."""
    return _digest(_read(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
