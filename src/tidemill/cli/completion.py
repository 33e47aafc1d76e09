"""Shell completion of values: kinds and sinks of dead letters, topics, handlers, triggers.

Completion must be fast and must not print: it opens no connections, imports no user code, and suggests nothing after
any error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tidemill.config.settings import Settings

#: Limits for the files that are searched for handlers: their number, the size of each, and the total size.
_MAX_FILES = 200
_MAX_BYTES = 1_000_000
_MAX_TOTAL_BYTES = 4_000_000


def complete_kinds(incomplete: str) -> list[str]:
    """Return the matching kinds of dead letters."""
    from tidemill.deadletters.letter import LetterKind

    return [kind.value for kind in LetterKind if kind.value.startswith(incomplete)]


def complete_sinks(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the matching names of configured sinks, with and without their type."""
    names: list[str] = []
    with contextlib.suppress(Exception):
        for kind, named in _load_settings(ctx).sinks.group_by_type().items():
            names += [*named, *(f"{kind}.{name}" for name in named)]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def complete_targets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the matching targets of a redrive: source, sink, or a configured topic."""
    return [name for name in ("source", "sink", *_list_topics(ctx)) if name.startswith(incomplete)]


def complete_topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the matching configured topics: source, dead letters and sinks."""
    return [name for name in _list_topics(ctx) if name.startswith(incomplete)]


def complete_handlers(incomplete: str) -> list[str]:
    """Return the matching handlers in this folder's files as `module:Class`, found without importing them."""
    found: list[str] = []
    with contextlib.suppress(Exception):
        found = sorted(_find_handlers(Path.cwd()))
    return [name for name in found if name.startswith(incomplete)]


def complete_triggers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the matching names in the list of triggers."""
    names: list[str] = []
    with contextlib.suppress(Exception):
        from tidemill.services.triggerer.lists.file import read_entries

        if (path := _find_file(ctx, "specs")) is not None:
            names = [spec.name for _, spec in read_entries(path)]
    return [name for name in names if name.startswith(incomplete)]


def _list_topics(ctx: typer.Context) -> list[str]:
    with contextlib.suppress(Exception):
        settings = _load_settings(ctx)
        sinks = (sink.topic for sink in settings.sinks.kafka.values())
        letters = () if settings.dlq.path else (settings.dlq_topic,)
        return list(dict.fromkeys((settings.kafka.source_topic, *letters, *sinks)))
    return []


def _load_settings(ctx: typer.Context) -> Settings:
    from tidemill.config.loading import load_settings

    return load_settings(_find_file(ctx, "config"))


def _find_file(ctx: typer.Context, argument: str) -> Path | None:
    """Return the file that was typed for an argument.

    While an option has no value yet, the line's words are not assigned to arguments.
    """
    typed = ctx.params.get(argument)
    names = [str(typed)] if typed is not None else ctx.args
    return next((path for path in map(Path, names) if path.suffix in (".yaml", ".yml")), None)


def _find_handlers(folder: Path) -> Iterator[str]:
    import ast
    import itertools
    import warnings

    left = _MAX_TOTAL_BYTES
    for path in itertools.islice(folder.glob("*.py"), _MAX_FILES):
        with contextlib.suppress(OSError, SyntaxError, ValueError), warnings.catch_warnings():
            # Newer Pythons warn about invalid escape sequences.
            warnings.simplefilter("ignore")
            size = path.stat().st_size
            # Reading a pipe would never end.
            if not path.is_file() or size > min(_MAX_BYTES, left):
                continue
            left -= size
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and any(_names_handler(base) for base in node.bases):
                    yield f"{path.stem}:{node.name}"


def _names_handler(base: object) -> bool:
    """Return whether a base class looks like a handler: `Handler`, `tidemill.Handler[...]`, `OrderHandler`."""
    import ast

    if isinstance(base, ast.Subscript):
        base = base.value
    name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
    return name.endswith("Handler")
