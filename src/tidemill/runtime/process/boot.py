"""Identifies the current boot of this machine."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """Return the id of the current boot of this machine; empty if the kernel has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
