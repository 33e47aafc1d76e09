"""DataFrame mode in a user's own session: rows in, outcomes out, delivered once however often they are looked at."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.archives import find_spark_archive
from tests.jsonl import read_lines
from tests.spark.backfill_handlers import Broken, Flawed, Known, Lined, Shuffled, Unready
from tests.until import wait_until

from tidemill import CollectResult, ExecutorTask, FilePayload, Handler, PrecomputedResult
from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, HandlerError, TidemillError
from tidemill.deadletters.letter import decode_letter
from tidemill.deadletters.opening import open_letters
from tidemill.deadletters.reader import FoundLetter
from tidemill.pipeline.reports.history import HistoryRows, HistoryWriter
from tidemill.pipeline.reports.report import HistoryStatus
from tidemill.pipeline.tasks.environment import filter_environment
from tidemill.recorder.reading.queries import EventQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.embedded.java import find_java
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE
from tidemill.spark import backfill, process
from tidemill.spark.bounded.schema import OUTCOME_SCHEMA
from tidemill.spark.engine.environment import list_environment
from tidemill.spark.session.conf import QUICK_JVM
from tidemill.testing.kafka import consume, produce, unique_name

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session as a user makes it: no setting of ours that matters to rows, workers used again."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    archive = find_spark_archive()
    options = [*QUICK_JVM, *([f"-XX:SharedArchiveFile={archive}"] if archive is not None else [])]
    os.environ["JAVA_HOME"] = str(find_java().home)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.extraJavaOptions", " ".join(options))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    gateway = SparkContext._gateway
    yield session
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(60)
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def settings(embedded_kafka: Any, tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": unique_name("rows")},
            "sinks": {"filesystem": {"out": {"base_path": str(tmp_path / "out")}}},
            "debug": {"enabled": False},
        }
    )


def rows_of(session: Any, count: int, schema: str = "key string, value string", **fields: Any) -> Any:
    return session.createDataFrame([(str(n), json.dumps({"n": n, **fields})) for n in range(count)], schema)


def out_file(settings: Settings) -> Path:
    return Path(settings.sinks.filesystem["out"].base_path) / "out.jsonl"


def seen(settings: Settings) -> Counter[int]:
    path = out_file(settings)
    return Counter(line["n"] for line in read_lines(path))


def test_a_batch_is_delivered_once_however_often_its_outcomes_are_read(session, settings):
    threads = threading.active_count()
    done = process(rows_of(session, 3_000).repartition(3), Known, settings)
    assert seen(settings) == Counter(range(3_000))
    assert done.count() == 3_000
    assert {row.status for row in done.collect()} == {"done"}
    assert sorted(int(bytes(row.key)) for row in done.collect()) == list(range(3_000))
    assert seen(settings) == Counter(range(3_000)), "looking at the outcomes delivered again"
    # The worker processes go on with other work of the session, as if nothing had been.
    assert session.sparkContext.parallelize(range(100), 4).map(lambda n: n + 1).sum() == 5_050
    assert threading.active_count() <= threads + 2


def test_tasks_have_the_environment_of_this_process_and_no_descriptors(session, settings, tmp_path, monkeypatch):
    for name, value in (("PYTHONUNBUFFERED", "mine"), ("SPARK_OWN", "1"), ("OWN", "ümlaut"), ("DB_PASSWORD", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    script = f"cat /proc/$$/environ > {tmp_path}/environ; exec ls /proc/self/fd"

    class Looking(Known):
        async def arrange(self, messages, pending):
            return [ExecutorTask("look", source_offsets=[0], binary_path="/bin/sh", args=["-c", script])]

        async def on_task_complete(self, result):
            (tmp_path / "descriptors").write_text(result.stdout)

    process(rows_of(session, 1), Looking, settings)
    pairs = (tmp_path / "environ").read_bytes().rstrip(b"\0").split(b"\0")
    found = dict(pair.decode().split("=", 1) for pair in pairs)
    assert found.pop(ENGINE_ID_VARIABLE)
    assert found == filter_environment(list_environment({}), settings.executor.env_inherit_deny)
    assert (tmp_path / "descriptors").read_text().split() == ["0", "1", "2", "3"]  # that of the listing


def test_rows_go_through_transform_and_those_it_refuses_are_outcomes_too(session, settings):
    bad = session.createDataFrame([("bad", '{"n": -1, "fail": true}')], "key string, value string")
    rows = rows_of(session, 1_000).union(bad).repartition(3)
    done = process(rows, Lined, settings).collect()
    assert seen(settings) == Counter(range(1_000))
    assert Counter(row.status for row in done) == {"done": 1_000, "rejected": 1}
    (refused,) = [row for row in done if row.status == "rejected"]
    assert (bytes(refused.key), refused.tasks) == (b"bad", 0)
    assert "LookupError: no such customer" in refused.error
    (letter,) = consume(settings.kafka.brokers, f"{settings.kafka.source_topic}_dlq", 1)
    assert decode_letter(letter.value()).kind.value == "transform"


@pytest.mark.parametrize(("terminal", "form"), [(True, "console"), (False, "json")])
def test_engines_log_for_people_if_the_session_has_a_terminal(session, settings, monkeypatch, terminal, form):
    class Telling(Known):
        async def on_ready(self, config, sinks):
            self.form = config.logging.format

        async def arrange(self, messages, pending):
            told = {"precomputed": PrecomputedResult(), "metadata": {"n": self.form}}
            return [ExecutorTask(f"t-{m.offset}", source_offsets=[m.offset], **told) for m in messages]

    monkeypatch.setattr("tidemill.runtime.log.setup._is_terminal", lambda stream: terminal)
    process(rows_of(session, 1), Telling, settings)
    assert seen(settings) == Counter([form])


def test_columns_become_what_a_message_has(session, settings):
    from pyspark.sql import functions as f

    class Telling(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            told = [
                {
                    "n": json.loads(m.value)["n"],
                    "place": [m.topic, m.partition, m.offset],
                    "at": m.timestamp,
                    "headers": [[name, value.decode()] for name, value in m.headers],
                    "key": m.key,
                }
                for m in messages
            ]
            return [
                ExecutorTask(f"t{row['n']}", precomputed=PrecomputedResult(), metadata=row, source_offsets=(m.offset,))
                for row, m in zip(told, messages, strict=True)
            ]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(path="out.jsonl", data=result.task.metadata)])

    headers = f.array(f.struct(f.lit("h").alias("key"), f.lit(b"v").alias("value")))
    rows = (
        session.range(20)
        .select(
            f.lit(None).alias("key"),
            f.concat(f.lit('{"n": '), f.col("id").cast("string"), f.lit("}")).cast("binary").alias("value"),
            f.lit("orders").alias("topic"),
            (f.col("id") % 2).cast("int").alias("partition"),
            (100 - f.col("id")).alias("offset"),
            f.timestamp_millis(f.lit(1_700_000_000_123)).alias("timestamp"),
            headers.alias("headers"),
            f.lit(1.5).alias("something_else"),
        )
        .coalesce(1)
    )
    done = process(rows, Telling, settings)
    lines = [json.loads(line) for line in out_file(settings).read_text().splitlines()]
    for row in lines:
        assert row["place"] == ["orders", row["n"] % 2, 100 - row["n"]]
        assert (row["at"], row["headers"], row["key"]) == (1_700_000_000_123, [["h", "v"]], None)
    assert [row["place"][2] for row in lines if row["place"][1] == 0] == list(range(82, 101, 2)), "not in order"
    assert {(row.topic, row.partition, row.offset) for row in done.collect()} == {tuple(r["place"]) for r in lines}


@pytest.mark.parametrize(
    ("expressions", "said"),
    [
        (["value"], r"no column 'key' \(binary or string\) among value.*withColumn\('key', lit\(None\)\)"),
        (["key"], "no column 'value'"),
        (["CAST(1 AS INT) AS key", "value"], "column 'key' of the DataFrame is int, but must be binary or string"),
        (["key", "value", "'x' AS offset"], "'offset' of the DataFrame is string, but must be a whole number"),
        (["key", "value", "1L AS timestamp"], "'timestamp' of the DataFrame is bigint, but must be a timestamp"),
        (["key", "value", "map('a', 'b') AS headers"], "'headers' of the DataFrame is map<.*array of structs"),
    ],
)
def test_columns_that_are_missing_or_of_a_wrong_type_are_named(session, settings, expressions, said):
    with pytest.raises(ConfigError, match=said):
        process(rows_of(session, 1).selectExpr(*expressions), Known, settings)
    assert not out_file(settings).exists()


def test_what_goes_wrong_with_a_batch_is_told_by_its_handlers_words(session, settings, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ConfigError, match="full is not empty"):
        process(rows_of(session, 1), Known, settings, outcomes=tmp_path / "full")
    with pytest.raises(ConfigError, match="checkpoint and trigger apply to streams only"):
        process(rows_of(session, 1), Known, settings, checkpoint=tmp_path / "c")
    with pytest.raises(HandlerError, match="range 0 failed: on_ready raised LookupError: no such table"):
        process(rows_of(session, 1).coalesce(1), Unready, settings)
    twice = rows_of(session, 1).selectExpr("key", "value", "7 AS offset")
    with pytest.raises(TidemillError, match="offset 7; drop the duplicates"):
        process(twice.union(twice).coalesce(1), Known, settings)


@pytest.mark.long
def test_rows_whose_engine_hangs_again_and_again_end_the_run_by_name(session, settings, monkeypatch):
    monkeypatch.setattr("tidemill.spark.bounded.run.SILENT_SECONDS", 2.0)

    class Hanging(Known):
        async def arrange(self, messages, pending):
            import time

            time.sleep(3_600)

    with pytest.raises(TidemillError, match="range 0 failed: its engine was silent for 2 s, 4 times"):
        process(rows_of(session, 1).coalesce(1), Hanging, settings)
    assert session.sparkContext.parallelize(range(100), 4).map(lambda n: n + 1).sum() == 5_050


def test_rows_are_recorded_only_if_the_configuration_has_a_debug_section(session, settings, tmp_path, monkeypatch):
    db = tmp_path / "recordings"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fields = settings.model_dump(exclude_unset=True, exclude={"debug"})
    process(rows_of(session, 5), Known, Settings.model_validate(fields))
    assert not list((tmp_path / "home").rglob("*.db"))
    recorded = Settings.model_validate({**fields, "debug": {"db_dir": str(db)}})
    process(rows_of(session, 5, fail=True).coalesce(1), Flawed, recorded)
    (period,) = Reader(db).list_recordings()
    assert (period.bounded, period.live, period.messages) == (True, False, 5)
    assert sum(point.consumed for point in Reader(db).read_counts(0, 2**52).points) == 5


def test_a_stream_has_one_recording_for_all_of_its_batches(session, settings, tmp_path):
    db, source = tmp_path / "recordings", tmp_path / "in"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_text(json.dumps({"n": 1, "fail": True}) + "\n")
    settings.debug = DebugSettings(db_dir=str(db))
    stream = session.readStream.option("maxFilesPerTrigger", 1).text(str(source))
    query = process(
        stream.selectExpr("CAST(NULL AS STRING) AS key", "value"),
        Flawed,
        settings,
        outcomes=tmp_path / "outcomes",
        checkpoint=tmp_path / "checkpoint",
        trigger={"availableNow": True},
    )
    query.awaitTermination(100)
    assert not query.isActive
    reader = Reader(db)
    wait_until(lambda: reader.find_events(EventQuery(kinds=("run_ended",))).rows, 60)
    (ended,) = reader.find_events(EventQuery(kinds=("run_ended",))).rows
    assert (ended.event.data["messages_done"], ended.event.data["dead_lettered"]) == (2, 2)
    wait_until(lambda: not any(period.live for period in reader.list_recordings()), 60)
    (period,) = reader.list_recordings()
    assert period.messages == 2


def test_dead_letters_of_rows_go_to_the_topic_and_a_history_is_written(session, settings, tmp_path):
    settings.history.path = str(tmp_path / "history")
    rows = session.createDataFrame([("a", '{"n": 1}'), ("b", "no json"), ("c", None)], "key string, value string")
    done = process(rows.coalesce(1), Known, settings)
    assert {bytes(row.key): row.status for row in done.collect()} == {b"a": "done", b"b": "rejected", b"c": "rejected"}
    letters = [
        decode_letter(m.value()) for m in consume(settings.kafka.brokers, f"{settings.kafka.source_topic}_dlq", 2)
    ]
    assert {letter.kind.value for letter in letters} == {"arrange", "parse"}
    assert session.read.parquet(settings.history.path).count() == 3


@pytest.mark.long
def test_spark_sql_reads_the_history_while_it_grows(session, tmp_path):
    async def write() -> None:
        writer = HistoryWriter(tmp_path, EngineIdentity("w", 0, "e" * 32, "g"), max_rows=2)
        for offset in range(5):
            status = HistoryStatus.FAILED if offset == 3 else HistoryStatus.DONE
            row = ("t", 0, offset, b"k", status, 1, 1, None, 1_700_000_000_000_000, 1_700_000_001_500_000, None)
            writer.add(HistoryRows.from_columns([[value] for value in row]))
        await writer.close()

    asyncio.run(write())
    (tmp_path / "_part-being-written.parquet").write_bytes(b"half a par")
    rows = session.sql(
        f"""
        select status, count(*) as messages, max(cast(finished_at as double) - cast(started_at as double)) as seconds
        from parquet.`{tmp_path}` group by status order by status
        """
    ).collect()
    assert [tuple(row) for row in rows] == [("done", 4, 1.5), ("failed", 1, 1.5)]


def test_a_stream_from_files_is_worked_off_batch_by_batch_and_goes_on_where_it_was(session, settings, tmp_path):
    source, outcomes = tmp_path / "in", tmp_path / "outcomes"
    source.mkdir()

    def drop(name: str, numbers: range) -> None:
        (tmp_path / name).write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))
        (tmp_path / name).rename(source / name)

    def work_off() -> None:
        stream = session.readStream.text(str(source)).selectExpr("CAST(NULL AS STRING) AS key", "value")
        query = process(
            stream,
            Known,
            settings,
            outcomes=outcomes,
            checkpoint=tmp_path / "checkpoint",
            trigger={"availableNow": True},
        )
        query.awaitTermination(100)
        assert not query.isActive

    drop("a.jsonl", range(100))
    work_off()
    assert seen(settings) == Counter(range(100))
    drop("b.jsonl", range(100, 250))
    work_off()
    assert seen(settings) == Counter(range(250)), "rows of an earlier micro-batch were delivered again"
    told = session.read.schema(f"{OUTCOME_SCHEMA}, batch INT").parquet(str(outcomes))
    assert {(row.batch, row["count"]) for row in told.groupBy("batch").count().collect()} == {(0, 100), (1, 150)}
    with pytest.raises(ConfigError, match=r"a stream needs two persistent folders.*outcomes=.* and checkpoint="):
        process(session.readStream.text(str(source)).selectExpr("value AS key", "value"), Known, settings)


def test_a_backfill_in_a_session_returns_its_outcomes(session, settings, embedded_kafka, tmp_path):
    topic = settings.kafka.source_topic
    embedded_kafka.create_topic(topic, partitions=1)
    produce(embedded_kafka.bootstrap, topic, [json.dumps({"n": n}) for n in range(2_500)])
    arguments: dict[str, Any] = {"start": "500", "outcomes": tmp_path / "outcomes", "range_messages": 900}
    done = backfill(Known, settings, session=session, **arguments)
    assert sorted(row.offset for row in done.select("offset").collect()) == list(range(500, 2_500))
    assert seen(settings) == Counter(range(500, 2_500))
    again = backfill(Known, settings, **arguments)
    assert again.count() == 2_000
    assert seen(settings) == Counter(range(500, 2_500))
    with pytest.raises(ConfigError, match="holds the backfill"):
        backfill(Known, settings, start="0", outcomes=tmp_path / "outcomes")
    with pytest.raises(ConfigError, match="cannot have 0 messages"):
        backfill(Known, settings, start="0", outcomes=tmp_path / "other", range_messages=0)


@pytest.fixture
def brokerless(tmp_path: Path) -> Settings:
    """A configuration over files, whose brokers nobody serves."""
    return Settings.model_validate(
        {
            "kafka": {"brokers": f"127.0.0.1:{free_port()}", "source_topic": "rows"},
            "sinks": {"filesystem": {"out": {"base_path": str(tmp_path / "out")}}},
            "dlq": {"path": str(tmp_path / "letters")},
        }
    )


def letters_in(settings: Settings) -> list[Any]:
    """Return the letters that count."""
    with open_letters(settings) as letters:
        ends = {number: end for number, (_, end) in letters.find_ranges().items()}
        found = [each for each in letters.stream({}, ends) if isinstance(each, FoundLetter)]
    assert not [each.problem for each in found if each.letter is None]
    return [each.letter for each in found]


def keys_of(letters: list[Any]) -> list[str]:
    return sorted(source.key for letter in letters for source in letter.sources)


def test_rows_and_their_dead_letters_need_no_broker(session, brokerless, tmp_path):
    rows = session.createDataFrame(
        [(str(n), json.dumps({"n": n}) if n % 3 else "no json") for n in range(30)], "key string, value string"
    )
    done = process(rows.repartition(3), Known, brokerless)
    assert seen(brokerless) == Counter(n for n in range(30) if n % 3)
    assert done.filter("status = 'rejected'").count() == 10
    assert keys_of(letters_in(brokerless)) == sorted(str(n) for n in range(0, 30, 3))
    # A second run adds its letters to those of the first.
    process(rows.filter("key = '0'").coalesce(1), Known, brokerless, outcomes=tmp_path / "outcomes")
    assert keys_of(letters_in(brokerless)) == sorted(["0", *(str(n) for n in range(0, 30, 3))])
    read = session.read.parquet(brokerless.dlq.path)
    assert {(row.kind, row.topic, row["count"]) for row in read.groupBy("kind", "topic").count().collect()} == {
        ("parse", "dataframe", 11)
    }
    assert not [path.name for path in Path(brokerless.dlq.path).iterdir() if path.name.startswith("_")]


@pytest.mark.long
def test_outcomes_that_nobody_named_a_folder_for_are_removed_even_after_a_kill(
    session, brokerless, tmp_path, monkeypatch
):
    """By the next run: nothing else knows of them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os; from tidemill.runtime.files.folders import OwnedFolder as F"
    code += "; folder = F('tidemill-outcomes-'); os._exit(1)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    (left,) = tmp_path.glob("tidemill-outcomes-*")

    outcomes = process(rows_of(session, 3), Known, brokerless)

    (own,) = tmp_path.glob("tidemill-outcomes-*")
    assert own != left
    assert outcomes.count() == 3


