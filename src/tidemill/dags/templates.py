"""Renders the template fields of a task right before it runs.

Strings are templates; outputs of other tasks are replaced by their values; lists, tuples, sets and dicts are searched
for both. A string without template syntax is returned unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jinja2
import jinja2.nativetypes
import jinja2.runtime
import jinja2.utils

from tidemill.dags.attempt.lazy_context import LEFT_OUT
from tidemill.dags.group import GroupOutput
from tidemill.dags.xcom_arg import RunValue

_MARKS: Final = ("{{", "{%", "{#")
#: The name that holds the task's context in a template; template syntax cannot spell it.
_CONTEXT: Final = "the context of the task"


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that is not rendered."""

    value: Any


def literal(value: Any) -> Literal:
    """Return a wrapper that passes a value to the task unrendered, even if it looks like a template."""
    return Literal(value)


def has_marks(text: str) -> bool:
    """Return whether a text has template syntax."""
    return any(mark in text for mark in _MARKS)


class _TemplateContext(jinja2.runtime.Context):
    """The names of a template; names of the task's context are looked up only when the template uses them."""

    def resolve_or_missing(self, key: str) -> Any:
        found = super().resolve_or_missing(key)
        known = self.parent.get(_CONTEXT)
        if found is jinja2.utils.missing and known is not None and (key in known or key in LEFT_OUT):
            return known[key]
        return found


def build_environment(dag: Any) -> jinja2.Environment:
    """Return the Jinja environment for the templates of a DAG."""
    folders = [*dag.template_searchpath, *([str(Path(dag.fileloc).parent)] if dag.fileloc else [])]
    kind = jinja2.nativetypes.NativeEnvironment if dag.render_template_as_native_obj else jinja2.Environment
    # Templates render commands and plain text, not HTML, so nothing is escaped.
    environment = kind(loader=jinja2.FileSystemLoader(folders), undefined=jinja2.StrictUndefined, cache_size=0)
    environment.context_class = _TemplateContext
    environment.globals.update(dag.user_defined_macros)
    environment.filters.update(FILTERS)
    environment.filters.update(dag.user_defined_filters)
    return environment


class Renderer:
    """Renders values in a context.

    Args:
        build: Returns the Jinja environment; called only if there is a template, because building it is slow.
        context: The names available to templates.
        extensions: A string that ends in one of these names a file that contains the template.
        texts: Strings by their `id` that are data and no templates.
    """

    def __init__(
        self,
        build: Callable[[], jinja2.Environment],
        context: Mapping[str, Any],
        extensions: Sequence[str] = (),
        texts: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._build = build
        self._context = context
        self._extensions = tuple(extensions)
        self._texts = texts

    @cached_property
    def _environment(self) -> jinja2.Environment:
        return self._build()

    def render(self, value: Any) -> Any:
        """Return a value with everything inside it rendered.

        Raises:
            jinja2.TemplateError: A template is invalid, or uses an undefined name.
        """
        if isinstance(value, str):
            return value if id(value) in self._texts else self._render_text(value)
        if isinstance(value, RunValue):
            return value.resolve(self._context["ti"])
        if isinstance(value, GroupOutput):
            return self.render(value.value)
        if isinstance(value, Literal):
            return value.value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.render(item) for item in value))
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self.render(item) for item in value)
        if isinstance(value, dict):
            return {self.render(key): self.render(item) for key, item in value.items()}
        fields = getattr(value, "template_fields", ())
        if fields and not isinstance(value, type):
            return render_copy(value, fields, self)
        return value

    def _render_text(self, text: str) -> Any:
        if self._extensions and text.endswith(self._extensions):
            return self._environment.get_template(text).render(self._context, **{_CONTEXT: self._context})
        if not has_marks(text):
            return text
        return self._environment.from_string(text).render(self._context, **{_CONTEXT: self._context})


def find_texts(value: Any) -> dict[int, str]:
    """Return the strings in a value, at any depth of lists, tuples, sets and dicts, by their `id`."""
    if isinstance(value, str):
        return {id(value): value}
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, list | tuple | set | frozenset):
        return {}
    found: dict[int, str] = {}
    for item in value:
        found |= find_texts(item)
    return found


def render_copy(owner: Any, fields: Sequence[str], renderer: Renderer) -> Any:
    """Return a shallow copy of an object with its fields rendered, or the object itself if nothing changed.

    Raises:
        ValueError: A field cannot be rendered; the message names the field, and the cause is chained.
    """
    rendered = render_fields(owner, fields, renderer)
    if not rendered:
        return owner
    changed = copy.copy(owner)
    for field, value in rendered.items():
        setattr(changed, field, value)
    return changed


def render_fields(owner: Any, fields: Sequence[str], renderer: Renderer) -> dict[str, Any]:
    """Return the attributes that change when they are rendered.

    Raises:
        ValueError: A field cannot be rendered; the message names the field, and the cause is chained.
    """
    found = {}
    for field in fields:
        value = getattr(owner, field)
        try:
            rendered = renderer.render(value)
        except jinja2.TemplateNotFound as error:
            raise ValueError(f"template field {field!r}: the file {error.name!r} does not exist") from error
        except jinja2.TemplateError as error:
            raise ValueError(f"the template field {field!r} cannot be rendered: {error.message}") from error
        if rendered is not value:
            found[field] = rendered
    return found


def _format(pattern: str) -> Any:
    def format_moment(moment: datetime | None) -> str:
        return "" if moment is None else moment.strftime(pattern)

    return format_moment


def _ts(moment: datetime | None) -> str:
    return "" if moment is None else moment.isoformat()


def _ts_nodash_with_tz(moment: datetime | None) -> str:
    return _ts(moment).replace("-", "").replace(":", "")


FILTERS: Final = {
    "ds": _format("%Y-%m-%d"),
    "ds_nodash": _format("%Y%m%d"),
    "ts": _ts,
    "ts_nodash": _format("%Y%m%dT%H%M%S"),
    "ts_nodash_with_tz": _ts_nodash_with_tz,
}
