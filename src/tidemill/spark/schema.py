"""The columns of outcomes and history, as Spark reads them; a folder that grows needs the schema said."""

from __future__ import annotations

#: What `tidemill.pipeline.history.SCHEMA` is to Spark.
OUTCOME_SCHEMA = (
    "topic STRING, `partition` INT, `offset` BIGINT, key BINARY, status STRING, tasks INT, attempts INT, "
    "arrived_at TIMESTAMP, started_at TIMESTAMP, finished_at TIMESTAMP, error STRING, worker STRING, engine INT, "
    "engine_id STRING"
)
