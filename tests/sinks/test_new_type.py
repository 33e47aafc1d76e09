"""A new type of sink is its file, its settings, its payload, one field and one entry of the table."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import tidemill

HERE = Path(__file__).parent / "new_type"

SETTINGS = '''

class LinesSinkSettings(SinkSection):
    """A file to append lines to."""

    path: NonEmpty = Field(description="The file.")
'''
PAYLOAD = """class LinesPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    sink: str = ""
    title: str = ""
    data: Any = None


"""
FIELD = "    lines: Sequence[LinesPayload] = ()\n"
ENTRY = """        SinkType(
            name="lines",
            plural="Files",
            settings="tidemill.config.sections.sink_settings:LinesSinkSettings",
            payload="tidemill.sinks.payloads:LinesPayload",
            field="lines",
            sink="tidemill.sinks.lines:LinesSink",
            sends_json=False,
        ),
"""


def insert(path: Path, before: str, text: str) -> None:
    content = path.read_text()
    assert content.count(before) == 1
    path.write_text(content.replace(before, text + before))


def test_a_type_that_is_in_the_table_works_everywhere(tmp_path: Path) -> None:
    package = tmp_path / "tidemill"
    shutil.copytree(Path(tidemill.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "lines.py", package / "sinks")
    with (package / "config/sections/sink_settings.py").open("a") as file:
        file.write(SETTINGS)
    insert(package / "sinks/payloads.py", "class CustomPayload(", PAYLOAD)
    insert(package / "sinks/payloads.py", "    custom: Sequence[CustomPayload] = ()\n", FIELD)
    insert(package / "config/sink_types.py", "    )\n}\n", ENTRY)

    done = subprocess.run(
        [sys.executable, str(HERE / "proof.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
