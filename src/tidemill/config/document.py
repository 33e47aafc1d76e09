"""Reads YAML into plain values and remembers where each of them is.

Stricter than YAML itself: keys are unique strings. Messages name lines and keys but never quote the text, which may
hold secrets.
"""

from __future__ import annotations

import difflib
import pathlib
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import yaml
import yaml.constructor

Path = tuple[str | int, ...]

#: The parser in C where PyYAML has it: a list of ten thousand triggers takes less than a second instead of four.
_FastLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: What to look for where YAML's own message names only a consequence, perhaps on the line after the mistake.
_HINTS = {
    "mapping values are not allowed here": "look for a missing ':' or a wrong indentation here or one line above, or "
    "for a value with ': ' in it that is not in quotes",
    r"found character '\t' that cannot start any token": "YAML does not allow tabs for indentation; use spaces",
    "found unexpected end of stream": "a quote or a bracket is not closed",
    "expected the node content, but found '<stream end>'": "a bracket is not closed",
}
#: Where YAML's own messages quote a piece of the text that can be (the start of) a value.
_QUOTED = re.compile(r"\b(alias|handle|anchor) (?:'[^']*'|\"[^\"]*\")")


@dataclass(slots=True)
class Problem:
    """Something wrong, and where.

    Attributes:
        place: The file and line, or the variable.
        path: The setting, as a format_path path; empty where there is none.
        text: What is wrong, and what to do.
    """

    place: str
    path: str
    text: str

    def __str__(self) -> str:
        """Return place, path and text on one line."""
        return ": ".join(part for part in (self.place, self.path, self.text) if part)


@dataclass(slots=True)
class Document:
    """The values of one YAML text.

    Attributes:
        value: The plain value; a mapping if the text was empty.
        places: Where each value is, by its path.
        problems: What is wrong with the text itself.
    """

    value: Any
    places: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def format_path(path: Path) -> str:
    """Return a path as people write it: `sinks.kafka.results.topic`."""
    return ".".join(str(part) for part in path)


def read_yaml(text: str, source: str, *, lines: bool = True) -> Document:
    """Read a YAML text.

    Args:
        text: The text.
        source: What messages call it: a file's name or a variable.
        lines: Whether places include the line.
    """
    try:
        try:
            return _read(_FastLoader(text), source, lines=lines)
        except yaml.YAMLError:
            # Read again for the messages of the Python parser: the hints match those.
            return _read(yaml.SafeLoader(text), source, lines=lines)
    except yaml.YAMLError as error:
        return Document({}, problems=[_build_syntax_problem(error, source, lines=lines)])


def _read(loader: yaml.SafeLoader, source: str, *, lines: bool) -> Document:
    node = loader.get_single_node()
    return Document({}) if node is None else _Reader(loader, source, lines=lines).read(node)


class _Reader:
    def __init__(self, loader: yaml.SafeLoader, source: str, *, lines: bool) -> None:
        self._loader = loader
        self._source = source
        self._lines = lines
        self._open: set[int] = set()
        self._document = Document(None)

    def read(self, node: yaml.Node) -> Document:
        self._document.value = self._read_value(node, ())
        return self._document

    def _locate(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}" if self._lines else self._source

    def _add_problem(self, node: yaml.Node, path: Path, text: str) -> None:
        self._document.problems.append(Problem(self._locate(node), format_path(path), text))

    def _read_value(self, node: yaml.Node, path: Path, key: yaml.Node | None = None) -> Any:
        self._document.places[path] = self._locate(key or node)
        if id(node) in self._open:
            self._add_problem(node, path, "contains itself")
            return None
        self._open.add(id(node))
        try:
            match node:
                case yaml.MappingNode():
                    return self._read_mapping(node, path)
                case yaml.SequenceNode():
                    return [self._read_value(item, (*path, index)) for index, item in enumerate(node.value)]
                case _:
                    return self._read_scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _read_scalar(self, node: yaml.Node, path: Path) -> Any:
        try:
            return self._loader.construct_object(node)
        except yaml.constructor.ConstructorError:
            # The constructor's own message quotes the text.
            self._add_problem(node, path, "has an unknown tag; quote the value if it begins with '!'")
        except ValueError:
            self._add_problem(node, path, "is not a valid date, time or number; quote the value")
        return None

    def _read_mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        seen: dict[Hashable, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (line := seen.get(key.value)) is not None:
                self._add_problem(key, (*path, key.value), f"duplicate key; first defined on line {line}")
            elif isinstance(key, yaml.ScalarNode):
                seen[key.value] = key.start_mark.line + 1
        self._loader.flatten_mapping(node)
        mapping: dict[str, Any] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._add_problem(key, path, "has a key that is not a name")
            elif key.tag != "tag:yaml.org,2002:str":
                kind = key.tag.rpartition(":")[2]
                self._add_problem(
                    key,
                    (*path, key.value),
                    f"YAML reads this key as a value of type {kind}; put it in quotes",
                )
            else:
                mapping[key.value] = self._read_value(item, (*path, key.value), key)
        return mapping


def _build_syntax_problem(error: yaml.YAMLError, source: str, *, lines: bool) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{source}:{mark.line + 1}:{mark.column + 1}" if lines and mark is not None else source
    text = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    if str(text).startswith("but ") and getattr(error, "context", None):
        text = f"{error.context}, {text}"  # type: ignore[attr-defined]
    hint = _HINTS.get(str(text))
    text = _QUOTED.sub(r"\1", str(text)) + (f"; {hint}" if hint else "")
    return Problem(place, "", f"not valid YAML: {text}")


def find_nearest_yaml(path: pathlib.Path) -> pathlib.Path | None:
    """Return the YAML file in the folder of a missing one whose name is most like its name; None if none is."""
    beside = {found.stem: found for found in path.parent.glob("*.y*ml")}
    near = difflib.get_close_matches(path.stem, beside, n=1)
    return beside[near[0]] if near else None
