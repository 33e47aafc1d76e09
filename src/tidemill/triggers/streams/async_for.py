"""Distinguishes an `async for` statement from other callers of `__aiter__`.

The statement immediately awaits the result of `__anext__` and exposes it to no code. A program that calls `aiter` may
rely on coroutines, pass them to other tasks, or cancel them.
"""

from __future__ import annotations

from opcode import opmap
from types import FrameType
from typing import Final

#: The instruction that calls `__aiter__` at the start of an `async for`; None if this interpreter has no such opcode.
_GET_AITER: Final = opmap.get("GET_AITER")


def is_async_for(frame: FrameType) -> bool:
    """Return whether a frame that has just called `__aiter__` is starting an `async for`; False if in doubt."""
    return frame.f_code.co_code[frame.f_lasti] == _GET_AITER
