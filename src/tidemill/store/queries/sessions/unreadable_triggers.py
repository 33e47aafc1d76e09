"""Finds the triggers whose arguments this host cannot decrypt: no session of it may claim them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import structlog
from sqlalchemy import Row

from tidemill.core.errors import ConfigError
from tidemill.runtime.log.setup import throttle
from tidemill.store.context import CallContext

log = structlog.get_logger(__name__)


def find_unreadable(rows: Iterable[Row[Any]], context: CallContext) -> list[int]:
    """Return the triggers whose arguments cannot be decrypted; they wait for their key."""
    found = []
    for row in rows:
        try:
            context.cipher.decrypt(row.kwargs)
        except ConfigError as error:
            found.append(row.id)
            waits = throttle(log, 60.0, about=row.id)
            waits.error("cannot decrypt the arguments of a trigger; it waits", trigger=row.id, error=str(error))
    return found
