"""Helpers for trigger arguments: callables by name, paths, and secrets from environment variables.

Invariant: a secret is looked up when it is used, so no serialized trigger, key or log contains it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from tidemill.config.redaction import redact_text
from tidemill.core.errors import ConfigError


def resolve_environment(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a copy of a mapping in which every `{"env": NAME}` is replaced by the value of that environment variable.

    Raises:
        ConfigError: A variable is not set.

    Example:
        >>> resolve_environment({"user": "me", "password": {"env": "PASSWORD"}}, {"PASSWORD": "hunter2"})
        {'user': 'me', 'password': 'hunter2'}
    """
    return {name: _look_up(name, value, environ) for name, value in values.items()}


def load_callable(classpath: str) -> Callable[..., Any]:
    """Return the function named by `package.module.function` or `package.module:function`.

    Raises:
        ConfigError: The function does not exist, or is not callable.
    """
    module_name, _, name = classpath.replace(":", ".").rpartition(".")
    if not isinstance(classpath, str) or not module_name or not name:
        raise ConfigError(f"{classpath!r} does not name a function; write package.module.function")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{classpath}: the module {error.name!r} is not installed; install it on the triggerer's host"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{classpath}: the module {module_name!r} has no {name!r}; correct the name") from error
    if not callable(found):
        raise ConfigError(f"{classpath} is of type {type(found).__name__}; name a function")
    function: Callable[..., Any] = found
    return function


def check_path(path: str, what: str) -> None:
    """Reject a path at which a file can never appear.

    Args:
        path: The path.
        what: A description of the path's target, for the message.

    Raises:
        ValueError: The path is empty, is a URL, or starts with `~`.
    """
    if not path:
        raise ValueError(f"path is empty; give {what}")
    if "://" in path:
        raise ValueError(f"path {redact_text(path)!r} is a URL; give {what} as a path on the triggerer's host")
    if path == "~" or path.startswith("~/"):
        raise ValueError(f"path {path!r} starts with ~, which only a shell expands; give {what} as a full path")


def _look_up(name: str, value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping) and list(value) == ["env"]:
        variable = value["env"]
        if variable not in environ:
            raise ConfigError(
                f"{name} comes from the environment variable {variable}, which is not set; set it for the triggerer"
            )
        return environ[variable]
    return value
