"""Finds which import of a DAG file starts a thread: `import pyarrow` does, for example."""

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
    """Finds no module, but counts threads at each import of a DAG file; for `sys.meta_path`.

    Attributes:
        cause: The module that the file imported when the first thread was started; empty: none.
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
        """Note an import; others say where the module is."""
        if _is_of_dag_file(sys._getframe(1)):
            self._look()
            self._importing = name
        return None

    def _look(self) -> None:
        if not self.cause and _count_threads() > self._before:
            self.cause = self._importing


def _is_of_dag_file(frame: FrameType | None) -> bool:
    """Tell whether a DAG file itself imports, and not a module that it imports."""
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(DAG_MODULE)


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))
