"""Reads the list of triggers that a host runs: a YAML file of `name`, `classpath`, `kwargs` and `restart`.

Invariants: a list is taken whole or not at all; every problem is named with its entry, all of them at once; nothing is
imported here.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from tidemill.core.errors import ConfigError
from tidemill.core.trigger_life import Restart
from tidemill.store.records import TriggerSpec

_KEYS = ("name", "classpath", "kwargs", "restart")
_CLASSPATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+\Z")
MAX_NAME_LENGTH = 200


def read_specs(path: Path) -> list[TriggerSpec]:
    """Return the triggers of a file, in its order.

    Raises:
        ConfigError: The file cannot be read, or an entry is wrong; one line per problem.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name the file with the list of triggers") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if value is None:
        value = []
    if not isinstance(value, list):
        raise ConfigError(f"{path}: expected a list of triggers, each with name and classpath, not {_kind(value)}")
    problems: list[str] = []
    specs = [spec for number, entry in enumerate(value, 1) if (spec := _entry(number, entry, problems)) is not None]
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            problems.append(f"the name {spec.name!r} is given twice; names tell triggers apart, also after a restart")
        seen.add(spec.name)
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return specs


def _entry(number: int, entry: Any, problems: list[str]) -> TriggerSpec | None:
    if not isinstance(entry, dict):
        problems.append(f"entry {number}: expected name, classpath, kwargs and restart, not {_kind(entry)}")
        return None
    name = entry.get("name")
    where = f"entry {number} ({name})" if isinstance(name, str) else f"entry {number}"
    before = len(problems)
    for key in entry:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KEYS)}"
            problems.append(f"{where}: unknown key {key!r}; {hint}")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        problems.append(f"{where}: name has to be a text of 1 to {MAX_NAME_LENGTH} printable characters")
    classpath = entry.get("classpath")
    if not isinstance(classpath, str) or not _CLASSPATH.match(classpath):
        problems.append(f"{where}: classpath has to be like package.module.Class, not {classpath!r}")
    kwargs = _kwargs(where, entry.get("kwargs"), problems)
    # YAML 1.1 reads a bare `never` as text, but people also write booleans.
    restart = entry.get("restart", Restart.ON_FAILURE.value)
    if restart not in list(Restart):
        choices = ", ".join(Restart)
        problems.append(f"{where}: restart has to be one of {choices}, not {restart!r}")
    if len(problems) > before:
        return None
    return TriggerSpec(str(name), str(classpath), kwargs, str(restart))


def _kwargs(where: str, value: Any, problems: list[str]) -> str:
    if value is None:
        return "{}"
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        problems.append(f"{where}: kwargs has to be a mapping of argument names, not {_kind(value)}")
        return "{}"
    try:
        return kwargs_text(value)
    except (TypeError, ValueError) as error:
        problems.append(f"{where}: kwargs cannot be written as JSON: {error}; put times and dates in quotes")
        return "{}"


def kwargs_text(kwargs: dict[str, Any]) -> str:
    """Return arguments as JSON text with sorted keys, so that equal ones are equal.

    Raises:
        TypeError: A value is nothing that JSON has.
        ValueError: A number is none, or a value holds itself.
    """
    return json.dumps(kwargs, sort_keys=True, allow_nan=False)


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value)
