"""The public names of a package, each loaded from its module when it is first used (PEP 562).

Importing the package stays cheap, however much its names need.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping


def load_export(package: str, modules: Mapping[str, Iterable[str]], name: str) -> object:
    """Load a public name, and keep it in the package.

    Args:
        package: The package's `__name__`.
        modules: The names that each module defines; a module of the package itself begins with a dot.
        name: The name that is used.

    Raises:
        AttributeError: The package does not export this name.
    """
    for module, names in modules.items():
        if name in names:
            value = getattr(importlib.import_module(module, package), name)
            setattr(sys.modules[package], name, value)
            return value
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
