"""The section `sinks`: one key for each type of the table, and `custom` for sinks of other packages."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, create_model

from tidemill.config.sections.section import Section
from tidemill.config.sink_types import SINK_TYPES, load_class

Named = dict[str, dict[str, Any]]


def _check_custom(value: dict[str, Named]) -> dict[str, Named]:
    for kind, named in value.items():
        if kind in SINK_TYPES:
            raise ValueError(f"{kind} is a built-in type: move it to sinks.{kind}")
        for name, options in named.items():
            if not isinstance(options.get("ui_url", ""), str):
                raise ValueError(f"{kind}.{name}.ui_url: expected a string")  # noqa: TRY004 - pydantic takes only this
    return value


class _Sinks(Section):
    """The sinks, by type and name."""

    if TYPE_CHECKING:
        custom: dict[str, Named]

    def group_by_type(self) -> dict[str, Mapping[str, Any]]:
        """Return the sections by type and name; types without a sink are left out."""
        built_in = {kind: getattr(self, kind) or {} for kind in sorted(SINK_TYPES)}
        return {kind: named for kind, named in {**built_in, **self.custom}.items() if named}

    def is_empty(self) -> bool:
        """Return whether no sink is configured."""
        return not self.group_by_type()


def _build_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for kind in SINK_TYPES.values():
        sections = types.GenericAlias(dict, (str, load_class(kind.settings)))
        fields[kind.name] = (sections, Field(default_factory=dict, description=f"{kind.plural}, by name."))
    custom = Annotated[dict[str, Named], AfterValidator(_check_custom)]
    description = "Sinks of other packages: `custom.<type>.<name>` holds their options, and `ui_url`."
    return {**fields, "custom": (custom, Field(default_factory=dict, description=description))}


if TYPE_CHECKING:

    class SinksSettings(_Sinks):
        """The type checker's view: for each type of sink, sections by name."""

        def __init__(self, **kinds: Mapping[str, Any]) -> None: ...
        def __getattr__(self, kind: str) -> dict[str, Any]: ...
        def __setattr__(self, kind: str, named: Mapping[str, Any]) -> None: ...

else:
    SinksSettings = create_model(
        "SinksSettings", __base__=_Sinks, __module__=__name__, __doc__=_Sinks.__doc__, **_build_fields()
    )
