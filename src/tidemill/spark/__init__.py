"""Where the engines live: pipelines on Spark, live and bounded. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.spark.frames import process
    from tidemill.spark.ranges import Backfill, backfill

_PLACES = {
    "Backfill": "tidemill.spark.ranges",
    "backfill": "tidemill.spark.ranges",
    "process": "tidemill.spark.frames",
}

__all__ = ["Backfill", "backfill", "process"]


def __getattr__(name: str) -> object:
    """Load a public name when it is first used (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
