"""The daemon from which Spark forks its Python workers, with the modules of an engine already imported.

Spark starts it in place of `pyspark.daemon` (`spark.python.daemon.module`). A replacement engine starts about half a
second sooner, and the engines of a host share the memory of their modules.

Invariant: no module imported here starts a thread, because only the forking thread survives a fork.
"""

from __future__ import annotations

import gc
import importlib
import os

from pyspark import daemon

from tidemill.runtime.process.malloc import keep_memory
from tidemill.spark.engine.process_deadline import DAEMON_VARIABLE

#: The imports of every engine; sinks and history are imported by the engines that use them.
PRELOADED = (
    "pyspark.worker",
    "asyncio",
    "confluent_kafka",
    "tidemill.pipeline.build",
    "tidemill.spark.bounded.task",
    "tidemill.spark.engine.process",
)
#: Most of an engine's messages, packed rows and responses are smaller than this; user data may be larger.
_MAPPED_BYTES = 4 * 1024 * 1024
_FREE_BYTES = 32 * 1024 * 1024


def main() -> None:
    """Import the modules, then serve forks until Spark closes standard input."""
    os.environ[DAEMON_VARIABLE] = str(os.getpid())
    for name in PRELOADED:
        importlib.import_module(name)
    # Objects that exist now never become garbage; without this, the first collection in a fork would copy all of them.
    gc.freeze()
    # An engine holds thousands of messages in flight or waiting to be recorded. They are not garbage and form no cycles
    # (tests/pipeline/test_garbage.py), but collecting after every 700 new objects took a third of the engine's time.
    gc.set_threshold(200_000, 20, 20)
    # Fetched, sent and packed data is freed and allocated again as large blocks several times a second. Returning the
    # memory to the system in between costs a page fault for every seventh message.
    keep_memory(_MAPPED_BYTES, _FREE_BYTES)
    daemon.manager()


if __name__ == "__main__":
    main()
