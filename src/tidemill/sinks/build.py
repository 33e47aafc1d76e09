"""Creates the configured sinks. A sink type's module and client library are imported only if it is configured.

Sinks of other packages are found by their entry points in the group `tidemill.sinks`; the entry point's name is the
sink type.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from tidemill.config.settings import Settings
from tidemill.config.sink_types import SINK_TYPES, load_class, name_sink_section
from tidemill.core.errors import ConfigError, TidemillError, describe_error
from tidemill.sinks.base import Sink

GROUP = "tidemill.sinks"


def build_sinks(settings: Settings) -> dict[str, dict[str, Sink]]:
    """Return the configured sinks by type and name, not yet connected.

    Raises:
        ConfigError: A client library is not installed, a type is unknown, or its options are wrong.
    """
    return {
        kind: {name: build_sink(settings, kind, name) for name in named}
        for kind, named in settings.sinks.group_by_type().items()
    }


def build_sink(settings: Settings, kind: str, name: str) -> Sink:
    """Return one configured sink; see `build_sinks`."""
    sink = _build(settings, kind, name)
    sink.non_finite = settings.delivery.non_finite
    return sink


def _build(settings: Settings, kind: str, name: str) -> Sink:
    if kind not in SINK_TYPES:
        return _build_custom(kind, name, settings.sinks.custom[kind][name])
    section = getattr(settings.sinks, kind)[name]
    sink_class = _import_class(kind)
    return sink_class(name, section, settings.kafka) if kind == "kafka" else sink_class(name, section)


def _import_class(kind: str) -> Callable[..., Sink]:
    try:
        return load_class(SINK_TYPES[kind].sink)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tidemill":
            raise
        raise ConfigError(
            f"sinks.{kind} needs the package {error.name}, which is not installed; run: pip install 'tidemill[{kind}]'"
        ) from None


def _build_custom(kind: str, name: str, options: Mapping[str, Any]) -> Sink:
    section = name_sink_section(kind)
    found = importlib.metadata.entry_points(group=GROUP)
    if kind not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise ConfigError(
            f"{section}: no installed package has a sink of this type (entry points of the group {GROUP}: {known}); "
            "install the package that has it, or correct the type"
        )
    try:
        sink_class = found[kind].load()
    except Exception as error:  # an import can raise any exception
        raise ConfigError(f"{section}: {found[kind].value} cannot be imported: {describe_error(error)}") from error
    if not (isinstance(sink_class, type) and issubclass(sink_class, Sink)):
        raise ConfigError(f"{section}: {found[kind].value} is not a subclass of tidemill.sinks.base.Sink")
    if sink_class.type != kind:
        raise ConfigError(f"{section}: {found[kind].value} has the type {sink_class.type!r}, not {kind!r}")
    own = {key: value for key, value in options.items() if key != "ui_url"}
    return _create(sink_class, f"{section}.{name}", name, own)


def _create(sink_class: type[Sink], section: str, name: str, options: dict[str, Any]) -> Sink:
    model = sink_class.options_model
    try:
        return sink_class(name, options if model is None else model.model_validate(options))  # type: ignore[call-arg]
    except TidemillError:
        raise
    except pydantic.ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        raise ConfigError(f"{section}: {'; '.join(problems)}") from None
    except Exception as error:
        raise ConfigError(f"{section} cannot be created: {describe_error(error)}") from error
