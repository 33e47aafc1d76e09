"""The columns of outcomes and history, as Spark reads them; a folder that grows needs the schema said."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: What `tidemill.pipeline.reports.history.SCHEMA` is to Spark.
OUTCOME_SCHEMA = (
    "topic STRING, `partition` INT, `offset` BIGINT, key BINARY, status STRING, tasks INT, attempts INT, "
    "arrived_at TIMESTAMP, started_at TIMESTAMP, finished_at TIMESTAMP, error STRING, worker STRING, engine INT, "
    "engine_id STRING"
)


def outcomes_frame(session: SparkSession, folder: Path) -> DataFrame:
    """Return a DataFrame over outcome files; an empty folder is an empty DataFrame."""
    return session.read.schema(OUTCOME_SCHEMA).parquet(f"file://{folder}")
