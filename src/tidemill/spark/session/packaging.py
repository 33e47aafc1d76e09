"""Packs a handler and this package for the engines, and names what cannot be pickled.

The files next to the user's program are sent as source, and the engine imports them by name; the main module is sent by
value. Installed packages, including this one, are imported on the engine's host. So are extension modules of the user,
which an engine finds if its host has the driver's folders, as in local mode.

What counts is how a module was found, not where its file is. A folder below site-packages that was itself added to the
path, as for the demo's example, belongs to the user, because no engine has it on its path.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.resources
import os
import pickle
import site
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle

from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.files.folders import OwnedFolder
from tidemill.spark.session.conf import PACKAGE_ZIP, is_local_context
from tidemill.spark.session.shipped_modules import Parcel, ShippedModule

if TYPE_CHECKING:
    from pyspark import SparkContext

#: Engines have their own copies, wherever the driver's are: spark-submit puts an archive of them on the path.
_SPARK = ("pyspark", "py4j")


def pack_handler(handler: Handler[Any, Any]) -> bytes:
    """Return the handler, pickled with all its code that engines do not have.

    Raises:
        HandlerError: Something in the handler cannot be pickled; the message names it and says what to do.
    """
    try:
        packed: bytes = cloudpickle.dumps(handler)
    except Exception as error:
        raise HandlerError(_explain(handler, error)) from error
    try:
        cloudpickle.loads(packed)
    except Exception as error:
        raise HandlerError(
            f"{type(handler).__name__} can be pickled but not unpickled, which every engine must do: "
            f"{type(error).__name__}: {error}"
        ) from error
    return pickle.dumps(Parcel(_collect_modules(), packed))


def list_own_folders() -> list[str]:
    """Return the folders from which this process imports, apart from installed packages."""
    folders = [Path(entry or ".").resolve() for entry in sys.path]
    return [str(folder) for folder in folders if folder.is_dir() and folder not in _installed()]


def ship_package(context: SparkContext, folder: Path | None = None) -> None:
    """Send this package to the executors of a cluster, once per context.

    Args:
        context: The Spark context of the cluster.
        folder: A folder for the zip that exists as long as the context; None: one that is removed with this process.
    """
    if is_local_context(context) or PACKAGE_ZIP in (context._python_includes or ()):
        return
    if folder is None:
        owned = OwnedFolder("tidemill-zip-")
        atexit.register(owned.cleanup)
        folder = owned.path
    context.addPyFile(str(_package_zip(folder)))


def find_own_modules() -> list[ModuleType]:
    """Return the user's modules that this process has imported, each once whatever its names; callable from any thread.

    Modules of libraries that `pip install --target` put into a folder of the user are left out.
    """
    return [module for module, is_library in _find_travelling_modules() if not is_library]


def _find_travelling_modules() -> list[tuple[ModuleType, bool]]:
    """Return the modules that an engine may be unable to import, and whether each belongs to a library."""
    folders, resolve = list_own_folders(), _Resolver()
    libraries = tuple(f"{folder}{os.sep}" for folder in folders if next(Path(folder).glob("*.dist-info"), None))
    modules = {id(module): module for module in list(sys.modules.values())}
    return [
        (module, resolve(str(module.__file__)).startswith(libraries))
        for module in modules.values()
        if _is_own(module, folders, resolve)
    ]


def _collect_modules() -> list[ShippedModule]:
    """Return the source of the user's modules, and the namespace packages that contain them."""
    shipped = {}
    for module, is_library in _find_travelling_modules():
        if (source := _read_source(module)) is not None:
            shipped[module.__name__] = ShippedModule(
                module.__name__, str(module.__file__), _find_package_folders(module), source, is_library
            )
        name = module.__name__
        while name := name.rpartition(".")[0]:
            package = sys.modules.get(name)
            folders = None if getattr(package, "__file__", None) else _find_package_folders(package)
            if folders is not None:
                shipped[name] = ShippedModule(name, "", folders, None, is_library)
    return list(shipped.values())