def test_a_part_that_spark_starts_again_has_its_letters_once(session, brokerless, tmp_path, monkeypatch):
    monkeypatch.setattr("tidemill.spark.bounded.run.SILENT_SECONDS", 4.0)
    marker = tmp_path / "hung"

    class HangingOnce(Known):
        async def on_task_complete(self, result):
            import time

            if result.task.metadata["n"] == 9 and not marker.exists():
                while not list(Path(brokerless.dlq.path).glob("_letters-*")):
                    await asyncio.sleep(0.01)
                marker.touch()
                time.sleep(3_600)
            if result.task.metadata["n"] % 5 == 0:
                raise ValueError("not this one")
            return await Known.on_task_complete(self, result)

    # Letters of this size are written before the part is at its end.
    values = [json.dumps({"n": n, "pad": "x" * (5_000_000 if n % 5 == 0 else 0)}) for n in range(10)]
    rows = session.createDataFrame([(str(n), value) for n, value in enumerate(values)], "key string, value string")
    process(rows.coalesce(1), HangingOnce, brokerless, outcomes=tmp_path / "outcomes")
    assert marker.exists()
    assert keys_of(letters_in(brokerless)) == ["0", "5"]
    assert not [path.name for path in Path(brokerless.dlq.path).iterdir() if path.name.startswith("_")]


