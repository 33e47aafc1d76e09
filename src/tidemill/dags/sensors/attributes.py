"""What a sensor keeps between two looks: the attributes that `poke` has set, or whose value it has changed.

Each look runs in a process of its own, on an instance that was built from the DAG file. Invariant: an attribute is kept
if `runtime.json.codec` can write it down, so that it is equal, and of the same type, at the next look; others are as
the constructor left them.
"""

from __future__ import annotations

from typing import Any

from tidemill.runtime.json.codec import EncodingError, encode_sorted

#: Where these cannot be written down, their sensor has lost data; of a client or a hook that is to be expected.
_DATA = (list, dict, set, tuple, float, int, str)


def write_attributes(sensor: Any) -> dict[str, str | None]:
    """Return the attributes of a sensor as text; None: it cannot be written down."""
    dag = getattr(sensor, "dag", None)
    built = vars(sensor if dag is None else dag.task_dict.get(sensor.task_id, sensor))
    return {name: _write(value) for name, value in vars(sensor).items() if name in built}


def find_changed(sensor: Any, before: dict[str, str | None]) -> dict[str, Any]:
    """Return the attributes that are new, or differ from what `write_attributes` returned before."""
    changed = {}
    for name, value in vars(sensor).items():
        try:
            text = encode_sorted(value, f"self.{name}")
        except EncodingError as error:
            if isinstance(value, _DATA) and before.get(name, "") is not None:
                sensor.log.warning("poke has set an attribute that cannot be kept until the next look: %s", error)
            continue
        if before.get(name) != text:
            changed[name] = value
    return changed


def _write(value: Any) -> str | None:
    try:
        return encode_sorted(value)
    except EncodingError:
        return None