def _find_package_folders(module: ModuleType | None) -> list[str] | None:
    folders = getattr(module, "__path__", None)
    return None if folders is None else list(folders)


def _read_source(module: ModuleType) -> bytes | None:
    """Return the source of a module from a file or an archive; None if it has none, like an extension module."""
    file = str(module.__file__)
    with contextlib.suppress(OSError):
        return Path(file).read_bytes() if file.endswith(".py") else None
    with contextlib.suppress(Exception):  # a loader may raise any exception for a file that it cannot read
        source: str | None = module.__loader__.get_source(module.__name__)  # type: ignore[union-attr]
        return None if source is None else source.encode()
    return None


def _explain(handler: Handler[Any, Any], error: Exception) -> str:
    name = type(handler).__name__
    advice = (
        "handlers are pickled after on_startup and sent to the engines; create what cannot be pickled "
        "(connections, locks, open files, clients) in on_ready, which runs in each engine"
    )
    for owner, values in ((name, vars(handler)), (f"class {name}", _class_values(type(handler)))):
        for attribute, value in values.items():
            try:
                cloudpickle.dumps(value)
            except Exception as reason:
                return (
                    f"the attribute {attribute!r} of {owner} (a {type(value).__qualname__}) cannot be pickled: "
                    f"{reason}; {advice}"
                )
    return f"{name} cannot be pickled: {type(error).__name__}: {error}; {advice}"


def _class_values(cls: type) -> dict[str, Any]:
    """Return the attributes of the class and its bases, without those that every class has."""
    values: dict[str, Any] = {}
    for klass in cls.__mro__:
        if klass not in (Handler, object) and not (klass.__module__ or "").startswith("typing"):
            values = {key: value for key, value in vars(klass).items() if not key.startswith("__")} | values
    return values


class _Resolver:
    """Resolves the links in the paths of many files, each folder once."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        # `Path` would take a tenth of a second for the thousands of modules.
        if os.path.islink(path):  # noqa: PTH114
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        if (resolved := self._folders.get(folder)) is None:
            resolved = self._folders[folder] = os.path.realpath(folder)
        return f"{resolved}{os.sep}{name}"


def _is_own(module: ModuleType, folders: list[str], resolve: Callable[[str], str]) -> bool:
    """Return whether a module is a file of the user rather than one that every process of this Python can import.

    Args:
        module: The module.
        folders: The result of `list_own_folders`.
        resolve: Resolves the links in a path.
    """
    file = getattr(module, "__file__", None)
    name = getattr(module, "__name__", "")
    if not file or not name or name == "__main__" or sys.modules.get(name) is not module:
        return False  # cloudpickle itself sends __main__ by value
    if name.partition(".")[0] in (_package_folder().name, *_SPARK):
        return False
    path = resolve(file)
    if not path.startswith(tuple(f"{folder}{os.sep}" for folder in _installed())):
        return True
    below = [folder for folder in folders if path.startswith(f"{folder}{os.sep}")]
    return any(_module_name(Path(path).relative_to(folder)) == name for folder in below)


def _module_name(path: Path) -> str:
    """Return the name under which a file is imported, from its path relative to a folder of `sys.path`.

    Example:
        >>> _module_name(Path("orders/__init__.py")), _module_name(Path("orders/rules.py"))
        ('orders', 'orders.rules')
    """
    return ".".join([*path.parent.parts, path.name.partition(".")[0]]).removesuffix(".__init__")


@functools.cache
def _installed() -> frozenset[Path]:
    """Return the folders from which every process of this Python imports."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = [path for name in names if (path := sysconfig.get_paths().get(name))]
    paths += [f"{path}/lib-dynload" for path in paths] + site.getsitepackages()
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    return frozenset(Path(path).resolve() for path in paths)


def _package_zip(folder: Path) -> Path:
    """Pack this package for hosts that do not have it; Spark imports from a zip, not from a wheel."""
    root = _package_folder()
    target = folder / PACKAGE_ZIP
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, Path(root.name) / file.relative_to(root))
    return target


@functools.cache
def _package_folder() -> Path:
    return Path(str(importlib.resources.files(__name__.partition(".")[0])))
