"""Fetch Java libraries once per user and keep them, by coordinates only.

Spark's own resolver downloads them, so that nothing but pyspark and Java is needed, and a site's mirror
settings for Spark apply. A folder of jars is complete or absent: it is created under a temporary name and
renamed. Processes that need the same jars at the same time wait for the first one.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.folders import user_cache_folder, writable_cache_folder
from tidemill.runtime.java import find_java

OFFLINE_VARIABLE = "TIDEMILL_OFFLINE"
KAFKA_COORDINATES = "org.apache.kafka:kafka_2.13:4.3.1"
_DOWNLOAD_TIMEOUT_SECONDS = 600.0
_PROGRESS_SECONDS = 3.0
_TAIL_LINES = 15

Progress = Callable[[str], None]


def spark_home() -> Path:
    """Return the Spark distribution inside the installed pyspark package.

    Raises:
        ConfigError: pyspark is not installed.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigError("The Python package pyspark is not installed; run: pip install pyspark")
    return Path(spec.origin).parent


def kafka_classpath(progress: Progress | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the Java class path of an Apache Kafka broker, downloading it the first time.

    Raises:
        RemoteError: It is not here and cannot be downloaded.
    """
    folder = resolve_jars(KAFKA_COORDINATES, progress=progress, environ=environ)
    # Spark's resolver leaves scala-library out because Spark itself brings it. The logging binding is Spark's
    # too: without one the broker would fail in silence.
    names = ("slf4j-api-2*.jar", "log4j-slf4j2-impl-*.jar", "scala-library-2.13*.jar")
    return os.pathsep.join([*(_spark_jar(name) for name in names), f"{folder}/*"])


def _spark_jar(pattern: str) -> str:
    found = sorted((spark_home() / "jars").glob(pattern))
    if not found:
        raise ConfigError(f"There is no {pattern} in {spark_home() / 'jars'}; reinstall pyspark")
    return str(found[-1])


def resolve_jars(
    coordinates: str, *, progress: Progress | None = None, environ: Mapping[str, str] = os.environ
) -> Path:
    """Return the folder with an artifact's jars and those it depends on.

    Args:
        coordinates: `group:artifact:version`.
        progress: Called with a line of text while something is downloaded.
        environ: Where the cache folder and the offline switch are looked up; also the download's environment.

    Raises:
        RemoteError: They are not in the cache, and downloading failed or is switched off.
    """
    _, artifact, version = coordinates.split(":")
    name = f"{artifact}-{version}"
    for cache in (user_cache_folder, writable_cache_folder):
        root = cache(environ) / "jars"
        folder = root / name
        with contextlib.suppress(PermissionError):  # a home of another user
            if folder.is_dir():
                return folder
    if environ.get(OFFLINE_VARIABLE, "") not in ("", "0"):
        raise RemoteError(
            f"The jars of {coordinates} are not in {folder} and {OFFLINE_VARIABLE} forbids downloading them. "
            f"Unset it once, or copy that folder from another machine.",
            retryable=False,
        )
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f".{folder.name}.lock"):
        if not folder.is_dir():
            _download(coordinates, artifact, folder, progress or _say_nothing, environ)
    return folder


def _say_nothing(text: str) -> None:
    """Report nothing."""


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(coordinates: str, artifact: str, folder: Path, progress: Progress, environ: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        ivy = Path(scratch) / "ivy"
        log = Path(scratch) / "log"
        exit_code = _run_resolver(coordinates, ivy, log, progress, environ)
        jars = sorted((ivy / "jars").glob("*.jar"))
        if exit_code != 0 or not any(artifact in jar.name for jar in jars):
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise RemoteError(
                f"Downloading {coordinates} failed (exit code {exit_code}):\n{tail}\n"
                f"It needs a Maven repository once: check the network and proxy settings, name a mirror with "
                f"spark.jars.ivySettings in a spark-defaults.conf ($SPARK_CONF_DIR), or copy the folder "
                f"{folder} from a machine that has it."
            )
        (ivy / "jars").rename(folder)
    progress(f"{coordinates}: {len(jars)} jars are in {folder}")


def _run_resolver(coordinates: str, ivy: Path, log: Path, progress: Progress, environ: Mapping[str, str]) -> int:
    program = log.with_name("nothing.py")
    program.write_text("")
    env = find_java(environ).environment(environ)
    env.update(SPARK_HOME=str(spark_home()), PYSPARK_PYTHON=sys.executable)
    command = [
        str(spark_home() / "bin" / "spark-submit"),
        *("--master", "local[1]", "--packages", coordinates, "--conf", f"spark.jars.ivy={ivy}"),
        str(program),
    ]
    started = time.monotonic()
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            while True:
                elapsed = time.monotonic() - started
                if elapsed > _DOWNLOAD_TIMEOUT_SECONDS:
                    raise RemoteError(f"Downloading {coordinates} took over {_DOWNLOAD_TIMEOUT_SECONDS:g} s")
                count, size = _count_downloaded(ivy)
                progress(f"downloading {coordinates} (once): {count} jars, {size / 1e6:.0f} MB, {elapsed:.0f} s")
                try:
                    return process.wait(_PROGRESS_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()


def _count_downloaded(ivy: Path) -> tuple[int, int]:
    cache = ivy / "cache"
    sizes = [size for jar in cache.rglob("*.jar") if (size := _size(jar)) is not None]
    return len(sizes), sum(sizes)


def _size(path: Path) -> int | None:
    # Nothing is there at first; then files appear, and are renamed as they complete.
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
