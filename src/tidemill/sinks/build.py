"""Makes the configured sinks; a type's module and its client library are imported only where it is configured.

Sinks of other packages are found by their entry point in the group `tidemill.sinks`, whose name is the type.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from tidemill.config.settings import Settings
from tidemill.config.sink_settings import BUILT_IN_TYPES
from tidemill.core.errors import ConfigError, TidemillError, describe_error
from tidemill.sinks.base import Sink

GROUP = "tidemill.sinks"
#: Module and class by type; the extra that a type needs is called like the type.
_CLASSES: Mapping[str, tuple[str, str]] = {
    "kafka": ("tidemill.sinks.kafka", "KafkaSink"),
    "filesystem": ("tidemill.sinks.files", "FilesystemSink"),
    "postgres": ("tidemill.sinks.postgres", "PostgresSink"),
    "mongo": ("tidemill.sinks.mongo", "MongoSink"),
    "http": ("tidemill.sinks.http", "HttpSink"),
    "redis": ("tidemill.sinks.redis", "RedisSink"),
}


def build_sinks(settings: Settings) -> dict[str, dict[str, Sink]]:
    """Return the configured sinks by type and name; nothing is connected yet.

    Raises:
        ConfigError: A client library is not installed, a type is not known, or its options are wrong.
    """
    return {
        kind: {name: build_sink(settings, kind, name) for name in named}
        for kind, named in settings.sinks.by_type().items()
    }


def build_sink(settings: Settings, kind: str, name: str) -> Sink:
    """Return one configured sink; see `build_sinks`."""
    if kind not in BUILT_IN_TYPES:
        return _custom(kind, name, settings.sinks.custom[kind][name])
    section = getattr(settings.sinks, kind)[name]
    made = _built_in(kind)
    sink: Sink = made(name, section, settings.kafka) if kind == "kafka" else made(name, section)
    return sink


def _built_in(kind: str) -> Callable[..., Sink]:
    module, name = _CLASSES[kind]
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tidemill":
            raise
        raise ConfigError(
            f"sinks.{kind} needs the package {error.name}, which is not installed; run: pip install 'tidemill[{kind}]'"
        ) from None


def _custom(kind: str, name: str, options: Mapping[str, Any]) -> Sink:
    place = f"sinks.custom.{kind}"
    found = importlib.metadata.entry_points(group=GROUP)
    if kind not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise ConfigError(
            f"{place}: no installed package has a sink of this type (entry points of the group {GROUP}: {known}); "
            "install the package that has it, or correct the type"
        )
    try:
        made = found[kind].load()
    except Exception as error:  # an import can raise anything
        raise ConfigError(f"{place}: {found[kind].value} cannot be imported: {describe_error(error)}") from error
    if not (isinstance(made, type) and issubclass(made, Sink)):
        raise ConfigError(f"{place}: {found[kind].value} is no subclass of tidemill.sinks.base.Sink")
    if made.type != kind:
        raise ConfigError(f"{place}: {found[kind].value} calls its type {made.type!r}, not {kind!r}")
    return _made(made, f"{place}.{name}", name, {key: value for key, value in options.items() if key != "ui_url"})


def _made(made: type[Sink], place: str, name: str, options: dict[str, Any]) -> Sink:
    model = made.options_model
    try:
        return made(name, options if model is None else model.model_validate(options))  # type: ignore[call-arg]
    except TidemillError:
        raise
    except pydantic.ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        raise ConfigError(f"{place}: {'; '.join(problems)}") from None
    except Exception as error:
        raise ConfigError(f"{place} cannot be made: {describe_error(error)}") from error
