"""The functions and modules available to templates as `macros`."""

from __future__ import annotations

import json
import random
import time
import uuid
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace


def ds_add(ds: str, days: int) -> str:
    """Return a date, as YYYY-MM-DD, with a number of days added.

    Example:
        >>> ds_add("2026-01-31", 1)
        '2026-02-01'
    """
    return ds if not days else f"{datetime.fromisoformat(ds) + timedelta(days=days):%Y-%m-%d}"


def ds_format(ds: str, input_format: str, output_format: str) -> str:
    """Convert a date from one `strftime` format to another.

    Example:
        >>> ds_format("2026-01-31", "%Y-%m-%d", "%d.%m.%y")
        '31.01.26'
    """
    return datetime.strptime(str(ds), input_format).replace(tzinfo=UTC).strftime(output_format)


macros = SimpleNamespace(
    datetime=datetime,
    timedelta=timedelta,
    json=json,
    random=random.random,
    time=time,
    uuid=uuid,
    ds_add=ds_add,
    ds_format=ds_format,
)
