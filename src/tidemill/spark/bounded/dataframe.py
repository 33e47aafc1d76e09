"""DataFrame mode: runs the handler over rows, batch or streaming, with the same engine.

Spark recomputes a DataFrame for every action on it, which would deliver again. So nothing lazy is returned: the rows
are processed at once, in one Spark job, and the returned DataFrame reads the written outcomes.

Invariants: columns are checked before anything runs; a folder holds the outcomes of one run. A stream has one folder
per micro-batch, which is replaced when Spark repeats that micro-batch.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, TidemillError
from tidemill.pipeline.bounded import make_bounded_settings
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.files.folders import OwnedFolder
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.link.frames import LinkAddress
from tidemill.runtime.link.progress import EngineProgress
from tidemill.runtime.log.setup import choose_format
from tidemill.spark.bounded.letter_run import check_letters, forget_letters, letter_run
from tidemill.spark.bounded.recording import BoundedRecorder, RecordedRun, record_bounded_run, watch_end
from tidemill.spark.bounded.run import BoundedRun
from tidemill.spark.bounded.schema import outcomes_frame
from tidemill.spark.bounded.task import run_rows
from tidemill.spark.engine.environment import list_environment
from tidemill.spark.engine.process import EngineJob
from tidemill.spark.preflight import make_handler, refuse_no_sinks, run_startup, with_full_paths
from tidemill.spark.progress import sum_progress
from tidemill.spark.session.conf import is_local_context
from tidemill.spark.session.packaging import list_own_folders, pack_handler, ship_package

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

log = structlog.get_logger(__name__)

_BYTES = "binary or string"
_WHOLE = "a whole number"
_HEADERS = "an array of structs of key (string) and value (binary), as in Spark's Kafka source"
#: For each column: a description of its type, the Spark types it may have, and the expression that converts it.
_COLUMNS: Mapping[str, tuple[str, frozenset[str], str]] = {
    "key": (_BYTES, frozenset({"binary", "string", "void"}), "CAST(`key` AS BINARY)"),
    "value": (_BYTES, frozenset({"binary", "string", "void"}), "CAST(`value` AS BINARY)"),
    "topic": ("string", frozenset({"string"}), "`topic`"),
    "partition": (_WHOLE, frozenset({"tinyint", "smallint", "int"}), "CAST(`partition` AS INT)"),
    "offset": (_WHOLE, frozenset({"tinyint", "smallint", "int", "bigint"}), "CAST(`offset` AS BIGINT)"),
    "timestamp": ("a timestamp", frozenset({"timestamp"}), "unix_millis(`timestamp`)"),
    "headers": (_HEADERS, frozenset({"array<struct<key:string,value:binary>>"}), "`headers`"),
}
_REQUIRED = ("key", "value")
_POSITION = ("topic", "partition", "offset")


def process(
    df: DataFrame,
    handler: Handler[Any, Any] | type[Handler[Any, Any]],
    config: Settings | str | Path | None = None,
    *,
    outcomes: str | Path | None = None,
    checkpoint: str | Path | None = None,
    trigger: Mapping[str, Any] | None = None,
) -> DataFrame | StreamingQuery:
    """Run a handler over the rows of a DataFrame: each row is a message.

    Args:
        df: A DataFrame with the columns key and value, and optionally topic, partition, offset, timestamp and headers;
            other columns are ignored.
        handler: The handler, or its class.
        config: Settings or a YAML file; None: the file named by TIDEMILL_CONFIG, or the defaults. The source topic is
            not read. Dead letters go to the dead-letter topic, or to files if `dlq.path` is set.
        outcomes: An empty or new folder for the outcomes; on a cluster it must be shared by all hosts. Optional for a
            batch on this host alone; the outcomes are then deleted when this process ends. A stream keeps the same
            folder at every start.
        checkpoint: For a stream: the folder in which Spark stores its position.
        trigger: For a stream: the arguments of Spark's `trigger`, for example `{"availableNow": True}`.

    Returns:
        For a batch: a DataFrame over its outcomes, one row per message; the work is already done, exactly once. For a
        stream: the running query; its outcomes are in the folder, with the number of the micro-batch in the column
            batch.

    Raises:
        ConfigError: A column is missing or has a wrong type, or another argument is invalid.
        TidemillError: The run failed; some rows may have been delivered.

    Example:
        >>> done = process(spark.read.parquet("orders"), OrderHandler, "pipeline.yaml")  # doctest: +SKIP
        >>> done.groupBy("status").count().show()  # doctest: +SKIP
    """
    check_columns(df)
    run = _Rows(df.sparkSession, handler, config)
    if df.isStreaming:
        return run.stream(df, outcomes, checkpoint, trigger)
    if checkpoint is not None or trigger is not None:
        raise ConfigError("checkpoint and trigger apply to streams only; leave them out for a batch DataFrame")
    folder = run.own_folder(outcomes)
    run.only_batch(df, folder)
    return outcomes_frame(df.sparkSession, folder)


def check_columns(df: DataFrame) -> None:
    """Reject a DataFrame whose rows cannot be messages.

    Raises:
        ConfigError: A column is missing or has a wrong type; the message names the column and the required type.
    """
    types = {field.name: field.dataType.simpleString() for field in df.schema.fields}
    for name, (wanted, allowed, _) in _COLUMNS.items():
        if name not in types:
            if name in _REQUIRED:
                raise ConfigError(
                    f"the DataFrame has no column {name!r} ({wanted}) among {', '.join(types) or 'its columns'}; "
                    f"rename a column with withColumnRenamed, or add one with withColumn({name!r}, lit(None))"
                )
        elif types[name] not in allowed:
            raise ConfigError(
                f"the column {name!r} of the DataFrame is {types[name]}, but must be {wanted}; cast it, or drop it if "
                "it is not part of the message"
            )


class _Rows:
    """A handler after its `on_startup`, ready to run over rows in a session."""

    def __init__(
        self,
        session: SparkSession,
        handler: Handler[Any, Any] | type[Handler[Any, Any]],
        config: Settings | str | Path | None,
    ) -> None:
        settings = config if isinstance(config, Settings) else load_settings(config)
        has_debug = "debug" in settings.model_fields_set
        instance = make_handler(handler)
        self._settings = make_bounded_settings(with_full_paths(run_startup(instance, settings)))
        if not has_debug:  # library use must not leave recordings behind unless the settings ask for them
            self._settings.debug.enabled = False
        refuse_no_sinks(self._settings)
        check_letters(self._settings)
        self._worker = f"{find_worker_name(settings)}.rows"
        self._recorder: BoundedRecorder | None = None
        self._run: BoundedRun | None = None
        self._past: EngineProgress = EngineProgress()
        self._packed = pack_handler(instance)
        self._session = session
        context = session.sparkContext
        self._context = context
        ship_package(context)
        if context.getConf().get("spark.speculation", "false") == "true":
            log.warning(
                "spark.speculation is on, so Spark runs slow tasks twice and both copies deliver; set it to false"
            )

    def own_folder(self, given: str | Path | None) -> Path:
        """Create and return the folder for a batch's outcomes."""
        if given is None:
            if not is_local_context(self._context):
                raise ConfigError("on a cluster, pass outcomes=... with a folder that all hosts share")
            # In a subfolder, because Spark would read all files of the owned folder.
            return _make_folder(_own_at_exit(OwnedFolder("tidemill-outcomes-")) / "rows")
        folder = Path(given).absolute()
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"the outcomes folder {folder} is not empty; use another one")
        _make_folder(folder)
        return folder

    def stream(
        self,
        df: DataFrame,
        outcomes: str | Path | None,
        checkpoint: str | Path | None,
        trigger: Mapping[str, Any] | None,
    ) -> StreamingQuery:
        """Start a query that processes each micro-batch."""
        if outcomes is None or checkpoint is None:
            raise ConfigError("a stream needs two persistent folders; pass outcomes=... and checkpoint=...")
        root = _make_folder(Path(outcomes).absolute())

        def each(batch: DataFrame, number: int) -> None:
            folder = root / f"batch={number}"
            # If Spark repeats this micro-batch after a failure, discard the leftovers of the failed run.
            forget_letters(self._settings, folder)
            shutil.rmtree(folder, ignore_errors=True)
            self.batch(batch, _make_folder(folder))

        writer = df.writeStream.foreachBatch(each).option("checkpointLocation", str(Path(checkpoint).absolute()))
        # One recording covers all micro-batches of the stream.
        with contextlib.ExitStack() as stack:
            self._recorder = stack.enter_context(self._record("a stream of rows", root))
            query: StreamingQuery = (writer.trigger(**trigger) if trigger else writer).start()
            if self._recorder is not None:
                kept = stack.pop_all()
                atexit.register(kept.close)
                watch_end(query.awaitTermination, kept.close)
        return query

    def _record(self, about: str, folder: Path) -> AbstractContextManager[BoundedRecorder | None]:
        run = RecordedRun(about, {"outcomes": str(folder)}, self._progress, lambda: "done")
        return record_bounded_run(self._settings, self._worker, run)

    def _progress(self) -> EngineProgress:
        """Return the sums over all batches so far; callable from any thread."""
        past, run = self._past, self._run
        return past if run is None else sum_progress([past, run.progress()], [])

    def only_batch(self, df: DataFrame, folder: Path) -> None:
        """Process the rows of a batch DataFrame."""
        with self._record("a DataFrame", folder) as self._recorder:
            self.batch(df, folder)

    def batch(self, df: DataFrame, folder: Path) -> None:
        """Process the rows of one batch or micro-batch."""
        given = [name for name in _COLUMNS if name in df.columns]
        rows = df.selectExpr(*(f"{_COLUMNS[name][2]} AS `{name}`" for name in given))
        if "offset" in given:
            # Sort as in a topic, so that duplicate rows of one message follow each other.
            rows = rows.sortWithinPartitions(*(name for name in _POSITION if name in given))
        with letter_run(self._settings, folder) as letters, self._running() as run:
            job, target = letters.of(self._make_job(run.address)), str(folder)

            def work(index: int, part: Iterator[Any]) -> Iterator[bytes]:
                return run_rows(job, target, given, index, part)

            # Not mapInArrow, which would require pandas; the engine, not the conversion, is the bottleneck.
            results = run.results(rows.rdd.mapPartitionsWithIndex(work).collect)
        written = len(list(folder.glob("part-*")))
        if written < len(results):
            raise ConfigError(
                f"only {written} of {len(results)} parts of the outcomes are in {folder}: engines on other hosts wrote "
                "the others locally; use a folder on storage that all hosts share"
            )
        if any(not result.complete for result in results):
            raise TidemillError("the engines were stopped before all rows were processed; run it again")
        letters.check(results)

    @contextlib.contextmanager
    def _running(self) -> Iterator[BoundedRun]:
        """Open the driver's side of a batch, and add up its counts afterwards."""
        with BoundedRun(self._context, recorder=self._recorder) as run:
            self._run = run
            try:
                yield run
            finally:
                self._past, self._run = self._progress(), None

    def _make_job(self, address: LinkAddress) -> EngineJob:
        settings = self._settings
        about = {"worker_id": find_worker_name(settings), "consumer_group": settings.kafka.consumer_group}
        environ = None
        if is_local_context(self._context):
            environ = list_environment(dict(self._context.getConf().getAll()))
            # Engines have no terminal, but the JVM relays their log lines to this process's terminal.
            form = choose_format(settings.logging)
            settings = settings.model_copy(update={"logging": settings.logging.model_copy(update={"format": form})})
        folders = list_own_folders()
        return EngineJob(
            0, 0, self._worker, address, settings, self._packed, about, import_path=folders, environ=environ
        )


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the outcomes folder {folder}: {error.strerror}; use another one") from error
    return folder


def _own_at_exit(folder: OwnedFolder) -> Path:
    """Keep a folder until this process ends; if the process is killed, a later one removes the folder."""
    atexit.register(folder.cleanup)
    return folder.path
