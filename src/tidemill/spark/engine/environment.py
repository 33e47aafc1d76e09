"""The environment variables of an engine: the environment of the process that started it, without Spark's additions.

Spark sets a hash seed, a Python path and many variables of its own for its Python workers, and the programs of tasks
would inherit them. On a cluster, where the driver's variables are meaningless, the engine keeps those of the executor.

Invariant: a worker process has the same variables after an engine as before, because Spark may reuse the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import PurePath

#: Variables that pyspark sets in the driver's process.
_SET_IN_DRIVER = frozenset({"SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE"})
#: Variables that an executor sets in its Python workers.
_SET_IN_WORKERS = frozenset({"PYTHONHASHSEED", "PYTHONUNBUFFERED"})
_PREFIXES = ("SPARK_", "PYSPARK_", "_PYSPARK_", "PYTHON_DAEMON_", "PYTHON_UDF_", "PYTHON_WORKER_")
_PATH = "PYTHONPATH"
#: The prefix of environment variables in a Spark configuration.
_GIVEN = "spark.executorEnv."


def list_environment(conf: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a driver's environment without pyspark's variables, plus the variables in its Spark configuration.

    Args:
        conf: The Spark configuration; `spark.executorEnv.NAME` is a variable for its workers.
        environ: The driver's variables.
    """
    own = {name: value for name, value in environ.items() if name not in _SET_IN_DRIVER}
    return own | {name.removeprefix(_GIVEN): value for name, value in conf.items() if name.startswith(_GIVEN)}


def strip_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a Python worker without those that its executor sets.

    Example:
        >>> strip_environment({"HOME": "/", "PYTHONHASHSEED": "0", "PYTHONPATH": "/s/python/lib/pyspark.zip:/own"})
        {'HOME': '/', 'PYTHONPATH': '/own'}
    """
    own = {
        name: value for name, value in environ.items() if name not in _SET_IN_WORKERS and not name.startswith(_PREFIXES)
    }
    folders = [folder for folder in own.pop(_PATH, "").split(os.pathsep) if folder and not _is_spark(folder)]
    return own | ({_PATH: os.pathsep.join(folders)} if folders else {})


@contextlib.contextmanager
def in_environment(given: Mapping[str, str] | None) -> Iterator[None]:
    """Use the given variables during the block; None: the executor's variables."""
    before = dict(os.environ)
    _replace(strip_environment(before) if given is None else given)
    try:
        yield
    finally:
        _replace(before)


def _replace(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _is_spark(folder: str) -> bool:
    name = PurePath(folder).name
    return name == "pyspark.zip" or name.startswith(("py4j-", "spark-core_"))
