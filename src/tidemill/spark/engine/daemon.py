"""The process that Spark forks its Python workers from, with what an engine needs imported already.

Spark starts it in place of `pyspark.daemon` (`spark.python.daemon.module`). An engine that has to be replaced
is running about half a second sooner, and the engines of a host share the memory of their modules.

Invariant: nothing that is imported here starts a thread, because only the forking one would live on.
"""

from __future__ import annotations

import gc
import importlib
import os

from pyspark import daemon

from tidemill.runtime.process.malloc import keep_memory
from tidemill.spark.engine.process_deadline import DAEMON_VARIABLE

#: What every engine imports; sinks and history are imported by the engines that have them.
PRELOADED = (
    "pyspark.worker",
    "asyncio",
    "confluent_kafka",
    "tidemill.pipeline.build",
    "tidemill.spark.bounded.task",
    "tidemill.spark.engine.process",
)
#: Of an engine's messages, packed rows and answers, most are smaller; a user's data may be larger.
_MAPPED_BYTES = 4 * 1024 * 1024
_FREE_BYTES = 32 * 1024 * 1024


def main() -> None:
    """Import, then serve forks until Spark closes standard input."""
    os.environ[DAEMON_VARIABLE] = str(os.getpid())
    for name in PRELOADED:
        importlib.import_module(name)
    # What is there now is never garbage; without this the first collection in a fork would copy all of it.
    gc.freeze()
    # An engine has thousands of messages in flight or waiting to be recorded, none of them garbage, and they leave no
    # cycles (tests/pipeline/test_garbage.py): scanning them after every 700 new objects took a third of its time.
    gc.set_threshold(200_000, 20, 20)
    # What was fetched, sent or packed is freed several times a second, as one piece, and needed again: without this an
    # engine had a page fault for every seventh message.
    keep_memory(_MAPPED_BYTES, _FREE_BYTES)
    daemon.manager()


if __name__ == "__main__":
    main()
