"""Checks a list of triggers before any of them runs.

What can only be a mistake in the list (no such module, class or argument) is an error of the list as a whole, at the
start and at a reload. What a module or a constructor raises is that trigger's own failure when the list is run: the
others run. `check_list` reports both.
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
    """Let the modules of triggers be found beside their list, and in the current folder."""
    for folder in (str(specs.resolve().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def read_checked(path: Path) -> list[TriggerSpec]:
    """Return the triggers of a file whose classes and arguments exist.

    Raises:
        ConfigError: The file cannot be read, an entry is wrong, or there is no such class or argument; one line per
            problem.
    """
    entries = read_entries(path)
    importlib.invalidate_caches()  # modules may have been added since the start
    _refuse(_find_misspelt(entries))
    return [spec for _, spec in entries]


def check_list(path: Path) -> int:
    """Import and create every trigger of a list, and return how many there are; nothing is run.

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
