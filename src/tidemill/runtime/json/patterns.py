"""Searches texts for users' regular expressions, in time that is linear in the length of both.

The engine is Rust's `regex` (from pydantic). It does not backtrack, so a pattern such as `^(a+)+$` cannot block the
caller. It refuses look-around and references to groups, which cannot be matched in linear time.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

from tidemill.core.errors import TidemillError

#: A compiled pattern takes up to 10 MB.
_KEPT: Final = 64
#: The parts of a pattern that change its cost: a group, a class, the repetition of the part before.
_TOKEN: Final = re.compile(r"\\.|\{\s*(\d{1,18})\s*(,)?\s*(\d{0,18})\s*\}|.", re.DOTALL)


class PatternError(TidemillError, ValueError):
    """A pattern is not a regular expression, or cannot be searched for in linear time."""


def check_pattern(pattern: str) -> None:
    """Check that a pattern can be searched for.

    Raises:
        PatternError: The pattern cannot be searched for.
    """
    _compile(pattern)


def is_found(pattern: str, text: str) -> bool:
    r"""Return whether a pattern matches some part of a text.

    Raises:
        PatternError: The pattern cannot be searched for.

    Example:
        >>> is_found("^(a+)+$", "a" * 1000 + "!"), is_found(r"\d{2}", "a12b")
        (False, True)
    """
    return bool(_compile(pattern).isinstance_python(text))


@functools.lru_cache(_KEPT)
def weigh_pattern(pattern: str) -> int:
    r"""Return the cost of a character: to about how many positions of a pattern it can be compared.

    Example:
        >>> weigh_pattern(r"^\d+$"), weigh_pattern("(ab){1,100}")
        (4, 300)
    """
    # `sums` has the cost of each open group, `last` the cost of the part that a repetition applies to.
    sums, last, in_class = [0], 0, 0
    for token in _TOKEN.finditer(pattern):
        text, low, comma, high = token[0], token[1], token[2], token[3]
        if in_class:
            in_class += {"[": 1, "]": -1}.get(text, 0)
        elif low is not None:
            times = max(int(high or low) + (1 if comma and not high else 0), 1)
            sums[-1] += last * (times - 1)
            last *= times
        elif text == "(":
            sums.append(0)
        elif text == ")" and len(sums) > 1:
            last = sums.pop() + 1
            sums[-1] += last
        else:
            in_class = int(text == "[")
            last = 1
            sums[-1] += 1
    return sum(sums)


@functools.lru_cache(_KEPT)
def _compile(pattern: str) -> Any:
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex", strict=True))
    except SchemaError as error:
        reason = str(error).splitlines()[-1].strip().removeprefix("error: ").removeprefix("SchemaError: ")
        raise PatternError(f"pattern {pattern!r}: {reason.removesuffix('.')}{_say_what_to_do(reason)}") from None


def _say_what_to_do(reason: str) -> str:
    if "look-around" in reason:
        return "; use `not` and `allOf` instead"
    if "exceeds size limit" in reason:
        return "; use fewer repetitions"
    return ""
