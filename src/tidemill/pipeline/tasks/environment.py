"""The environment of a task's process, and the lookup of programs along PATH.

Invariants: a process inherits neither the variables that `executor.env_inherit_deny` names nor tidemill's internal
ones. Every process carries the engine's id, whatever the task's `env` says, because the warden finds processes by it. A
program that has moved is looked up again.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE

#: Variables between tidemill's own processes.
_OWN = "_TIDEMILL_*"
#: At most this many lookups are cached, so that a handler with ever new names cannot fill the memory.
_MAX_PROGRAMS = 1024

Environment = dict[bytes, bytes]


def filter_environment(environ: Mapping[str, str], deny: Iterable[str]) -> dict[str, str]:
    """Return the variables whose names match none of the patterns; case is ignored.

    Example:
        >>> filter_environment({"HOME": "/", "db_password": "x"}, ["*PASSWORD*"])
        {'HOME': '/'}
    """
    patterns = [pattern.upper() for pattern in deny]
    return {
        name: value
        for name, value in environ.items()
        if not any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in patterns)
    }


class TaskEnvironment:
    """The environment of an engine's tasks, encoded once, and a cache of the programs found along its PATH.

    Args:
        environ: The engine's own environment.
        deny: Patterns of variables that are not inherited.
        extra: Variables added for every task (`executor.env`).
        engine_id: The engine's id.
    """

    def __init__(
        self, environ: Mapping[str, str], deny: Iterable[str], extra: Mapping[str, str], engine_id: str
    ) -> None:
        variables = {**filter_environment(environ, [*deny, _OWN]), **extra, ENGINE_ID_VARIABLE: engine_id}
        #: Names and values as bytes, because posix_spawn takes bytes without conversion.
        self.base: Environment = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
        self._engine_id = os.fsencode(engine_id)
        self._programs: dict[tuple[str, bytes], str] = {}

    def make_for_task(self, env: Mapping[str, str]) -> Environment:
        """Return the environment of a task that has variables of its own.

        Raises:
            TypeError: A name or a value is not text.
        """
        own = self.base.copy()
        for name, value in env.items():
            own[os.fsencode(name)] = os.fsencode(value)
        own[ENGINE_ID_VARIABLE.encode()] = self._engine_id
        return own

    def find(self, program: str, env: Environment) -> str:
        """Return the path of the file to start; a bare name is looked up along PATH once.

        Raises:
            FileNotFoundError: No program was named, or no folder of PATH contains it.
        """
        search = env.get(b"PATH", os.defpath.encode())
        found = self._programs.get((program, search))
        if found is None:
            found = program if "/" in program else _search(program, os.fsdecode(search))
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            self._programs[program, search] = found
        return found

    def forget(self, program: str) -> None:
        """Drop a cached lookup: the program is not at that path any more."""
        for key in [key for key in self._programs if key[0] == program]:
            del self._programs[key]


def _search(program: str, path: str) -> str:
    if not program:
        raise FileNotFoundError("no program is configured: set executor.binary_path, or the task's binary_path")
    refused: str | None = None
    for folder in path.split(os.pathsep):
        candidate = Path(folder or ".", program)
        try:
            is_file = stat.S_ISREG(candidate.stat().st_mode)
        except OSError:  # missing or unreadable: the next folder may have it
            continue
        if is_file and os.access(candidate, os.X_OK):
            return str(candidate)
        if is_file and refused is None:
            refused = str(candidate)
    if refused is None:
        raise FileNotFoundError(f"no program {program!r} in PATH ({path}); install it, or correct binary_path")
    return refused  # starting it raises the error that says why
