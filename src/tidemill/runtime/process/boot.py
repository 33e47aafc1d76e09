"""The current boot of this machine: its id and its clock."""

from __future__ import annotations

import time
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """Return the id of the current boot of this machine; empty if the kernel has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def read_boot_seconds() -> float:
    """Return the seconds since boot, including those in which the machine was suspended.

    `time.monotonic` leaves those out on Linux, but leases in a database expire meanwhile.
    """
    # macOS has no such clock; there, `time.monotonic` does not count them either.
    number = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(number)
