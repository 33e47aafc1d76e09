"""Archives of classes (class data sharing) for the JVMs that tests start dozens of times: Spark's and the broker's.

`python -m tests.archives` creates what is missing: Spark's in the way in which any pipeline that runs for a while
creates it, the broker's from what a first broker loads. A JVM that starts with one takes half the processor time. Tests
run without them just as well: a JVM ignores an archive that is not its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from tests.until import wait_until

from tidemill.config.settings import SparkSettings
from tidemill.core.errors import TidemillError
from tidemill.runtime.embedded import broker
from tidemill.runtime.embedded.jars import kafka_classpath
from tidemill.runtime.embedded.java import find_java
from tidemill.runtime.files.folders import writable_cache_folder

#: Nothing is said about an archive that is ignored.
_SILENT = ("-Xlog:disable", "-Xlog:all=error:stderr")


def broker_archive() -> Path | None:
    """Return where the archive of the broker is, or will be; None if it is not known which broker that is."""
    cache = writable_cache_folder() / "tests"
    jars = sorted(cache.parent.glob("jars/kafka_*/*.jar"))
    if not jars:
        return None
    name = hashlib.sha256("\n".join([find_java().identity, *map(str, jars), sys.prefix]).encode()).hexdigest()[:24]
    return cache / f"broker-{name}.jsa"


def use_broker_archive() -> None:
    """Let the brokers that this process starts use their archive, if there is one."""
    try:
        archive = broker_archive()
    except TidemillError:  # no Java, say, which is the tests' own matter
        return
    if archive is not None and archive.is_file():
        broker._JVM_OPTIONS = (*broker._JVM_OPTIONS, f"-XX:SharedArchiveFile={archive}", *_SILENT)


def create_broker_archive() -> None:
    """Start a broker and end it; what it loaded is the archive."""
    kafka_classpath()
    archive = broker_archive()
    if archive is None or archive.is_file():
        return
    archive.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        new = Path(folder) / "new.jsa"
        plain = broker._JVM_OPTIONS
        broker._JVM_OPTIONS = (*plain, f"-XX:ArchiveClassesAtExit={new}", *_SILENT)
        try:
            with broker.EmbeddedBroker(Path(folder) / "data") as running:
                running.create_topic("any", partitions=4)
        finally:
            broker._JVM_OPTIONS = plain
        if new.is_file():
            shutil.move(new, archive)


def find_spark_archive() -> Path | None:
    """Return the archive with which a Spark of this process starts; None if there is none."""
    from tidemill.runtime.embedded.jar_resolver import spark_home
    from tidemill.spark.session.conf import spark_conf
    from tidemill.spark.session.kept_launch import find_kept_launch

    kept = find_kept_launch(find_java(), spark_home(), spark_conf(SparkSettings(), "archive", 2))
    return kept.archive if kept is not None and kept.uses_archive else None


def create_spark_archive() -> None:
    """Run a job in Spark until the archive is there that its later starts use."""
    from tidemill.spark.session import launching
    from tidemill.spark.session.session import Spark

    launching.ARCHIVE_AFTER_SECONDS = 0.0
    spark = Spark(SparkSettings(), "archive", 2)
    spark.start()
    try:
        spark.context.parallelize(range(4), 2).map(str).collect()
        kept = spark._launch._kept
        if kept is not None and kept.wants_archive:
            spark.note_running()
            # It is created at the lowest priority; what it would save is not worth more than this.
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not kept.wants_archive, 240)
    finally:
        spark.stop()


if __name__ == "__main__":
    os.environ["TIDEMILL_METRICS__ENABLED"] = "false"
    beside = threading.Thread(target=create_broker_archive)
    beside.start()
    if find_spark_archive() is None:
        create_spark_archive()
    beside.join()
