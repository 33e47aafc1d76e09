"""Logging before a command configures it: warnings and errors go to standard error, in the usual format.

structlog's own default prints every entry to standard output, among the results of a command. Importing structlog takes
longer than many commands do, so its default is replaced only once other code imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

_MODULE = "structlog"


def log_to_stderr(configure: Callable[[], None]) -> None:
    """Replace structlog's default in this process, now or as soon as structlog is imported.

    Args:
        configure: Configures the logs; called at the first warning, unless they are configured by then.
    """
    if _MODULE in sys.modules:
        _replace_default(configure)
    else:
        sys.meta_path.insert(0, _ImportWatch(configure))


def is_waiting() -> bool:
    """Return whether the logs are still unconfigured since `log_to_stderr`, and nothing was logged."""
    import structlog

    return structlog.is_configured() and isinstance(structlog.get_config()["processors"][0], _Start)


class _ImportWatch:
    """An import hook that finds structlog once, as Python would, and replaces its default after the import."""

    def __init__(self, configure: Callable[[], None]) -> None:
        self._configure = configure

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                _replace_default(self._configure)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _replace_default(configure: Callable[[], None]) -> None:
    import structlog

    if not structlog.is_configured():
        structlog.configure(
            processors=[_Start(configure)],
            wrapper_class=structlog.make_filtering_bound_logger("warning"),
            logger_factory=_NamedLogger,
        )


class _NamedLogger:
    """Knows the name of the module that logs."""

    def __init__(self, *args: object) -> None:
        self.names = args


class _Start:
    """Configures the logs at the first entry, which saves earlier imports; then logs the entry again."""

    def __init__(self, configure: Callable[[], None]) -> None:
        self._configure = configure

    def __call__(self, logger: _NamedLogger, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        import structlog

        if is_waiting():
            self._configure()
        getattr(structlog.get_logger(*logger.names), method)(event.pop("event", ""), **event)
        raise structlog.DropEvent
