"""Carries a sensor's attributes from one poke to the next: those that `poke` has set or changed.

Each poke runs in a new process, on an instance built from the DAG file. Invariant: an attribute that
`runtime.json.codec` can encode has the same type and value at the next poke; other attributes are as the constructor
left them.
"""

from __future__ import annotations

from typing import Any

from tidemill.runtime.json.codec import EncodingError, encode_sorted

#: The user expects values of these types to survive, so losing one logs a warning; clients and hooks are silently
#: rebuilt.
_DATA = (list, dict, set, tuple, float, int, str)


def write_attributes(sensor: Any) -> dict[str, str | None]:
    """Return the encoded attributes of a sensor; None for those that cannot be encoded."""
    dag = getattr(sensor, "dag", None)
    built = vars(sensor if dag is None else dag.task_dict.get(sensor.task_id, sensor))
    return {name: _write(value) for name, value in vars(sensor).items() if name in built}


def find_changed(sensor: Any, before: dict[str, str | None]) -> dict[str, Any]:
    """Return the attributes that are new or differ from an earlier result of `write_attributes`."""
    changed = {}
    for name, value in vars(sensor).items():
        try:
            text = encode_sorted(value, f"self.{name}")
        except EncodingError as error:
            if isinstance(value, _DATA) and before.get(name, "") is not None:
                sensor.log.warning("poke set an attribute that will be lost before the next poke: %s", error)
            continue
        if before.get(name) != text:
            changed[name] = value
    return changed


def _write(value: Any) -> str | None:
    try:
        return encode_sorted(value)
    except EncodingError:
        return None
