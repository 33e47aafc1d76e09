"""What a task's process starts with: its environment, and the file behind a program's name.

Invariants: neither what `executor.env_inherit_deny` names nor what tidemill tells its own processes is inherited; every
process carries the engine's id, whatever the task says, because the warden finds it by that; a program that has moved
is looked up again.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from tidemill.runtime.warden import ENGINE_ID_VARIABLE

#: What processes of tidemill tell each other.
_OWN = "_TIDEMILL_*"
#: This many looked-up names are kept, so that a handler that invents names cannot fill the memory.
_MAX_PROGRAMS = 1024

Environment = dict[bytes, bytes]


def filter_environment(environ: Mapping[str, str], deny: Iterable[str]) -> dict[str, str]:
    """Return the variables whose names match none of the patterns, upper and lower case being the same.

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
    """The environment of every task of an engine, encoded once, and the programs found along its PATH.

    Args:
        environ: What the engine itself was started with.
        deny: Patterns of variables that are not inherited.
        extra: Added to every task (`executor.env`).
        engine_id: The engine's id.
    """

    def __init__(
        self, environ: Mapping[str, str], deny: Iterable[str], extra: Mapping[str, str], engine_id: str
    ) -> None:
        """Filter and encode once."""
        variables = {**filter_environment(environ, [*deny, _OWN]), **extra, ENGINE_ID_VARIABLE: engine_id}
        #: Bytes on both sides: posix_spawn takes them as they are.
        self.base: Environment = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
        self._engine_id = os.fsencode(engine_id)
        self._programs: dict[tuple[str, bytes], str] = {}

    def make_for_task(self, env: Mapping[str, str]) -> Environment:
        """Return the environment of a task that brings its own variables.

        Raises:
            TypeError: A name or a value is not text.
        """
        own = self.base.copy()
        for name, value in env.items():
            own[os.fsencode(name)] = os.fsencode(value)
        own[ENGINE_ID_VARIABLE.encode()] = self._engine_id
        return own

    def find(self, program: str, env: Environment) -> str:
        """Return the file to start; a bare name is looked up along PATH once.

        Raises:
            FileNotFoundError: No program was named, or no folder of PATH has it.
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
        """Look this program up again next time: it is not where it was."""
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
        except OSError:  # not there, or not for us to see: the next folder may have it
            continue
        if is_file and os.access(candidate, os.X_OK):
            return str(candidate)
        if is_file and refused is None:
            refused = str(candidate)
    if refused is None:
        raise FileNotFoundError(f"no program {program!r} in PATH ({path}); install it, or correct binary_path")
    return refused  # starting it says why it is refused
