"""How large tests are: each change is tested at the usual size; `--nightly` repeats the large proofs at full size.

A large proof takes its counts from `sized`, or it is a test or a parameter marked `nightly`, with a smaller twin.
"""

from __future__ import annotations

from typing import TypeVar

Size = TypeVar("Size")

#: Whether this run has the option; set before any test is imported.
nightly = False


def sized(usual: Size, large: Size) -> Size:
    """Return the size for each change, or with `--nightly` the large one."""
    return large if nightly else usual
