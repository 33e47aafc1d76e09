"""Spark's configuration for live and bounded runs; no other module knows Spark's settings.

`spark.conf` in the user's configuration overrides everything here except what engines require.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.config.settings import SparkSettings
from tidemill.runtime.embedded.java import name_unknown_user

if TYPE_CHECKING:
    from pyspark import SparkContext

#: The name of the package's zip on the executors of a cluster.
PACKAGE_ZIP = "tidemill.zip"
#: How many times Spark starts a failing task of a bounded run, including the first time.
TASK_ATTEMPTS = 4
_SOCKET_FOLDER = "spark.python.unix.domain.socket.dir"
#: When it starts the first Python worker, Spark rejects a longer path for its sockets.
_MAX_SOCKET_FOLDER_BYTES = 61
_EXECUTOR_PATH = "spark.executorEnv.PYTHONPATH"
_LOCAL_CORES = re.compile(r"local\[(\d+|\*)\]")

#: Settings that users may override in `spark.conf`.
DEFAULTS = {
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.unix.domain.socket.enabled": "true",
    # The warden of a cancelled engine cleans up after it, so do not wait 2 s before killing it.
    "spark.python.task.killTimeout": "200ms",
    "spark.deploy.maxExecutorRetries": "-1",
}
#: The settings for a local master. Its JVM misses its own heartbeats only while it is stopped or its host is suspended;
#: after 120 s of that (`spark.network.timeout`) it would drop its only executor, and exit 60 heartbeats later.
LOCAL = {
    **DEFAULTS,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.storage.blockManagerHeartbeatTimeoutMs": "3650d",
}
#: The JVM of a local master only starts tasks and waits for them; these options make it start faster and use less
#: memory.
QUICK_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
#: A JVM with options for two garbage collectors does not start.
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC")
_JAVA_VARIABLES = ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS")
#: Settings that engines require: only their supervisor restarts them, each in a new process.
REQUIRED = {
    "spark.scheduler.mode": "FAIR",
    "spark.python.worker.reuse": "false",
    "spark.python.daemon.module": "tidemill.spark.engine.daemon",
    "spark.task.maxFailures": "1",
    "spark.speculation": "false",
    "spark.pyspark.python": sys.executable,
    "spark.pyspark.driver.python": sys.executable,
}


def is_local(settings: SparkSettings) -> bool:
    """Return whether the engines run on this host, in the driver's JVM."""
    return settings.master == "local" or settings.master.startswith("local[")


def is_local_context(context: SparkContext) -> bool:
    """Return whether the tasks of a running context run on this host, in the driver's JVM."""
    return is_local(SparkSettings(master=context.master))


def spark_conf(settings: SparkSettings, app_name: str, engines: int) -> dict[str, str]:
    """Return the complete Spark configuration.

    Args:
        settings: The `spark` section.
        app_name: The name of the Spark application.
        engines: The number of engines; master `local` gets one more core, so that other jobs can run alongside.

    Example:
        >>> spark_conf(SparkSettings(), "demo", 2)["spark.master"]
        'local[3]'
    """
    conf = {**(LOCAL if is_local(settings) else DEFAULTS), "spark.app.name": app_name, **settings.conf, **REQUIRED}
    if not is_local(settings):
        # Other hosts may have Python elsewhere; and the daemon that forks workers must import the shipped code, too.
        conf["spark.pyspark.python"] = settings.conf.get("spark.pyspark.python", sys.executable)
        own = settings.conf.get(_EXECUTOR_PATH, "")
        conf[_EXECUTOR_PATH] = f"{PACKAGE_ZIP}:{own}" if own else PACKAGE_ZIP
    conf["spark.master"] = f"local[{engines + 1}]" if settings.master == "local" else settings.master
    if is_local(settings):
        conf.setdefault("spark.driver.defaultJavaOptions", _choose_jvm_options(settings))
    log4j = Path(str(importlib.resources.files("tidemill.spark") / "log4j2.properties"))
    options = conf.get("spark.driver.extraJavaOptions", "")
    ours = [] if "log4j" in options else [f"-Dlog4j2.configurationFile={log4j.as_uri()}"]
    if (user := name_unknown_user()) is not None:
        home = os.environ.get("HOME") or tempfile.gettempdir()
        ours += [
            f"-D{name}={value}" for name, value in (("user.name", user), ("user.home", home)) if name not in options
        ]
    if ours:
        conf["spark.driver.extraJavaOptions"] = f"{options} {shlex.join(ours)}".strip()
    return conf


def redirect_sockets(conf: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the setting that puts a local Spark's sockets into its own folder, unless the user has chosen one.

    Spark leaves behind the socket of a Python worker that was killed, by default in the folder for temporary files.

    Args:
        conf: The complete Spark configuration.
        folder: The folder of this Spark, removed when it ends.

    Example:
        >>> redirect_sockets({"spark.master": "local[2]"}, Path("/tmp/x"))
        {'spark.python.unix.domain.socket.dir': '/tmp/x'}
        >>> redirect_sockets({"spark.master": "spark://host:7077"}, Path("/tmp/x"))
        {}
    """
    is_here = is_local(SparkSettings(master=conf["spark.master"]))
    fits = len(os.fsencode(folder)) <= _MAX_SOCKET_FOLDER_BYTES
    return {_SOCKET_FOLDER: str(folder)} if is_here and fits and _SOCKET_FOLDER not in conf else {}


def _choose_jvm_options(settings: SparkSettings) -> str:
    given = [settings.conf.get("spark.driver.extraJavaOptions", ""), *map(os.environ.get, _JAVA_VARIABLES)]
    theirs = any(_COLLECTOR.search(options or "") for options in given)
    return " ".join(option for option in QUICK_JVM if not (theirs and _COLLECTOR.match(option)))


def bounded_conf(settings: SparkSettings, app_name: str, cores: int) -> dict[str, str]:
    """Return the Spark configuration of a bounded run: an ordinary job whose tasks Spark itself restarts.

    Args:
        settings: The `spark` section.
        app_name: The name of the Spark application.
        cores: How many tasks run at once with master `local`.

    Example:
        >>> bounded_conf(SparkSettings(), "demo", 2)["spark.master"]
        'local[2,4]'
    """
    conf = spark_conf(settings, app_name, cores)
    conf["spark.task.maxFailures"] = settings.conf.get("spark.task.maxFailures", str(TASK_ATTEMPTS))
    if settings.master == "local":
        conf["spark.master"] = f"local[{cores}]"
    if only_cores := _LOCAL_CORES.fullmatch(conf["spark.master"]):
        # By default a local master gives up at the first failure of a task.
        conf["spark.master"] = f"local[{only_cores[1]},{conf['spark.task.maxFailures']}]"
    return conf
