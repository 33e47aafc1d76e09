"""Checks a list of triggers before any of them runs.

A definite mistake in the list (no such module, class or argument) is an error of the whole list, at startup and at a
reload. An error raised by a module or a constructor fails only its trigger when the list runs; the others run.
`check_list` reports both.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tidemill.core.errors import ConfigError
from tidemill.services.triggerer.hosting.loading import (
    MisspeltError,
    TriggerError,
    check_arguments,
    create_trigger,
    find_class,
)
from tidemill.services.triggerer.lists.file import read_entries
from tidemill.store.records import TriggerSpec
from tidemill.triggers.base import BaseTrigger


def add_import_folders(specs: Path) -> None:
    """Make the modules next to a list and in the current folder importable."""
    for folder in (str(specs.resolve().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def read_checked(path: Path) -> list[TriggerSpec]:
    """Return the triggers of a file after checking that their classes and arguments exist.

    Raises:
        ConfigError: The file cannot be read, an entry is wrong, or a class or argument does not exist; one line per
            problem.
    """
    entries = read_entries(path)
    importlib.invalidate_caches()  # modules may have been added since startup
    _refuse(_find_misspelt(entries))
    return [spec for _, spec in entries]


def check_list(path: Path) -> int:
    """Import and create every trigger of a list without running it, and return their number.

    Raises:
        ConfigError: The list cannot be read, or a trigger of it cannot be created; one line per problem.
    """
    add_import_folders(path)
    entries = read_entries(path)
    problems = []
    for location, spec in entries:
        try:
            create_trigger(spec.name, spec.classpath, spec.kwargs)
        except TriggerError as error:
            problems.append(f"{location}: {error}")
    _refuse(problems)
    return len(entries)


def _find_misspelt(entries: Iterable[tuple[str, TriggerSpec]]) -> list[str]:
    classes: dict[str, type[BaseTrigger] | TriggerError] = {}
    problems = []
    for location, spec in entries:
        if spec.classpath not in classes:
            try:
                classes[spec.classpath] = find_class(spec.classpath)
            except TriggerError as error:
                classes[spec.classpath] = error
        found = classes[spec.classpath]
        try:
            if isinstance(found, MisspeltError):
                raise found
            if not isinstance(found, TriggerError):
                check_arguments(found, spec.classpath, json.loads(spec.kwargs))
        except MisspeltError as error:
            problems.append(f"{location}: {error}")
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))
