"""Reads the marks that stand for lists whose items are stored one by one."""

from __future__ import annotations

import re

#: What `dags.long_lists` and `services.conf_lists` write.
_MARK = re.compile(r'\{"\$tidemill":"items","value":(\d+)\}')


def read_mark(text: str | None) -> int | None:
    """Return the length of a list that was stored in parts; None: the text has the value itself."""
    found = None if text is None else _MARK.fullmatch(text)
    return None if found is None else int(found[1])
