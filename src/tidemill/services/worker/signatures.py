"""File signatures: show whether a file has changed since it was read, without reading it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from tidemill.dags.opened_files import Signature, sign_file

#: The signature of a file that may have changed while it was read; it counts as changed.
UNCERTAIN: Final[Signature] = (0,)


def sign_files(folder: Path, names: Iterable[str]) -> dict[str, Signature]:
    """Return the signatures of files, by their paths below a folder or absolute paths."""
    return {name: sign_file(os.path.join(folder, name)) for name in names}  # noqa: PTH118 - for each attempt


def is_unchanged(folder: Path, files: Mapping[str, Signature]) -> bool:
    """Return whether files still have the given signatures (see `sign_files`)."""
    return all(sign_file(os.path.join(folder, name)) == sign for name, sign in files.items())  # noqa: PTH118
