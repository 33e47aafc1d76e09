"""Pipelines on Spark, live and bounded. Each name is loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.lazy_exports import load_export

if TYPE_CHECKING:
    from tidemill.spark.bounded.backfill import Backfill, backfill
    from tidemill.spark.bounded.dataframe import process

_MODULES = {".bounded.backfill": ("Backfill", "backfill"), ".bounded.dataframe": ("process",)}

__all__ = ["Backfill", "backfill", "process"]


def __getattr__(name: str) -> object:
    return load_export(__name__, _MODULES, name)
