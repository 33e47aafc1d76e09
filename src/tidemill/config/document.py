"""Reads YAML into plain values and records the source line of each value.

The reader is stricter than YAML: keys are unique strings, and size, nesting and the expansion of aliases are limited,
so that no file can exhaust the memory or the stack of the process. Messages name lines and keys but never quote the
text, which may contain secrets.
"""

from __future__ import annotations

import difflib
import errno
import pathlib
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import yaml
import yaml.constructor

Path = tuple[str | int, ...]

#: PyYAML's C parser, where it is available: a list of ten thousand triggers takes less than a second instead of four.
_FastLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: A list of ten thousand triggers is 2 MiB; a larger file is not a hand-written configuration.
MAX_BYTES = 16 * 1024 * 1024
#: The C parser would overflow the stack, and crash the process, at some ten thousand levels.
MAX_LEVELS = 100
#: The number of values that aliases may add to the written ones.
MAX_ALIASED_VALUES = 10_000

_NO_DOCUMENT = (
    "the document is already complete at this point; is it a YAML file, with all keys at the same indentation?"
)
#: What to look for where YAML's own message names only a consequence, perhaps on the line after the mistake.
_HINTS = {
    "mapping values are not allowed here": "look for a missing ':' or a wrong indentation here or one line above, or "
    "for a value with ': ' in it that is not in quotes",
    r"found character '\t' that cannot start any token": "YAML does not allow tabs for indentation; use spaces",
    "found unexpected end of stream": "a quote or a bracket is not closed",
    "expected the node content, but found '<stream end>'": "a bracket is not closed",
    "expected <block end>, but found '<block mapping start>'": "look for a wrong indentation here or one line above",
    "expected '<document start>', but found '<scalar>'": _NO_DOCUMENT,
    "expected '<document start>', but found '<block mapping start>'": _NO_DOCUMENT,
    "expected '<document start>', but found '<block sequence start>'": _NO_DOCUMENT,
}
_BRACKETS = re.compile(r"[][{}]")
_INDENTS = re.compile(r"^[ ?:-]*", re.MULTILINE)
#: YAML's own messages may quote the start of a value here.
_QUOTED = re.compile(r"\b(alias|handle|anchor) (?:'[^']*'|\"[^\"]*\")")


@dataclass(slots=True)
class ConfigProblem:
    """A problem in the configuration, with its location.

    Attributes:
        location: The file and line, or the variable.
        path: The setting, as a format_path path; empty where there is none.
        text: What is wrong, and what to do.
    """

    location: str
    path: str
    text: str

    def __str__(self) -> str:
        """Return location, path and text on one line."""
        return ": ".join(part for part in (self.location, self.path, self.text) if part)


@dataclass(slots=True)
class Document:
    """The values of one YAML text.

    Attributes:
        value: The plain value; a mapping if the text was empty.
        locations: Where each value is, by its path.
        problems: What is wrong with the text itself.
    """

    value: Any
    locations: dict[Path, str] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)


def format_path(path: Path) -> str:
    """Return a path as people write it: `sinks.kafka.results.topic`."""
    return ".".join(str(part) for part in path)


def read_text(path: pathlib.Path) -> str:
    """Return the text of a YAML file.

    Raises:
        OSError: The file cannot be read, or is larger than `MAX_BYTES`.
        UnicodeDecodeError: The file is not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        # A device may never end.
        raise OSError(errno.EFBIG, f"it is larger than {MAX_BYTES // 1024**2} MiB; is it the right file?")
    return data.decode("utf-8-sig")


def read_yaml(text: str, source: str, *, lines: bool = True) -> Document:
    """Read a YAML text.

    Args:
        text: The text.
        source: Its name in messages: a file or a variable.
        lines: Whether messages name the line.
    """
    try:
        try:
            if deep := _find_too_deep(text):
                location = f"{source}:{deep}" if lines else source
                return Document(
                    {}, problems=[ConfigProblem(location, "", f"nested more than {MAX_LEVELS} levels deep")]
                )
            return _read(_FastLoader(text), source, lines=lines)
        except yaml.YAMLError:
            # Read again with the Python parser, whose messages the hints match.
            return _read(yaml.SafeLoader(text), source, lines=lines)
    except yaml.YAMLError as error:
        return Document({}, problems=[_build_syntax_problem(error, source, lines=lines)])


def _read(loader: yaml.SafeLoader, source: str, *, lines: bool) -> Document:
    node = loader.get_single_node()
    if node is None:
        return Document({})
    if _count_aliased(node) > MAX_ALIASED_VALUES:
        text = f"its aliases (*name) expand to more than {MAX_ALIASED_VALUES:,} values; use fewer aliases"
        return Document({}, problems=[ConfigProblem(source, "", text)])
    return _Reader(loader, source, lines=lines).read(node)


def _find_too_deep(text: str) -> int | None:
    """Return the first line that is nested more than `MAX_LEVELS` deep, or None."""
    if _bound_levels(text) <= MAX_LEVELS:
        return None
    level = 0
    for event in yaml.parse(text, _FastLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
            if level > MAX_LEVELS:
                mark = event.start_mark
                return mark.line + 1 if mark is not None else 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
    return None


def _bound_levels(text: str) -> int:
    """Return an upper bound of a text's nesting, without parsing it."""
    level = deepest = 0
    for bracket in _BRACKETS.finditer(text):
        level += 1 if bracket[0] in "[{" else -1
        deepest = max(deepest, level)
    # A level takes at least one column, but a list may begin at the column of its key.
    return deepest + 2 * max(len(indent[0]) for indent in _INDENTS.finditer(text))


def _count_aliased(root: yaml.Node) -> int:
    """Return how many more values a document has once its aliases are expanded, in time linear in its written size."""
    sizes: dict[int, int] = {}

    def measure(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known is not None:
            return known
        sizes[id(node)] = 0  # the reader reports a value that contains itself
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inside = (each for part in parts for each in (part if isinstance(part, tuple) else (part,)))
        sizes[id(node)] = 1 + sum(map(measure, inside))
        return sizes[id(node)]

    return measure(root) - len(sizes)


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
        self._document.problems.append(ConfigProblem(self._locate(node), format_path(path), text))

    def _read_value(self, node: yaml.Node, path: Path, key: yaml.Node | None = None) -> Any:
        self._document.locations[path] = self._locate(key or node)
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


def _build_syntax_problem(error: yaml.YAMLError, source: str, *, lines: bool) -> ConfigProblem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    location = f"{source}:{mark.line + 1}:{mark.column + 1}" if lines and mark is not None else source
    text = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    if str(text).startswith("but ") and getattr(error, "context", None):
        text = f"{error.context}, {text}"  # type: ignore[attr-defined]
    hint = _HINTS.get(str(text))
    text = _QUOTED.sub(r"\1", str(text)) + (f"; {hint}" if hint else "")
    return ConfigProblem(location, "", f"not valid YAML: {text}")


def find_nearest_yaml(path: pathlib.Path) -> pathlib.Path | None:
    """Return the YAML file in the same folder whose name is most similar to a missing one, or None."""
    beside = {found.stem: found for found in path.parent.glob("*.y*ml")}
    near = difflib.get_close_matches(path.stem, beside, n=1)
    return beside[near[0]] if near else None
