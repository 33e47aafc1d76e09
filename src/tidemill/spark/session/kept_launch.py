"""A cache of Spark's JVM launches: the command line, and an archive of the JVM's classes.

Spark's launcher consists of three shell scripts, a Python interpreter and a JVM of its own, which together build a
command line. The command line depends only on the Java runtime, Spark's jars and options that are known here, so it is
read from the process of the first JVM and cached. `archive` creates the archive (class data sharing).

Invariants: the name of the folder is a digest of everything that its content depends on. Files in it may be missing,
damaged, owned by another user or not writable; that costs time but never fails a startup. The user's options are never
cached, because they may contain secrets. If the launcher would read files or variables of the user, nothing is cached
and the launcher runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tidemill.runtime.embedded.java import JavaRuntime
from tidemill.runtime.files.folders import user_cache_folder
from tidemill.runtime.process.table import read_arguments

MAIN_CLASS = "org.apache.spark.deploy.SparkSubmit"
MEMORY, OPTIONS, DEFAULT_OPTIONS = (
    "spark.driver.memory",
    "spark.driver.extraJavaOptions",
    "spark.driver.defaultJavaOptions",
)
#: The JVM verifies the archive's checksums, and is silent about an archive that it ignores.
_USE_ARCHIVE = ("-XX:+VerifySharedSpaces",)
_SILENT = ("-Xlog:disable", "-Xlog:all=error:stderr")
_RECORD = "-XX:DumpLoadedClassList="
#: With any of these options, the user manages the archive.
_THEIR_ARCHIVE = ("-Xshare", "SharedArchive", "SharedClassList", "DumpLoadedClassList", "ArchiveClassesAtExit")
#: Environment variables with further JVM options.
_OPTION_VARIABLES = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
#: Options that may name files with more options.
_MORE_OPTIONS = r"(^|\s)['\"]?@|-XX:Flags=|-XX:VMOptionsFile"
#: With any of these options, the user controls the JVM's logging.
_THEIR_LOGGING = re.compile(f"-Xlog|-verbose|{_MORE_OPTIONS}")
#: With any of these options, a second JVM would write to the files of the first, or compete with it for a port.
_NOT_TWICE = re.compile(
    r"-Xlog:[^:\s]*:(?!std(out|err)\b)[^:\s]|-Xlog.*file=|-Xloggc|-javaagent|-agentlib|-agentpath|-Xrun|jmxremote"
    f"|FlightRecord|{_MORE_OPTIONS}"
)
#: Settings and variables that the launcher does not turn into plain arguments.
_UNKNOWN_CONF = ("spark.driver.extraClassPath", "spark.driver.extraLibraryPath", "spark.remote", "spark.submit.")
_UNKNOWN_VARIABLES = ("PYSPARK_SUBMIT_ARGS", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "CLASSPATH")
_HARMLESS_VARIABLES = (
    *("SPARK_HOME", "SPARK_USER", "SPARK_LOCAL_IP", "SPARK_LOCAL_DIRS", "SPARK_PUBLIC_DNS"),
    # Variables that pyspark sets in its own process.
    *("SPARK_BUFFER_SIZE", "SPARK_AUTH_SOCKET_TIMEOUT"),
)
_CONF_FILES = ("spark-env.sh", "spark-defaults.conf", "java-opts")
_COMMAND, _ARCHIVE, _SIZE, _FAILED = "command.json", "classes.jsa", "classes.size", "failed"
#: An archive that has not been used for this long is removed when another one is created.
UNUSED_SECONDS = 60 * 86400.0
#: After a failed attempt, no archive is created for this long.
FAILED_SECONDS = 86400.0


class _Command(msgspec.Struct, frozen=True):
    """The JVM's arguments before and after those from the configuration, without the main class."""

    before: list[str]
    after: list[str]


