"""The effective configuration of a process: every setting with its value, default and source."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from tidemill.config.redaction import redact
from tidemill.config.settings import Settings
from tidemill.web.pipeline.models import Setting

#: Sections that only trigger hosts read.
_HOST_SECTIONS = frozenset({"store", "triggerer"})


def list_settings(
    settings: Settings,
    configured: Settings,
    environ: Mapping[str, str] = os.environ,
    *,
    hidden: Container[str] = _HOST_SECTIONS,
) -> list[Setting]:
    """Return all settings, with secrets masked.

    Args:
        settings: The effective settings.
        configured: The settings as read, before `on_startup`.
        environ: The environment, for `TIDEMILL_SECTION__KEY` overrides.
        hidden: Sections that this process does not read.
    """
    values = redact(settings.model_dump(mode="json", warnings=False))
    before = redact(configured.model_dump(mode="json", warnings=False))
    names = {name.upper() for name in environ}
    found = _walk(configured, values, before, (), names)
    return [setting for setting in found if setting.key.partition(".")[0] not in hidden]


def _walk(
    model: BaseModel, values: Mapping[str, Any], before: Mapping[str, Any], path: tuple[str, ...], names: set[str]
) -> Iterator[Setting]:
    for name, field in type(model).model_fields.items():
        where = (*path, name)
        inner, value = getattr(model, name), values.get(name)
        sections = inner if isinstance(inner, dict) and inner else {}
        if isinstance(inner, BaseModel) and isinstance(value, Mapping):
            yield from _walk(inner, value, before.get(name) or {}, where, names)
        elif sections and all(isinstance(item, BaseModel) for item in sections.values()) and isinstance(value, Mapping):
            for key, item in sections.items():
                yield from _walk(
                    item, value.get(key) or {}, (before.get(name) or {}).get(key) or {}, (*where, key), names
                )
        else:
            default = field.get_default(call_default_factory=True)
            yield Setting(
                key=".".join(where),
                value=_format(value),
                default=None
                if default is PydanticUndefined
                else _format(redact({name: to_jsonable_python(default)})[name]),
                origin=_find_origin(model, name, where, value, before.get(name), names),
                text=field.description or "",
            )


def _find_origin(
    model: BaseModel, name: str, where: tuple[str, ...], value: object, before: object, names: set[str]
) -> str:
    if value != before:
        return "on_startup"
    if f"TIDEMILL_{'__'.join(where)}".upper() in names:
        return "environment"
    return "configured" if name in model.model_fields_set else "default"


def _format(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
