"""Overrides from the environment: `TIDEMILL_SECTION__KEY=value`, merged into the values of the file.

Names are matched regardless of case, against the keys of settings and the names that the file uses (of sinks, of client
properties). The value of a string setting is taken literally; any other value is read as YAML, so that numbers, true,
lists and JSON work.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any

from tidemill.config.document import ConfigProblem, Document, Path, format_path, read_yaml
from tidemill.config.introspection import find_annotation, find_model, find_nearest, is_map, list_keys, takes_text
from tidemill.config.settings import Settings

PREFIX = "TIDEMILL_"
#: Variables of tidemill that are not settings.
RESERVED = frozenset({"TIDEMILL_CONFIG", "TIDEMILL_OFFLINE", "TIDEMILL_MAVEN_URL", "TIDEMILL_ENGINE_ID"})


def _to_property_name(name: str) -> str:
    """Return the name of a client property, in which underscores of the variable stand for dots."""
    return name.lower().replace("_", ".")


#: The spelling of a key that is not in the file. In other mappings (of sinks by name) it is in lower case.
_NEW_KEY: Mapping[str, Callable[[str], str]] = {
    "client_config": _to_property_name,
    "conf": _to_property_name,
    "env": str,
}


class UnknownKeyError(LookupError):
    """A variable does not name a setting."""


def apply_environment(document: Document, environ: Mapping[str, str]) -> None:
    """Merge all variables into a document, and add their errors to its problems."""
    names = [name for name in environ if name.startswith(PREFIX) and name not in RESERVED]
    taken: dict[Path, str] = {}
    # A section comes before its keys, so that the more precise name wins.
    for name in sorted(names, key=lambda name: (name.count("__"), name)):
        parts = name.removeprefix(PREFIX).split("__")
        if len(parts) == 1 and parts[0].lower() not in Settings.model_fields:
            if meant := _insert_underscore(name):
                document.problems.append(ConfigProblem(name, "", f"has no effect; did you mean {meant}?"))
            continue
        try:
            path = _resolve(parts, document.value)
        except UnknownKeyError as error:
            document.problems.append(ConfigProblem(name, "", str(error)))
            continue
        if path in taken:
            document.problems.append(ConfigProblem(name, "", f"sets the same key as {taken[path]}; remove one of them"))
            continue
        taken[path] = name
        merge(document, path, _read_value(document, path, name, environ[name]), name)


def merge(document: Document, path: Path, value: Any, location: str) -> None:
    """Merge a value into a document; mappings are merged key by key, any other value replaces the existing one."""
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            merge(document, (*path, key), item, location)
        return
    target = document.value
    for depth, part in enumerate(path[:-1], start=1):
        if target.get(part) is None:
            target[part] = {}
            document.locations[path[:depth]] = location
        target = target[part]
        if not isinstance(target, dict):
            return  # the file has another value in place of a section, which is reported separately
    if not (isinstance(value, Mapping) and target.get(path[-1])):
        target[path[-1]] = value
        document.locations[path] = location


def _insert_underscore(name: str) -> str | None:
    """Return the variable that was probably meant, if only the second underscore is missing."""
    first, _, rest = name.removeprefix(PREFIX).partition("_")
    return f"{PREFIX}{first}__{rest}" if find_annotation((first.lower(), rest.lower())) is not None else None


def _read_value(document: Document, path: Path, name: str, raw: str) -> Any:
    if takes_text(find_annotation(path)):
        return raw
    parsed = read_yaml(raw, name, lines=False)
    document.problems.extend(parsed.problems)
    # An empty variable means None, not an empty section.
    return parsed.value if raw.strip() else None


def _resolve(parts: list[str], values: Any) -> Path:
    path: Path = ()
    for part in parts:
        annotation = find_annotation(path)
        model = find_model(annotation)
        if model is not None:
            keys = [key for key in model.model_fields if key == part.lower()]
            if not keys:
                raise UnknownKeyError(_describe_unknown((*path, part.lower())))
            path = (*path, keys[0])
        elif is_map(annotation) and part:
            path = (*path, _find_map_key(part, str(path[-1]), values))
        else:
            raise UnknownKeyError(f"{format_path(path)} is a value and has no key {part.lower()!r}")
        values = values.get(path[-1]) if isinstance(values, dict) else None
    return path


def _find_map_key(part: str, kind: str, values: Any) -> str:
    existing = [str(key) for key in values] if isinstance(values, dict) else []
    if part in existing:
        return part
    for same in (str.lower, _to_property_name):
        for key in existing:
            if same(key) == same(part):
                return key
    return _NEW_KEY.get(kind, str.lower)(part)


def _describe_unknown(path: Path) -> str:
    near = find_nearest(path)
    if near is None:
        known = ", ".join(list_keys(path[:-1]))
        return f"unknown setting {format_path(path)}; known keys: {known}"
    variable = PREFIX + near.replace(".", "__").upper()
    return f"unknown setting {format_path(path)}; did you mean {variable} ({near})?"


def fill_empty_sections(value: Any, annotation: Any = Settings) -> Any:
    """Return the value with empty mappings for sections without content (`kafka:` with nothing below it)."""
    model = find_model(annotation)
    if model is None and not is_map(annotation):
        return value
    if value is None:
        return {}
    if not isinstance(value, dict):
        return value
    for key, item in value.items():
        inner = find_annotation((key,), annotation) if model is not None else typing.get_args(annotation)[1]
        value[key] = fill_empty_sections(item, inner)
    return value
