"""Checks the configuration of a run against the params of its DAG before the run is created."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

import msgspec

from tidemill.runtime.json.codec import decode
from tidemill.runtime.json.schema import find_length_mismatch, find_mismatch
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.dag_plan import DagPlan
from tidemill.store.queries.dags.values.list_marks import read_mark

#: The size limit of a configuration, which every attempt of the run receives.
MAX_CONF_BYTES: Final = 1024 * 1024
#: The similarity (0 to 1) from which an unknown name counts as a misspelt param.
_NEAR: Final = 0.75
#: Further or longer names are not compared: comparing takes time, and the store has one writer.
_MAX_NAMES: Final = 20
_MAX_NAME: Final = 100


def build_params(plan: DagPlan, conf: str) -> str:
    """Return the encoded parameters of a run: the defaults of the DAG overridden by the run's configuration."""
    params = {one.name: msgspec.Raw(one.default.encode()) for one in plan.structure.params if one.default is not None}
    params |= msgspec.json.decode(conf, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(params).decode()


def read_conf(conf: str) -> dict[str, msgspec.Raw]:
    """Return the values of a run's configuration, each as JSON.

    Raises:
        CallRefusedError: The configuration is too large, too deeply nested, or not a JSON object.
    """
    if len(conf.encode("utf-8", "replace")) > MAX_CONF_BYTES:
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"the configuration of a run may have up to {MAX_CONF_BYTES:,} bytes; pass a reference to larger data",
        )
    try:
        return msgspec.json.decode(conf, type=dict[str, msgspec.Raw])
    except RecursionError:
        raise CallRefusedError(RefusalKind.INVALID, "the configuration of a run is nested too deeply") from None
    except msgspec.DecodeError:
        raise CallRefusedError(
            RefusalKind.INVALID, "the configuration of a run must be a JSON object, such as '{\"size\": 3}'"
        ) from None


def find_lists(conf: dict[str, msgspec.Raw]) -> dict[str, int]:
    """Return the lengths of the lists in a configuration that are stored item by item."""
    lengths = {name: read_mark(bytes(value).decode()) for name, value in conf.items()}
    return {name: length for name, length in lengths.items() if length is not None}


def check_params(plan: DagPlan, conf: dict[str, msgspec.Raw]) -> None:
    """Check the configuration against the params of the DAG; tasks may read other names from it.

    Raises:
        CallRefusedError: A param has no value, or its value does not match its schema.
    """
    for param in plan.structure.params:
        given = conf.get(param.name)
        if given is None:
            if param.default is None:
                raise CallRefusedError(
                    RefusalKind.INVALID,
                    f"param {param.name!r} of DAG {plan.structure.id!r} has no default; give it a value in the "
                    "configuration of the run",
                )
        elif param.schema != "{}":
            name, length = f"param {param.name!r}", read_mark(bytes(given).decode())
            try:
                if length is None:
                    mismatch = find_mismatch(param.schema, decode(bytes(given)), name)
                else:  # the client checks the values before it sends them
                    mismatch = find_length_mismatch(param.schema, length, name)
            except (ValueError, RecursionError) as error:
                mismatch = f"the schema of {name} is invalid: {error}"
            if mismatch:
                raise CallRefusedError(
                    RefusalKind.INVALID, f"{mismatch}; no run of DAG {plan.structure.id!r} was created"
                )


def find_misspelt(plan: DagPlan, names: Collection[str]) -> tuple[str, ...]:
    """Return a warning for each name in the configuration that is probably a misspelt param.

    A name that resembles no param causes no warning, because tasks may read it from `dag_run.conf`; nor does a name
    that only resembles a param with a value.
    """
    params = [param.name for param in plan.structure.params if param.name not in names][:_MAX_NAMES]
    if not params:
        return ()
    known = {param.name for param in plan.structure.params}
    strays = [name for name in names if name not in known and len(name) <= _MAX_NAME][:_MAX_NAMES]
    folded = {param.lower(): param for param in params if len(param) <= _MAX_NAME}
    found = []
    for name in strays:
        near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=_NEAR)
        if near:
            found.append(f"DAG {plan.structure.id!r} has no param {name!r}; did you mean {folded[near[0]]!r}?")
    return tuple(found)