def test_a_stream_needs_no_broker_and_a_micro_batch_given_again_has_its_letters_once(session, brokerless, tmp_path):
    source, broken, letters = tmp_path / "in", tmp_path / "broken", Path(brokerless.dlq.path)
    source.mkdir()
    broken.touch()

    class Refusing(Known):
        async def on_ready(self, config, sinks):
            from pyspark import TaskContext

            if broken.exists() and TaskContext.get().partitionId() == 1:
                while not list(letters.glob("letters-*")):
                    await asyncio.sleep(0.05)  # the other part is published first
                raise LookupError("no such table")

    def work_off() -> Any:
        stream = session.readStream.text(str(source)).selectExpr("value AS key", "value").repartition(2)
        return process(
            stream,
            Refusing,
            brokerless,
            outcomes=tmp_path / "outcomes",
            checkpoint=tmp_path / "checkpoint",
            trigger={"availableNow": True},
        )

    (source / "a.txt").write_text("".join(f"no json {n}\n" for n in range(6)))
    with pytest.raises(Exception, match="no such table"):
        work_off().awaitTermination(100)
    assert 0 < len(letters_in(brokerless)) < 6, "one of two parts had been published"
    broken.unlink()
    query = work_off()
    query.awaitTermination(100)
    assert not query.isActive
    assert keys_of(letters_in(brokerless)) == [f"no json {n}" for n in range(6)]


