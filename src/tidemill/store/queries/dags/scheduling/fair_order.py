"""An order of rows that differs from turn to turn, for steps that take a limited number of them.

By their ids, rows that always have work would hold up those after them for ever.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement

#: Any prime number; ids that differ by less than it have different places.
PRIME = 10_007
_SPREAD = 7_919


def order_fairly(number: ColumnElement[Any], turn: ColumnElement[int] | int) -> ColumnElement[int]:
    """Return what to order by. `turn`: any number below `PRIME`, another one each time."""
    place: ColumnElement[int] = (number * _SPREAD + turn) % PRIME
    return place
