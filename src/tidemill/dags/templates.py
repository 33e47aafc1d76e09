"""Renders the arguments of a task that are templates, just before it runs.

Texts are templates; outputs of other tasks are replaced by their values; lists, tuples, sets and dicts are searched for
both. A text without a mark of a template is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.nativetypes
import jinja2.runtime
import jinja2.utils

from tidemill.dags.group import GroupOutput
from tidemill.dags.lazy_context import LEFT_OUT
from tidemill.dags.xcom_arg import RunValue

_MARKS: Final = ("{{", "{%", "{#")
#: The name under which a template has the context of the task; not one that a template can write.
_CONTEXT: Final = "the context of the task"


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that is not rendered. `value`: the value."""

    value: Any


def literal(value: Any) -> Literal:
    """Return a value that is passed to the task as it is, even if it looks like a template."""
    return Literal(value)


class _TemplateContext(jinja2.runtime.Context):
    """The names of a template, with those of the task's context that are asked for only where they are used."""

    def resolve_or_missing(self, key: str) -> Any:
        found = super().resolve_or_missing(key)
        known = self.parent.get(_CONTEXT)
        if found is jinja2.utils.missing and known is not None and (key in known or key in LEFT_OUT):
            return known[key]
        return found


def build_environment(dag: Any) -> jinja2.Environment:
    """Return the environment in which the templates of a DAG are rendered."""
    folders = [*dag.template_searchpath, *([str(Path(dag.fileloc).parent)] if dag.fileloc else [])]
    kind = jinja2.nativetypes.NativeEnvironment if dag.render_template_as_native_obj else jinja2.Environment
    # What is rendered are commands and texts, not pages: nothing is escaped.
    environment = kind(loader=jinja2.FileSystemLoader(folders), undefined=jinja2.StrictUndefined, cache_size=0)
    environment.context_class = _TemplateContext
    environment.globals.update(dag.user_defined_macros)
    environment.filters.update(_FILTERS)
    environment.filters.update(dag.user_defined_filters)
    return environment


class Renderer:
    """Renders values in a context.

    Args:
        build: Returns the environment for templates; it takes a while, and most tasks have none.
        context: What they can use.
        extensions: Texts with these endings are names of files that contain the template.
    """

    def __init__(
        self, build: Callable[[], jinja2.Environment], context: Mapping[str, Any], extensions: Sequence[str] = ()
    ) -> None:
        """Keep them."""
        self._build = build
        self._context = context
        self._extensions = tuple(extensions)

    @cached_property
    def _environment(self) -> jinja2.Environment:
        return self._build()

    def render(self, value: Any) -> Any:
        """Return a value with everything in it rendered.

        Raises:
            jinja2.TemplateError: A template is wrong, or uses a name that does not exist.
        """
        if isinstance(value, str):
            return self._render_text(value)
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
        if not any(mark in text for mark in _MARKS):
            return text
        return self._environment.from_string(text).render(self._context, **{_CONTEXT: self._context})


def render_copy(owner: Any, fields: Sequence[str], renderer: Renderer) -> Any:
    """Return a shallow copy of an object with its fields rendered; the object itself if nothing in them is a template.

    Raises:
        ValueError: One of them cannot be rendered; the message names it, and the cause is chained.
    """
    rendered = render_fields(owner, fields, renderer)
    if not rendered:
        return owner
    changed = copy.copy(owner)
    for field, value in rendered.items():
        setattr(changed, field, value)
    return changed


def render_fields(owner: Any, fields: Sequence[str], renderer: Renderer) -> dict[str, Any]:
    """Return the attributes that are different once they are rendered.

    Raises:
        ValueError: One of them cannot be rendered; the message names it, and the cause is chained.
    """
    found = {}
    for field in fields:
        value = getattr(owner, field)
        try:
            rendered = renderer.render(value)
        except jinja2.TemplateNotFound as error:
            raise ValueError(f"the file {error.name!r} of the template field {field!r} was not found") from error
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


_FILTERS: Final = {
    "ds": _format("%Y-%m-%d"),
    "ds_nodash": _format("%Y%m%d"),
    "ts": _ts,
    "ts_nodash": _format("%Y%m%dT%H%M%S"),
    "ts_nodash_with_tz": _ts_nodash_with_tz,
}
