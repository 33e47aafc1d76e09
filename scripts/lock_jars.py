"""Writes the lock files of Java libraries: what Spark's resolver brings for an artifact, with sizes and digests."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from tidemill.runtime.embedded.jar_lock import parse_jar_lock
from tidemill.runtime.embedded.jar_resolver import resolve_with_spark

ROOT = Path(__file__).parent.parent
LOCKS = ("src/tidemill/runtime/embedded/kafka.lock", "tests/sinks/java/mongo-java-server.lock")


def lock(path: Path) -> None:
    """Write one lock file; its first entry says what to resolve, so a new version is written there by hand."""
    root = parse_jar_lock(path.read_text()).coordinates
    with tempfile.TemporaryDirectory() as scratch:
        jars = resolve_with_spark(parse_jar_lock(path.read_text()), Path(scratch), print, os.environ)
        # The resolver's own cache has group and artifact in names of folders, where they cannot be mistaken.
        cached = {jar.name: jar.parent.parent for jar in (Path(scratch) / "ivy" / "cache").glob("*/*/*/*.jar")}
        entries = []
        for jar in jars.glob("*.jar"):
            found = [
                (place.parent.name, place.name, name.removeprefix(f"{place.name}-").removesuffix(".jar"))
                for name, place in cached.items()
                if jar.name == f"{place.parent.name}_{name}"
            ]
            (coordinates,) = (":".join(parts) for parts in found)
            content = jar.read_bytes()
            entries.append((coordinates, f"{coordinates} {len(content)} {hashlib.sha256(content).hexdigest()}\n"))
    entries.sort(key=lambda entry: (entry[0] != root, entry[0]))
    path.write_text(f"# {root} and what it needs. Made by scripts/lock.\n" + "".join(line for _, line in entries))


if __name__ == "__main__":
    for name in LOCKS:
        lock(ROOT / name)
