"""Pipelines on Spark, live and bounded. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.spark.bounded.backfill import Backfill, backfill
    from tidemill.spark.bounded.dataframe import process

_PLACES = {
    "Backfill": "tidemill.spark.bounded.backfill",
    "backfill": "tidemill.spark.bounded.backfill",
    "process": "tidemill.spark.bounded.dataframe",
}

__all__ = ["Backfill", "backfill", "process"]


def __getattr__(name: str) -> object:
    """Load a public name when it is first used (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
