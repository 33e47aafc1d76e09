"""NaN and infinities in JSON data. JSON cannot represent them, and the encoder writes null.

Only values outside pydantic models are checked: a model writes itself with `model_dump_json` and has its own setting,
`ser_json_inf_nan`.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from typing import Any, Final, Literal

import msgspec

from tidemill.core.wording import shorten

#: What to write for NaN and infinities: `delivery.non_finite`.
NonFinite = Literal["refuse", "null", "string"]

#: Types that contain no other values.
_LEAVES: Final = frozenset(
    {
        *(str, int, bool, type(None), bytes, datetime.datetime, datetime.date, decimal.Decimal, uuid.UUID),
        msgspec.Raw,
    }
)
_LISTS: Final = (list, tuple, set, frozenset)
_MAX_PATH_CHARS: Final = 200


def has_non_finite(value: Any) -> bool:
    """Return whether a JSON-encodable value contains NaN or an infinity.

    Example:
        >>> has_non_finite({"a": [1.5, None]}), has_non_finite({"a": [float("nan")]})
        (False, True)
    """
    todo: list[Any] = [(value,)]
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind is dict:
            value = value.values()
        elif kind is not list and kind is not tuple:
            value = [item for _, item in _list_parts(value)]
        for item in value:
            kind = type(item)
            if kind is float:
                # The difference is 0 for finite numbers only; this is faster than `isfinite`.
                if item - item != 0.0:
                    return True
            elif kind not in _LEAVES:
                todo.append(item)
    return False


def describe_non_finite(value: Any) -> str:
    """Return a message that names the first NaN or infinity in a value and its position.

    Example:
        >>> describe_non_finite({"rates": [1.0, float("-inf")]}).partition(",")[0]
        "-Infinity at ['rates'][1]"
    """
    todo = [("", value)]
    path, number = "", math.nan
    while todo:
        path, value = todo.pop()
        if isinstance(value, float):
            if not math.isfinite(value):
                number = value
                break
        elif type(value) not in _LEAVES:
            todo += [(path + _bracket(name), item) for name, item in reversed(_list_parts(value))]
    found = f"{_spell(number)} at {shorten(path, _MAX_PATH_CHARS)}" if path else _spell(number)
    return f"{found}, which JSON cannot represent; return None or text instead, or set delivery.non_finite"


def spell_non_finite(value: Any) -> Any:
    """Return a value with NaN and infinities replaced by text, spelled as pydantic does.

    Example:
        >>> spell_non_finite({"rates": [1.0, float("-inf")]})
        {'rates': [1.0, '-Infinity']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else _spell(value)
    if isinstance(value, dict):
        return {name: spell_non_finite(item) for name, item in value.items()}
    if isinstance(value, _LISTS):
        return [spell_non_finite(item) for item in value]
    if type(value) in _LEAVES or is_model(value):
        return value
    return spell_non_finite(msgspec.to_builtins(value, enc_hook=read_dump))


def is_model(value: Any) -> bool:
    """Return whether a value is a pydantic model, which writes its own JSON."""
    return hasattr(value, "model_dump_json")


def _list_parts(value: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a value with their names; the name None means that the part stands for the whole value."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, _LISTS):
        return list(enumerate(value))
    if is_model(value):
        return []
    # Times, enumerations, dataclasses and similar types.
    plain = msgspec.to_builtins(value, enc_hook=lambda model: None)
    return _list_parts(plain) if isinstance(plain, (dict, list, tuple)) else [(None, plain)]


def _bracket(name: Any) -> str:
    return "" if name is None else f"[{shorten(repr(name), 60)}]"


def read_dump(model: Any) -> Any:
    """Return a model's JSON as values; NaN and Infinity become floats."""
    return json.loads(model.model_dump_json())


def _spell(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
