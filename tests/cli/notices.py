"""Leaves out of standard error what a busy machine adds: that the brokers have not answered within a second."""

from __future__ import annotations


def drop_notices(said: bytes | str) -> str:
    """Return the text without lines that say whom a command waits for."""
    text = said.decode() if isinstance(said, bytes) else said
    return "".join(line for line in text.splitlines(keepends=True) if "has not answered yet; waiting" not in line)
