"""Looks up the settings that the models allow at a path, and the known key that is nearest to a wrong one."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from tidemill.config.document import Path, format_path
from tidemill.config.settings import Settings

#: Low enough that `file` finds `filesystem`.
_NEAR = 0.55


def find_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation names, or None."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def is_map(annotation: Any) -> bool:
    """Return whether the annotation is a mapping with free keys."""
    return typing.get_origin(annotation) is dict


def takes_text(annotation: Any) -> bool:
    """Return whether a setting takes text, so that a value that looks like a number must stay text."""
    if annotation is str or annotation is Any:
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return takes_text(arguments[0])
    if origin is typing.Literal:
        return all(isinstance(argument, str) for argument in arguments)
    if origin in {types.UnionType, typing.Union}:
        return any(takes_text(argument) for argument in arguments)
    return False


def find_annotation(path: Path, root: Any = Settings) -> Any:
    """Return the annotation at a path, or None if the path is not allowed."""
    annotation = root
    for part in path:
        model = find_model(annotation)
        if model is not None:
            info = model.model_fields.get(str(part))
            annotation = info.annotation if info else None
        elif is_map(annotation):
            annotation = typing.get_args(annotation)[1]
        else:
            return None
    return annotation


def list_keys(path: Path) -> list[str]:
    """Return the keys of the section at a path."""
    model = find_model(find_annotation(path))
    return list(model.model_fields) if model is not None else []


def find_nearest(path: Path) -> str | None:
    """Return the probable meaning of an unknown path: a similar key in the same section, or the same name elsewhere."""
    parent, key = path[:-1], str(path[-1])
    near = difflib.get_close_matches(key.lower(), list_keys(parent), n=1, cutoff=_NEAR)
    if near:
        return format_path((*parent, near[0]))
    elsewhere = [known for known in _list_paths(Settings, ()) if known[-1] == key.lower()]
    return format_path(elsewhere[0]) if elsewhere else None


def _list_paths(model: type[BaseModel], path: Path) -> Iterator[Path]:
    for name, info in model.model_fields.items():
        yield (*path, name)
        inner = find_model(info.annotation)
        if inner is not None:
            yield from _list_paths(inner, (*path, name))
