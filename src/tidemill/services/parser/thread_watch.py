"""Finds the import of a DAG file that starts a thread, as `import pyarrow` does."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FrameType
from typing import Self

from tidemill.dags.scope import DAG_MODULE


class ThreadWatch:
    """A finder for `sys.meta_path` that finds no modules, but counts threads at each import of a DAG file.

    Attributes:
        cause: The module whose import by the file started the first thread; empty if there is none.
    """

    def __init__(self) -> None:
        self.cause = ""
        self._importing = ""
        self._before = _count_threads()

    def __enter__(self) -> Self:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # the file may have changed the list
            sys.meta_path.remove(self)
        self._look()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Record an import, and leave it to the other finders."""
        if _is_of_dag_file(sys._getframe(1)):
            self._look()
            self._importing = name
        return None

    def _look(self) -> None:
        if not self.cause and _count_threads() > self._before:
            self.cause = self._importing


def _is_of_dag_file(frame: FrameType | None) -> bool:
    """Return whether the import statement is in a DAG file itself."""
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(DAG_MODULE)


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))
