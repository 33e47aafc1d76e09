"""Downloads jars with Spark's own resolver, which needs only pyspark and Java.

A site's Spark settings apply (`spark.jars.ivySettings`, `spark.jars.repositories`), and so do the environment's proxy
and the system's certificates. The resolver ends with this process, however this process ends.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.jar_lock import DownloadProgress, JarLock
from tidemill.runtime.embedded.java import find_java
from tidemill.runtime.embedded.java_network import connected_environment
from tidemill.runtime.process.guarded import Guarded

Progress = Callable[[str], None]

_TIMEOUT_SECONDS = 600.0
_PROGRESS_SECONDS = 3.0
_TAIL_LINES = 15
#: Texts of the resolver's output, and the advice for them.
_ADVICE = (
    (
        ("PKIX path", "SSLHandshakeException", "unable to find valid certification path"),
        "Java does not trust the certificate of the repository or of a proxy: set SSL_CERT_FILE to a file with the "
        "certificates of the authorities that this network uses",
    ),
    (
        ("No space left on device", "Disk quota exceeded"),
        "the disk is full: make room in the cache folder, or set XDG_CACHE_HOME to another one",
    ),
    (
        ("Proxy Authentication Required", " 407 "),
        "the proxy requires a user and a password: HTTPS_PROXY=http://user:password@host:port",
    ),
)
_OTHERWISE = (
    "the first download needs a Maven repository: check the network and the proxy (HTTPS_PROXY), or set a mirror in "
    "TIDEMILL_MAVEN_URL or with spark.jars.ivySettings in a spark-defaults.conf ($SPARK_CONF_DIR)"
)


def spark_home() -> Path:
    """Return the Spark distribution of the installed pyspark package.

    The distribution is inside the package, was downloaded into it (PYSPARK_HADOOP_VERSION), or contains the package.

    Raises:
        ConfigError: pyspark is not installed.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigError("the Python package pyspark is not installed; run: pip install pyspark")
    package = Path(spec.origin).parent
    candidates = (package / "spark-distribution", package, package.parent.parent)
    return next((home for home in candidates if _is_spark(home)), package)


def _is_spark(folder: Path) -> bool:
    return (folder / "bin" / "spark-submit").is_file() and (folder / "jars").is_dir()


def resolve_with_spark(lock: JarLock, scratch: Path, progress: Progress, environ: Mapping[str, str]) -> Path:
    """Download an artifact with its dependencies, and return the folder of the jars.

    Args:
        lock: The jars.
        scratch: A folder for this download alone.
        progress: Called with a line of text every few seconds.
        environ: The resolver's environment.

    Raises:
        RemoteError: The download failed; the text gives advice.
        ConfigError: There is no Java, or a proxy's address cannot be parsed.
    """
    ivy, log = scratch / "ivy", scratch / "log"
    exit_code = _run(lock, ivy, log, progress, environ)
    # The steps after the download fail for a user that the system does not know.
    if exit_code != 0 and not lock.is_complete(ivy / "jars"):
        said = log.read_text(errors="replace")
        advice = next((advice for signs, advice in _ADVICE if any(sign in said for sign in signs)), _OTHERWISE)
        raise RemoteError(
            f"downloading {lock.coordinates} to {scratch.parent} failed (exit code {exit_code}): {advice}.\n"
            f"{_read_tail(said)}"
        )
    return ivy / "jars"


def _read_tail(said: str) -> str:
    """Return the last lines of the resolver's output, without stack traces and the note about its options."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("\tat ")]
    return "\n".join([line for line in lines if "JDK_JAVA_OPTIONS" not in line][-_TAIL_LINES:])


def _run(lock: JarLock, ivy: Path, log: Path, progress: Progress, environ: Mapping[str, str]) -> int:
    program = log.with_name("nothing.py")
    program.write_text("")
    env = connected_environment(find_java(environ).environment(environ), log.parent)
    # In a locale without UTF-8, Java could not open a cache folder with non-ASCII letters in its name.
    env.update(SPARK_HOME=str(spark_home()), PYSPARK_PYTHON=sys.executable, LC_ALL="C.UTF-8")
    command = [
        str(spark_home() / "bin" / "spark-submit"),
        *("--master", "local[1]", "--packages", lock.coordinates, "--conf", f"spark.jars.ivy={ivy}"),
        str(program),
    ]
    started, told = time.monotonic(), DownloadProgress(lock, progress)
    with log.open("wb") as output:
        resolver = Guarded(command, output=output, env=env)
    try:
        while (elapsed := time.monotonic() - started) < _TIMEOUT_SECONDS:
            told.update(_count_bytes(ivy), elapsed)
            try:
                return resolver.process.wait(_PROGRESS_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        raise RemoteError(f"downloading {lock.coordinates} took over {_TIMEOUT_SECONDS:g} s; {_OTHERWISE}")
    finally:
        if resolver.process.poll() is None:
            os.killpg(resolver.process.pid, signal.SIGKILL)
            resolver.process.wait()
        resolver.dismiss_guard()


def _count_bytes(ivy: Path) -> int:
    # Jars are renamed when they are complete.
    sizes = [_size(path) for path in (ivy / "cache").rglob("*.jar*")]
    return sum(sizes)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
