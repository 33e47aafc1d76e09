"""Launches Spark's JVM first of all, while the command imports the handler and everything else.

Invariant: importing this module imports neither pyspark nor Kafka's client.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from tidemill.config.settings import SparkSettings
from tidemill.runtime.process.stop_signals import EarlyStop, find_default
from tidemill.spark.session.session import Spark


@contextlib.contextmanager
def launched_early(settings: SparkSettings) -> Iterator[Spark]:
    """Launch a JVM for a block, which may start it; if it does not, the JVM is ended.

    During the block, a SIGTERM or SIGHUP without another handler ends first the JVM and then this process; so does a
    SIGINT that would end the process anyway.

    Args:
        settings: The `spark` section as it is now.
    """
    spark = Spark(settings, "tidemill", 1)
    with spark.launching(), _killed_by_signals(spark):
        yield spark


@contextlib.contextmanager
def _killed_by_signals(spark: Spark) -> Iterator[None]:
    # Elsewhere, a SIGINT raises KeyboardInterrupt, which unwinds through the block.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    untouched = [number for number, each in before.items() if each is signal.SIG_DFL or isinstance(each, EarlyStop)]
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in untouched:
        early = before[number]
        code = early.code if isinstance(early, EarlyStop) else None
        signal.signal(number, EarlyStop(code, spark.kill_launch))
    try:
        yield
    finally:
        for number in untouched:
            each = before[number]
            signal.signal(number, find_default(number) if isinstance(each, EarlyStop) else each)
