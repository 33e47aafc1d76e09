"""Downloads Java libraries once per user into a cache, as a lock file of the project names them.

Invariants: a folder of jars is complete and verified, or absent. It is filled under another name, compared with the
lock and renamed. Processes that need the same jars at the same time wait for the first one. The next process removes
what a killed one left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.jar_lock import JarLock, parse_jar_lock
from tidemill.runtime.embedded.jar_mirror import MIRROR_VARIABLE, download_from_mirror
from tidemill.runtime.embedded.jar_resolver import resolve_with_spark, spark_home
from tidemill.runtime.files.folders import user_cache_folder, writable_cache_folder

OFFLINE_VARIABLE = "TIDEMILL_OFFLINE"

Progress = Callable[[str], None]


def kafka_lock() -> JarLock:
    """Return the lock of an Apache Kafka broker."""
    return parse_jar_lock((files("tidemill.runtime.embedded") / "kafka.lock").read_text(encoding="utf-8"))


def kafka_classpath(progress: Progress | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the Java class path of an Apache Kafka broker; download it the first time.

    Raises:
        RemoteError: The jars are not cached and cannot be downloaded.
    """
    folder = fetch_jars(kafka_lock(), progress=progress, environ=environ)
    # Spark's resolver leaves out scala-library because Spark itself contains it. The logging binding is Spark's as
    # well; without one the broker would fail silently.
    names = ("slf4j-api-2*.jar", "log4j-slf4j2-impl-*.jar", "scala-library-2.13*.jar")
    return os.pathsep.join([*(_spark_jar(name) for name in names), f"{folder}/*"])


def _spark_jar(pattern: str) -> str:
    found = sorted((spark_home() / "jars").glob(pattern))
    if not found:
        raise ConfigError(f"no {pattern} was found in {spark_home() / 'jars'}; reinstall pyspark")
    return str(found[-1])


def fetch_jars(lock: JarLock, *, progress: Progress | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder with an artifact's jars and those it depends on.

    Args:
        lock: The jars.
        progress: Called with a line of text while jars are downloaded.
        environ: The environment with the cache folder, the mirror and the offline switch; also the download's
            environment.

    Raises:
        RemoteError: The jars are not in the cache, and downloading failed or is switched off.
        ConfigError: A setting for the download is wrong.
    """
    for cache in (user_cache_folder, writable_cache_folder):
        root = cache(environ) / "jars"
        folder = root / lock.name
        with contextlib.suppress(PermissionError):  # the home of another user
            if lock.is_complete(folder):
                return folder
    if environ.get(OFFLINE_VARIABLE, "") not in ("", "0"):
        raise RemoteError(
            f"the jars of {lock.coordinates} are not in {folder} and {OFFLINE_VARIABLE} forbids downloading them; "
            "unset it once, or copy that folder from another machine",
            retryable=False,
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{lock.name}.lock"):
            _remove_leftovers(root, lock)
            # Another process may have been first.
            if not lock.is_complete(folder):
                _download(lock, folder, progress or _say_nothing, environ)
    except OSError as error:
        raise RemoteError(_describe_full_disk(lock, root, error)) from error
    return folder


def _say_nothing(text: str) -> None:
    """Ignore progress."""


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(root: Path, lock: JarLock) -> None:
    for left in root.glob(f".{lock.name}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _download(lock: JarLock, folder: Path, progress: Progress, environ: Mapping[str, str]) -> None:
    fetch = download_from_mirror if environ.get(MIRROR_VARIABLE) else resolve_with_spark
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        scratch = Path(name)
        arrived = fetch(lock, scratch, progress, environ)
        if problems := lock.find_problems(arrived):
            raise RemoteError(
                f"the files downloaded for {lock.coordinates} are not those that this version of tidemill expects: "
                f"{'; '.join(problems)}. They were discarded. Try again; if it fails again, a repository or proxy "
                "sends wrong files: ask its administrator.",
                retryable=False,
            )
        complete = scratch / "complete"
        complete.mkdir()
        for jar in lock.jars:
            (arrived / jar.file_name).rename(complete / jar.file_name)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(scratch / "incomplete")
        complete.rename(folder)
    progress(f"{lock.coordinates}: {len(lock.jars)} jars, {lock.size_bytes / 1e6:.1f} MB, are in {folder}")


def _describe_full_disk(lock: JarLock, root: Path, error: OSError) -> str:
    advice = "check its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        # The resolver keeps a second copy until it is done.
        advice = f"make room for {2 * lock.size_bytes / 1e6:.0f} MB there"
    return (
        f"the jars of {lock.coordinates} cannot be saved in {root}: {error.strerror or error}; {advice}, or set "
        "XDG_CACHE_HOME to another folder"
    )
