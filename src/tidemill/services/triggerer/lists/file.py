"""Reads the list of triggers that a host runs: a YAML file with `name`, `classpath`, `kwargs` and `restart`.

Invariants: a list is accepted as a whole or not at all; all problems are reported at once, each with its entry; nothing
is imported here.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from tidemill.config.document import ConfigProblem, find_nearest_yaml, read_text, read_yaml
from tidemill.core.errors import ConfigError
from tidemill.core.triggers.lifecycle import Restart
from tidemill.store.records import TriggerSpec

_KEYS = ("name", "classpath", "kwargs", "restart")
_CLASSPATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+\Z")
MAX_NAME_LENGTH = 200
#: Longer values are not repeated in a message.
_MAX_SHOWN = 40


def require_list(path: Path) -> None:
    """Check that the file of a list exists.

    Raises:
        ConfigError: It does not exist, or is a folder.
    """
    if path.is_dir() or not path.exists():
        why = "is a folder" if path.is_dir() else "does not exist"
        near = None if path.is_dir() else find_nearest_yaml(path)
        advice = f"did you mean {near}?" if near else "give the path of its YAML file"
        raise ConfigError(f"the trigger list {path} {why}; {advice}")


def read_entries(path: Path) -> list[tuple[str, TriggerSpec]]:
    """Return the triggers of a file in order, each with the location of its entry, for messages.

    Raises:
        ConfigError: The file cannot be read, or an entry is wrong; one line per problem.
    """
    require_list(path)
    try:
        document = read_yaml(read_text(path), str(path))
    except OSError as error:
        advice = "; check its permissions" if isinstance(error, PermissionError) else ""
        raise ConfigError(f"the trigger list {path} cannot be read: {error.strerror}{advice}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}; save the file as UTF-8") from None
    problems = [str(_count_entry(problem)) for problem in document.problems]
    value = document.value
    if not isinstance(value, list):
        if value == {} and not problems:
            # A file that is being written, or was truncated, must not remove every trigger; `[]` does.
            problems.append(f"{path} is empty; write [] for a list without triggers")
        elif not problems:
            given = _describe(value)
            problems.append(f"{path}: expected a list of triggers, each with name and classpath, got {given}")
        value = []
    entries = []
    seen: dict[str, str] = {}
    for number, entry in enumerate(value):
        location = document.locations.get((number,), str(path))
        spec = _read_entry(f"{location}: entry {number + 1}", entry, problems)
        if spec is None:
            continue
        if spec.name in seen:
            problems.append(
                f"{location}: duplicate name {spec.name!r}; first used at {seen[spec.name]}; give each trigger a name "
                "of its own"
            )
        seen.setdefault(spec.name, location)
        entries.append((f"{location}: entry {number + 1} ({spec.name})", spec))
    if problems:
        raise ConfigError("\n".join(problems))
    return entries


def _count_entry(problem: ConfigProblem) -> ConfigProblem:
    """Number entries from 1 in the path of a problem."""
    number, _, rest = problem.path.partition(".")
    if not number.isdecimal():
        return problem
    return ConfigProblem(problem.location, f"entry {int(number) + 1}" + (f": {rest}" if rest else ""), problem.text)


def _read_entry(where: str, entry: Any, problems: list[str]) -> TriggerSpec | None:
    if not isinstance(entry, dict):
        problems.append(f"{where}: expected a mapping with name and classpath, got {_describe(entry)}")
        return None
    name = entry.get("name")
    if isinstance(name, str) and _is_name(name):
        where = f"{where} ({name})"
    before = len(problems)
    for key in entry:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(_KEYS)}"
            problems.append(f"{where}: unknown key {key!r}; {hint}")
    if not isinstance(name, str) or not _is_name(name):
        problems.append(f"{where}: {_describe_name(name)}")
    classpath = entry.get("classpath")
    if not isinstance(classpath, str) or not _CLASSPATH.match(classpath):
        problems.append(
            f"{where}: classpath is missing; write package.module.Class"
            if classpath is None
            else f"{where}: classpath must be like package.module.Class, got {classpath!r}"
        )
    kwargs = _read_kwargs(where, entry.get("kwargs"), problems)
    restart = entry.get("restart", Restart.ON_FAILURE.value)
    if restart not in list(Restart):
        choices = ", ".join(Restart)  # `off` and `no` are booleans in YAML
        problems.append(f"{where}: restart must be one of {choices}, got {restart!r}")
    if len(problems) > before:
        return None
    return TriggerSpec(str(name), str(classpath), kwargs, str(restart))


def _describe_name(name: Any) -> str:
    """Return the problem of an invalid name."""
    if name is None:
        return "name is missing; give the trigger a name of its own"
    shown = _describe(name) if not isinstance(name, str) or len(name) <= _MAX_SHOWN else f"{len(name)} characters"
    return f"name must be 1 to {MAX_NAME_LENGTH} printable characters, not only spaces; got {shown}"


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_LENGTH and text.isprintable() and not text.isspace()


def _read_kwargs(where: str, value: Any, problems: list[str]) -> str:
    if value is None:
        return "{}"
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        problems.append(f"{where}: kwargs must be a mapping of argument names to values, got {_describe(value)}")
        return "{}"
    try:
        return encode_kwargs(value)
    except (TypeError, ValueError) as error:
        advice = "put times and dates in quotes" if isinstance(error, TypeError) else "JSON has no .nan and no .inf"
        problems.append(f"{where}: kwargs cannot be written as JSON: {error}; {advice}")
        return "{}"


def encode_kwargs(kwargs: dict[str, Any]) -> str:
    """Return arguments as JSON text with sorted keys, so that equal arguments have equal texts.

    Raises:
        TypeError: JSON cannot represent a value.
        ValueError: A number is not finite, or a value contains itself.
    """
    return json.dumps(kwargs, sort_keys=True, allow_nan=False)


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value)