def test_letters_that_are_not_where_they_are_looked_for_are_told(session, brokerless, tmp_path, monkeypatch):
    class Elsewhere(Known):
        """Does what another host's folder of that name would: takes the file, and it is not here."""

        async def on_ready(self, config, sinks):
            from tidemill.deadletters.files import LetterFile

            publish = LetterFile.publish

            def elsewhere(self, outcome, below=None):
                name = publish(self, outcome, below)
                (self._folder / name).unlink()
                LetterFile.publish = publish
                return name

            LetterFile.publish = elsewhere

    rows = session.createDataFrame([("1", "no json")], "key string, value string").coalesce(1)
    with pytest.raises(ConfigError, match=r"1 of 1 dead-letter files are not in .*all hosts share"):
        process(rows, Elsewhere, brokerless)
    (tmp_path / "file").touch()
    brokerless.dlq.path = str(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"dlq\.path: dead letters cannot be written to .*/file: File exists"):
        process(rows, Known, brokerless)


def test_a_backfill_writes_its_letters_beside_and_goes_on_with_the_same(session, settings, embedded_kafka, tmp_path):
    topic = settings.kafka.source_topic
    embedded_kafka.create_topic(topic, partitions=1)
    produce(embedded_kafka.bootstrap, topic, [json.dumps({"n": n}) if n % 100 else "no json" for n in range(2_500)])
    settings.dlq.path = str(tmp_path / "letters")
    for _ in range(2):
        done = backfill(Known, settings, session=session, start="0", outcomes=tmp_path / "outcomes", range_messages=900)
        assert done.filter("status = 'rejected'").count() == 25
        letters = letters_in(settings)
        offsets = sorted(source.offset for letter in letters for source in letter.sources)
        assert offsets == list(range(0, 2_500, 100))
    assert len(list((tmp_path / "letters").glob("letters-*"))) == 3


