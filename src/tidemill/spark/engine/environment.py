"""The environment variables of an engine: those of the process that started it, not what Spark made of them.

Spark sets a hash seed, a path for Python and many variables of its own for its Python workers; the programs of tasks
would inherit them. On a cluster, where the driver's variables mean nothing, those of the executor are left.

Invariant: a worker process has the same variables after an engine as before, because Spark may use it again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import PurePath

#: What pyspark sets in the process that has the context.
_SET_IN_DRIVER = frozenset({"SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE"})
#: What an executor sets in the processes of its Python workers.
_SET_IN_WORKERS = frozenset({"PYTHONHASHSEED", "PYTHONUNBUFFERED"})
_PREFIXES = ("SPARK_", "PYSPARK_", "_PYSPARK_", "PYTHON_DAEMON_", "PYTHON_UDF_", "PYTHON_WORKER_")
_PATH = "PYTHONPATH"
#: Before the name of a variable in a Spark configuration.
_GIVEN = "spark.executorEnv."


def list_environment(conf: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a driver's process, without what pyspark sets there, and those of the configuration.

    Args:
        conf: Spark's configuration; `spark.executorEnv.NAME` is a variable for its workers.
        environ: The driver's variables.
    """
    own = {name: value for name, value in environ.items() if name not in _SET_IN_DRIVER}
    return own | {name.removeprefix(_GIVEN): value for name, value in conf.items() if name.startswith(_GIVEN)}


def strip_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a Python worker without what its executor sets there.

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
    """Have the variables of the driver, or with None those of the executor, while the block runs."""
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