def find_kept_launch(
    java: JavaRuntime, spark_home: Path, conf: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> KeptLaunch | None:
    """Return the cache for launches like this one; None if the launcher must run.

    Args:
        java: The Java runtime.
        spark_home: The folder of the Spark distribution.
        conf: The complete Spark configuration.
        environ: The environment, which also determines the cache folder.
    """
    if not java.identity or any(name.startswith(_UNKNOWN_CONF) for name in conf):
        return None
    if any(environ.get(name) for name in _UNKNOWN_VARIABLES):
        return None
    if any(name.startswith("SPARK_") and name not in _HARMLESS_VARIABLES for name in environ):
        return None
    if any((spark_home / "conf" / name).exists() for name in _CONF_FILES):
        return None
    options = [*shlex.split(conf.get(DEFAULT_OPTIONS, "")), *shlex.split(conf.get(OPTIONS, ""))]
    try:
        name = _digest(java, spark_home)
    except OSError:
        return None
    inherited = [environ[variable] for variable in _OPTION_VARIABLES if variable in environ]
    return KeptLaunch(user_cache_folder(environ) / "spark" / name, conf[MEMORY], options, inherited)


def _digest(java: JavaRuntime, spark_home: Path) -> str:
    """Return a name for a Java runtime and Spark's jars, based on their paths, sizes and times."""
    parts = [java.identity]
    for jar in sorted(os.scandir(spark_home / "jars"), key=lambda entry: entry.name):
        status = jar.stat()
        parts.append(f"{jar.path} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


class KeptLaunch:
    """The cached launch of one Java runtime with one Spark distribution.

    Args:
        folder: The folder of the cache; it need not exist.
        memory: The heap size of the JVM to launch, for example `1g`.
        options: Its options from the configuration.
        inherited: Its options from environment variables.
    """

    def __init__(self, folder: Path, memory: str, options: Sequence[str], inherited: Sequence[str] = ()) -> None:
        self.folder = folder
        self._memory = f"-Xmx{memory}"
        self._options = list(options)
        self._trusted = _is_ours(folder)
        given = [*options, *inherited]
        self._archives = not any(word in option for option in given for word in _THEIR_ARCHIVE)
        self._makes_archives = self._archives and not any(map(_NOT_TWICE.search, given))
        self._silent = () if any(map(_THEIR_LOGGING.search, given)) else _SILENT

    @property
    def archive(self) -> Path:
        """The path of the archive, existing or not."""
        return self.folder / _ARCHIVE

    @property
    def has_archive(self) -> bool:
        """Whether an archive of the recorded size exists; a truncated archive would crash the JVM."""
        try:
            return self.archive.stat().st_size == int((self.folder / _SIZE).read_text())
        except (OSError, ValueError):
            return False

    @property
    def uses_archive(self) -> bool:
        """Whether a launch now would use the archive."""
        return self._archives and self._trusted and self.has_archive

    @property
    def wants_archive(self) -> bool:
        """Whether to create an archive: there is none, no attempt failed recently, and the options allow one."""
        if not self._makes_archives or self.has_archive:
            return False
        try:
            return time.time() - (self.folder / _FAILED).stat().st_mtime > FAILED_SECONDS
        except OSError:
            return True

    def command(self, arguments: Sequence[str], classes: Path | None = None) -> list[str] | None:
        """Return the command that runs Spark's main class; None if it is not cached.

        Args:
            arguments: The arguments for the main class.
            classes: The file in which the JVM is to record the classes that it loads.
        """
        if not self._trusted:
            return None
        try:
            kept = msgspec.json.decode((self.folder / _COMMAND).read_bytes(), type=_Command)
        except (OSError, msgspec.DecodeError):
            return None
        if not kept.before or not os.access(kept.before[0], os.X_OK):
            return None
        with contextlib.suppress(OSError):  # mark the cache as used
            os.utime(self.folder)
        sharing = self.sharing_options(classes)
        return [*kept.before, self._memory, *self._options, *sharing, *kept.after, MAIN_CLASS, *arguments]

    def sharing_options(self, classes: Path | None) -> list[str]:
        """Return the options with which the JVM uses the archive, or records the classes for one."""
        if self.uses_archive:
            return [f"-XX:SharedArchiveFile={self.archive}", *_USE_ARCHIVE, *self._silent]
        return [f"{_RECORD}{classes}"] if classes is not None and self.wants_archive else []

    def learn(self, pid: int) -> None:
        """Cache the command line of a JVM that the launcher started, if it has the expected form."""
        arguments = read_arguments(pid)
        if MAIN_CLASS not in arguments or self._memory not in arguments:
            return
        words = arguments[: arguments.index(MAIN_CLASS)]
        at = words.index(self._memory)
        rest = words[at + 1 :]
        if rest[: len(self._options)] != self._options:
            return
        # The sharing options follow the user's; an archive may have appeared or vanished since the launch.
        ours = (f"-XX:SharedArchiveFile={self.archive}", *_USE_ARCHIVE, *_SILENT)
        after = [word for word in rest[len(self._options) :] if word not in ours and not word.startswith(_RECORD)]
        kept = _Command(words[:at], after)
        with contextlib.suppress(OSError):
            self._make_folder()
            _write(self.folder / _COMMAND, msgspec.json.encode(kept))

    def dump_command(self, classes: Path, target: Path) -> list[str] | None:
        """Return the command that creates an archive from recorded classes; it runs no Spark code."""
        command = self.command([])
        if command is None:
            return None
        options = ["-Xshare:dump", f"-XX:SharedClassListFile={classes}", f"-XX:SharedArchiveFile={target}"]
        return [*command[:1], *options, *command[1 : command.index(MAIN_CLASS)]]

    def prepare(self) -> None:
        """Create the folder for an archive, and remove folders that have not been used for a long time.

        Raises:
            OSError: The folder cannot be written to, or belongs to another user.
        """
        self._make_folder()
        for other in self.folder.parent.iterdir():
            with contextlib.suppress(OSError):
                if other != self.folder and time.time() - other.stat().st_mtime > UNUSED_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)

    def keep_archive(self, file: Path) -> None:
        """Move a complete archive into the cache.

        Raises:
            OSError: The folder cannot be written to.
        """
        file.chmod(0o600)
        _write(self.folder / _SIZE, str(file.stat().st_size).encode())
        file.replace(self.archive)

    def note_failure(self) -> None:
        """Prevent further attempts for a while."""
        with contextlib.suppress(OSError):
            (self.folder / _FAILED).touch()

    def forget(self) -> None:
        """Remove the cached files after a launch with them has failed."""
        for name in (_COMMAND, _ARCHIVE, _SIZE):
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._trusted = _is_ours(self.folder)
        if not self._trusted:
            raise PermissionError(1, f"{self.folder} can be written by others")


def _is_ours(folder: Path) -> bool:
    """Return whether only this user and root can have written to a folder."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
