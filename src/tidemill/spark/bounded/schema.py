"""The columns of outcomes and history for Spark; an explicit schema is needed while files are still being added."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The Spark form of `tidemill.pipeline.reports.history.SCHEMA`.
OUTCOME_SCHEMA = (
    "topic STRING, `partition` INT, `offset` BIGINT, key BINARY, status STRING, tasks INT, attempts INT, "
    "arrived_at TIMESTAMP, started_at TIMESTAMP, finished_at TIMESTAMP, error STRING, worker STRING, engine INT, "
    "engine_id STRING"
)


def outcomes_frame(session: SparkSession, folder: Path) -> DataFrame:
    """Return a DataFrame over the outcome files of a folder; for an empty folder it is empty."""
    return session.read.schema(OUTCOME_SCHEMA).parquet(f"file://{folder}")
