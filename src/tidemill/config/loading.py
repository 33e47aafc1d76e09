"""Builds the settings from a YAML file, the environment and overrides in code, or reports all errors at once.

The environment overrides the file, and overrides in code win over both; mappings are merged key by key. Nothing here
opens a connection, and no message quotes a secret.
"""

# pydantic-settings cannot do the merging: its sources do not know the lines of a file, match environment names only
# with fields (not with the names of sinks and client properties in the file), and would read TOPIC=123 as a number.

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tidemill.config.document import ConfigProblem, Document, find_nearest_yaml, read_text, read_yaml
from tidemill.config.environment import apply_environment, fill_empty_sections, merge
from tidemill.config.problems import explain
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError

CONFIG_VARIABLE = "TIDEMILL_CONFIG"
#: The maximum number of files to suggest.
MAX_NAMED = 5
#: The warning about a configuration that does not name the topic.
NO_TOPIC = "no kafka.source_topic is configured, so a pipeline reads the topic {topic!r}; name the one you mean"


def load_settings(
    path: Path | str | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings of a file, the environment and overrides.

    Args:
        path: The YAML file; None: the file that TIDEMILL_CONFIG names, or no file.
        environ: Variables `TIDEMILL_SECTION__KEY` override the file.
        overrides: Nested values that override both.

    Raises:
        ConfigError: The configuration is invalid; the message has one line per problem, with its location.

    Example:
        >>> load_settings(None, {"TIDEMILL_KAFKA__SOURCE_TOPIC": "orders"}).kafka.source_topic
        'orders'
    """
    named_by = ""
    if path is None and environ.get(CONFIG_VARIABLE):
        path, named_by = environ[CONFIG_VARIABLE], f" (named by {CONFIG_VARIABLE})"
    document = _read(Path(path), named_by) if path is not None else Document({})
    source = str(path) if path is not None else "the defaults"
    if not isinstance(document.value, dict):
        raise _build_error(
            [ConfigProblem(source, "", "expected sections (kafka, executor, ...) at the top of the file")]
        )
    apply_environment(document, environ)
    merge(document, (), copy.deepcopy(dict(overrides or {})), "set in code")
    try:
        settings = Settings.model_validate(fill_empty_sections(document.value))
    except ValidationError as error:
        problems = [*document.problems, *explain(error, document, source)]
        raise _build_error(problems) from None
    if document.problems:
        raise _build_error(document.problems)
    return settings


def find_source(path: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the absolute path of the file that `load_settings` reads; None if it reads no file.

    Example:
        >>> find_source(None, {"TIDEMILL_CONFIG": "/etc/orders.yaml"})
        PosixPath('/etc/orders.yaml')
    """
    named = path if path is not None else environ.get(CONFIG_VARIABLE)
    return Path(named).absolute() if named else None


def describe_source(path: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Return a description of the source that `load_settings` reads.

    Example:
        >>> describe_source(None, {"TIDEMILL_CONFIG": "orders.yaml"})
        'orders.yaml (named by TIDEMILL_CONFIG)'
    """
    if path is not None:
        return str(path)
    named = environ.get(CONFIG_VARIABLE)
    return f"{named} (named by {CONFIG_VARIABLE})" if named else "defaults and environment variables; no file was given"


def require_letters_named(settings: Settings, path: Path | str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Reject a command on dead letters if nothing but the default topic would select them.

    Args:
        settings: The result of `load_settings`.
        path: The file that it was given.
        environ: The environment variables.

    Raises:
        ConfigError: Neither a file nor a variable names the dead letters.
    """
    named = settings.kafka.model_fields_set & {"source_topic"} or settings.dlq.model_fields_set & {"topic", "path"}
    if path is not None or environ.get(CONFIG_VARIABLE) or named:
        return
    here = sorted(str(found) for found in Path().glob("*.y*ml") if _looks_like_ours(found))[:MAX_NAMED]
    found = f" (this folder has {', '.join(here)})" if here else ""
    raise ConfigError(
        f"no configuration names the dead letters to use; give its file as an argument{found}, or set {CONFIG_VARIABLE}"
    )


def _looks_like_ours(path: Path) -> bool:
    """Return whether a YAML file has one of a pipeline's sections."""
    try:
        value = read_yaml(read_text(path), str(path)).value
    except (OSError, UnicodeDecodeError):
        return False
    return isinstance(value, dict) and bool(value.keys() & {"kafka", "dlq", "sinks"})


def revalidate(settings: Settings, source: str = "on_startup") -> Settings:
    """Validate settings that code has changed, and return them.

    Args:
        settings: The changed settings.
        source: The code that changed them, for messages.

    Raises:
        ConfigError: They are no longer valid.
    """
    values = settings.model_dump(warnings=False)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise _build_error(explain(error, Document(values), source)) from None


def _read(path: Path, named_by: str) -> Document:
    what = f"the configuration file {path}{named_by}"
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist; {_suggest(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not UTF-8 text: {error.reason}; save the file as UTF-8") from None
    except IsADirectoryError:
        raise ConfigError(f"{what} is a folder; give the path of its YAML file") from None
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    document = read_yaml(text, str(path))
    if document.problems and not document.value:
        raise _build_error(document.problems)
    return document


def _suggest(path: Path) -> str:
    near = find_nearest_yaml(path)
    return f"did you mean {near}?" if near else "`tidemill init DIR` creates a project with one"


def _build_error(problems: list[ConfigProblem]) -> ConfigError:
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"the configuration is invalid:{lines}")
