"""The history as Spark SQL sees it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pyspark.sql import SparkSession

from tidemill.pipeline.history import HistoryStatus, HistoryWriter
from tidemill.runtime.identity import Identity
from tidemill.spark.session import Spark


def test_spark_sql_reads_the_history_while_it_grows(spark: Spark, tmp_path: Path) -> None:
    async def write() -> None:
        writer = HistoryWriter(tmp_path, Identity("w", 0, "e" * 32, "g"), max_rows=2)
        for offset in range(5):
            status = HistoryStatus.FAILED if offset == 3 else HistoryStatus.DONE
            writer.add("t", 0, offset, b"k", status, 1, 1, None, 1_700_000_000_000_000, 1_700_000_001_500_000)
        await writer.close()

    asyncio.run(write())
    (tmp_path / "_part-being-written.parquet").write_bytes(b"half a par")
    session = SparkSession(spark.context)
    rows = session.sql(
        f"""
        select status, count(*) as messages, max(cast(finished_at as double) - cast(started_at as double)) as seconds
        from parquet.`{tmp_path}` group by status order by status
        """
    ).collect()
    assert [tuple(row) for row in rows] == [("done", 4, 1.5), ("failed", 1, 1.5)]
