"""Tells an `async for` statement from other callers of `__aiter__`.

The statement awaits whatever its iterator's `__anext__` returns at once, and shows it to nobody; a program that calls
`aiter` may rely on coroutines, pass them to other tasks, or cancel them.
"""

from __future__ import annotations

from opcode import opmap
from types import FrameType
from typing import Final

#: The instruction that calls `__aiter__` at the start of an `async for`; None: this interpreter has none of that name.
_GET_AITER: Final = opmap.get("GET_AITER")


def is_async_for(frame: FrameType) -> bool:
    """Return whether a frame that has just called something begins an `async for`, as far as can be told."""
    return frame.f_code.co_code[frame.f_lasti] == _GET_AITER