def test_a_backfill_in_order_of_keys_demands_whole_partitions_and_keeps_the_order_then(
    session, settings, embedded_kafka, tmp_path
):
    topic = settings.kafka.source_topic
    embedded_kafka.create_topic(topic, partitions=2)
    for key in range(6):
        values = [json.dumps({"n": n}) for n in range(key, 300, 6)]
        produce(embedded_kafka.bootstrap, topic, values, key=str(key), partition=key % 2)
    settings.executor.order_by = "key"
    arguments: dict[str, Any] = {"session": session, "start": "earliest", "outcomes": tmp_path / "outcomes"}
    with pytest.raises(ConfigError, match="use --whole-partitions"):
        backfill(Shuffled, settings, **arguments)
    done = backfill(Shuffled, settings, **arguments, whole_partitions=True, range_messages=50)
    assert done.count() == 300
    assert len(list((tmp_path / "outcomes").glob("part-*"))) == 2
    lines = [line["n"] for line in read_lines(out_file(settings))]
    for key in range(6):
        assert [n for n in lines if n % 6 == key] == list(range(key, 300, 6))


def test_a_backfill_of_which_too_much_fails_ends_and_is_not_tried_again(session, settings, embedded_kafka, tmp_path):
    topic = settings.kafka.source_topic
    embedded_kafka.create_topic(topic, partitions=1)
    produce(embedded_kafka.bootstrap, topic, [json.dumps({"n": n}) for n in range(2_000)])
    settings.executor.max_failure_ratio = 0.5
    settings.dlq.path = str(tmp_path / "letters")
    text = r"50 of the last 50 messages failed with on_task_complete: LookupError \(last: .*max_failure_ratio \(0\.5\)"
    with pytest.raises(HandlerError, match=f"(?s){text}"):
        backfill(Broken, settings, session=session, start="earliest", outcomes=tmp_path / "outcomes")
    assert len(letters_in(settings)) < 200, "it was tried again, or went on"
    assert not list((tmp_path / "outcomes").glob("part-*"))


def test_an_engine_of_a_backfill_that_cannot_start_is_named(session, settings, embedded_kafka, tmp_path):
    topic = settings.kafka.source_topic
    embedded_kafka.create_topic(topic, partitions=1)
    produce(embedded_kafka.bootstrap, topic, [json.dumps({"n": 1})])
    with pytest.raises(HandlerError, match="on_ready raised LookupError: no such table"):
        backfill(Unready, settings, session=session, start="0", end="1", outcomes=tmp_path / "outcomes")
