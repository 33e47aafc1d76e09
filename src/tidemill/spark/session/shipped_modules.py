"""The user's modules in transit to an engine: their source is sent with the handler, and they are imported by name.

An engine imports these modules as the driver did, so objects that cannot be pickled (a lock, a context variable, a
cache) are created again there, and a class has a single identity. The source is that from the time of packing, so an
engine that is replaced while a file is being edited runs the same code as the other engines.

Invariants: modules that this process has imported itself stay, and so do libraries, whose compiled parts cannot be
loaded twice; a user's module from an earlier parcel is always replaced by that of a later one, even if they are equal.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import zlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from pyspark import cloudpickle


class ShippedModule(msgspec.Struct, frozen=True):
    """A module of the user.

    Attributes:
        name: The name under which it is imported.
        file: The path of the file on the driver.
        folders: The search path of a package; None if the module is not a package.
        source: The source, in the encoding of its file; None for a namespace package.
        is_library: Whether it is an installed library, in a folder of the user.
    """

    name: str
    file: str
    folders: list[str] | None
    source: bytes | None
    is_library: bool = False


class Parcel:
    """A pickled handler and its modules; unpickling a parcel returns the handler.

    Args:
        modules: The modules that the engine imports by name, with their source.
        handler: The handler, cloudpickled.
    """

    def __init__(self, modules: Sequence[ShippedModule], handler: bytes) -> None:
        self._modules = zlib.compress(msgspec.msgpack.encode(modules), 1)
        self._handler = handler

    def __reduce__(self) -> Any:
        return open_parcel, (self._modules, self._handler)


def open_parcel(modules: bytes, handler: bytes) -> Any:
    """Make the modules of a parcel importable in this process, and return its handler."""
    decoded = msgspec.msgpack.decode(zlib.decompress(modules), type=list[ShippedModule])
    _FINDER.replace({module.name: module for module in decoded})
    return cloudpickle.loads(handler)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._modules: dict[str, ShippedModule] = {}

    def replace(self, modules: dict[str, ShippedModule]) -> None:
        """Find these modules from now on, except those that this process has imported itself."""
        for name, module in self._modules.items():
            if not module.is_library:
                sys.modules.pop(name, None)
        self._modules = {name: module for name, module in modules.items() if name not in sys.modules}
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (module := self._modules.get(fullname)) is None:
            return None
        if module.source is None:
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = module.folders
            return spec
        return importlib.util.spec_from_file_location(
            fullname, module.file, loader=_choose_loader(module), submodule_search_locations=module.folders
        )


class _Loader(importlib.abc.SourceLoader):
    """Loads a module whose file is missing on this host or has other content."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file = file
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_data(self, path: str | bytes) -> bytes:
        return self._source if path == self._file else Path(str(path)).read_bytes()


def _choose_loader(module: ShippedModule) -> importlib.abc.Loader:
    assert module.source is not None
    try:
        is_here = Path(module.file).read_bytes() == module.source
    except OSError:
        is_here = False
    # Python caches bytecode for files only, so load from the file if it is the same.
    if is_here:
        return importlib.machinery.SourceFileLoader(module.name, module.file)
    return _Loader(module.file, module.source)


_FINDER = _Finder()
