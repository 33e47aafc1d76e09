"""`tidemill init`: creates a small project that runs as it is, from the files in `templates/`."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.reporting import reporting
from tidemill.core.errors import ConfigError

#: Where each template goes.
FILES = {
    "handler.py": "handler.py.txt",
    "tidemill.yaml": "tidemill.yaml.txt",
    "send.py": "send.py.txt",
    "tests/test_handler.py": "test_handler.py.txt",
    "pytest.ini": "pytest.ini.txt",
    "README.md": "README.md.txt",
}
_PLACEHOLDER = "PROJECT_NAME"


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The new project's folder.")],
) -> None:
    """Create a small project: handler, configuration, test. It runs as it is; nothing is overwritten."""
    with reporting():
        for path in create_project(directory):
            typer.echo(f"created {path}")
        typer.echo(f"\nnow: cd {directory} and read README.md")


def create_project(directory: Path) -> list[Path]:
    """Write the project's files and return their paths.

    Raises:
        ConfigError: One of them exists, or the folder cannot be written to.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder; choose another name")
    existing = [str(directory / name) for name in FILES if (directory / name).exists()]
    if existing:
        raise ConfigError(f"nothing was written, because these exist: {', '.join(existing)}; choose another folder")
    name = re.sub(r"[^a-z0-9._-]+", "-", directory.resolve().name.lower()).strip("-.") or "pipeline"
    templates = files("tidemill.cli") / "templates"
    created = []
    try:
        for target, template in FILES.items():
            text = (templates / template).read_text(encoding="utf-8").replace(_PLACEHOLDER, name)
            path = directory / target
            path.parent.mkdir(parents=True, exist_ok=True)
            # "x": files created since the check above are not overwritten either.
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            created.append(path)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be written: {error.strerror}") from error
    return created
