"""DataFrame mode: the handler over rows, batch or streaming, through the same engine.

Spark recomputes a DataFrame for every action on it, which would deliver again. So nothing lazy is returned: the rows
are processed at once, in one Spark job, and the returned DataFrame reads the outcomes that were written.

Invariants: columns are checked before anything runs; a folder holds the outcomes of one run, and of a stream one folder
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
_HEADERS = "an array of structs of key (string) and value (binary), as Spark's Kafka source gives them"
#: Each column with the types it may have, as text and as Spark calls them, and what it becomes.
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
_PLACE = ("topic", "partition", "offset")


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
        df: With the columns key and value, and optionally topic, partition, offset, timestamp and headers; others are
            ignored.
        handler: The handler, or its class.
        config: Settings or their file; None: the one that TIDEMILL_CONFIG names, or the defaults. The source topic is
            not read; dead letters go to the dead-letter topic, or with `dlq.path` to files.
        outcomes: An empty or new folder for the outcomes; on a cluster it has to be shared. Optional for a batch
            on this host alone; then they are deleted with this process. That of a stream is the same at every start.
        checkpoint: Of a stream: where Spark keeps its position.
        trigger: Of a stream: the arguments of Spark's `trigger`, for example `{"availableNow": True}`.

    Returns:
        Of a batch: a DataFrame over its outcomes, one row per message; the work is done then, once. Of a stream: the
        running query; its outcomes are in the folder, with the number of the micro-batch in the column batch.

    Raises:
        ConfigError: A column is missing or has a wrong type, or another argument makes no sense.
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
        raise ConfigError("checkpoint and trigger are for streams, and this DataFrame is a batch; leave them out")
    folder = run.own_folder(outcomes)
    run.only_batch(df, folder)
    return outcomes_frame(df.sparkSession, folder)


def check_columns(df: DataFrame) -> None:
    """Refuse a DataFrame whose rows cannot be messages.

    Raises:
        ConfigError: Names the column, what it is, and what it has to be.
    """
    types = {field.name: field.dataType.simpleString() for field in df.schema.fields}
    for name, (wanted, allowed, _) in _COLUMNS.items():
        if name not in types:
            if name in _REQUIRED:
                raise ConfigError(
                    f"the DataFrame has no column {name!r} (it has {', '.join(types) or 'none'}); it has to be "
                    f"{wanted}: rename a column with withColumnRenamed, or add one with withColumn({name!r}, lit(None))"
                )
        elif types[name] not in allowed:
            raise ConfigError(
                f"the column {name!r} of the DataFrame is {types[name]}, but has to be {wanted}; cast it, or drop it "
                "if it is not meant to be the message's"
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
        if not has_debug:  # a DataFrame in somebody's own program leaves no files that nobody asked for
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
            log.warning("spark.speculation is on: Spark runs slow tasks twice, and both deliver; set it to false")

    def own_folder(self, given: str | Path | None) -> Path:
        """Create and return the folder for a batch's outcomes."""
        if given is None:
            if not is_local_context(self._context):
                raise ConfigError("on a cluster outcomes need a folder that all hosts share; name it: outcomes=...")
            # In one of its own: Spark reads all files of a folder.
            return _make_folder(_own_at_exit(OwnedFolder("tidemill-outcomes-")) / "rows")
        folder = Path(given).absolute()
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"the folder for outcomes {folder} is not empty; name another one")
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
            raise ConfigError("a stream needs outcomes=... and checkpoint=..., two folders that outlive it")
        root = _make_folder(Path(outcomes).absolute())

        def each(batch: DataFrame, number: int) -> None:
            folder = root / f"batch={number}"
            # Repeated after a failure: what it left then is reprocessed now.
            forget_letters(self._settings, folder)
            shutil.rmtree(folder, ignore_errors=True)
            self.batch(batch, _make_folder(folder))

        writer = df.writeStream.foreachBatch(each).option("checkpointLocation", str(Path(checkpoint).absolute()))
        # One recording for all of its micro-batches, until it ends.
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
        """Return the sums over all batches so far; from any thread."""
        past, run = self._past, self._run
        return past if run is None else sum_progress([past, run.progress()], [])

    def only_batch(self, df: DataFrame, folder: Path) -> None:
        """Process the rows of a DataFrame that is not a stream, once."""
        with self._record("a DataFrame", folder) as self._recorder:
            self.batch(df, folder)

    def batch(self, df: DataFrame, folder: Path) -> None:
        """Process the rows of a batch, once."""
        given = [name for name in _COLUMNS if name in df.columns]
        rows = df.selectExpr(*(f"{_COLUMNS[name][2]} AS `{name}`" for name in given))
        if "offset" in given:
            # In order, as from a topic; and two rows that are the same message come one after the other.
            rows = rows.sortWithinPartitions(*(name for name in _PLACE if name in given))
        with letter_run(self._settings, folder) as letters, self._running() as run:
            job, target = letters.of(self._make_job(run.address)), str(folder)

            def work(index: int, part: Iterator[Any]) -> Iterator[bytes]:
                return run_rows(job, target, given, index, part)

            # Not mapInArrow, which would bring pandas along; the engine is slower than either.
            results = run.results(rows.rdd.mapPartitionsWithIndex(work).collect)
        written = len(list(folder.glob("part-*")))
        if written < len(results):
            raise ConfigError(
                f"only {written} of {len(results)} parts of the outcomes are in {folder}: engines on other hosts wrote "
                "them there; name a folder on storage that all hosts share"
            )
        if any(not result.complete for result in results):
            raise TidemillError("the engines were told to stop before all rows were done")
        letters.check(results)

    @contextlib.contextmanager
    def _running(self) -> Iterator[BoundedRun]:
        """Run the driver's side of a batch, and keep what it counted."""
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
            # Engines have no terminal, but the JVM passes what they log on to that of this process.
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
        raise ConfigError(
            f"the folder for outcomes {folder} cannot be created: {error.strerror}; choose another one"
        ) from error
    return folder


def _own_at_exit(folder: OwnedFolder) -> Path:
    """Keep a folder until this process ends; if it is killed, the next one removes it."""
    atexit.register(folder.cleanup)
    return folder.path
