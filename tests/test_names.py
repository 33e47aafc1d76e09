"""One name, one thing: public classes are unique, and no module imports two objects of one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_bytes()) for path in sorted(SOURCE.rglob("*.py"))}


def list_imports(tree: ast.Module) -> Iterator[tuple[str, str, str | None]]:
    """Yield the module, the name and the alias of each object that is imported from this project."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("tidemill"):
            for alias in node.names:
                yield node.module, alias.name, alias.asname


def test_every_public_class_has_a_name_of_its_own() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    assert len(found) > 1_000
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_module_imports_two_objects_of_one_name() -> None:
    clashes = []
    for path, tree in MODULES.items():
        origins: defaultdict[str, set[str]] = defaultdict(set)
        for module, name, _ in list_imports(tree):
            origins[name].add(module)
        clashes += [(path, name, sorted(modules)) for name, modules in origins.items() if len(modules) > 1]
    assert clashes == []


def test_no_class_is_renamed_at_its_import() -> None:
    """`import X as X` re-exports a name; another alias hides that two things share one."""
    renamed = [
        (path, f"{module}.{name}", alias)
        for path, tree in MODULES.items()
        for module, name, alias in list_imports(tree)
        if alias not in (None, name) and name[0].isupper()
    ]
    assert renamed == []
