"""The mapping behind a context; some values are requested from the store when they are first read.

Invariants: reading a key that exists only in Airflow's context raises an error that explains it; iterating over a
context sends no request and yields only values that are already present.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tidemill.dags.exceptions import LeftOutError, NotFoundError

_ASSETS = "tidemill has no assets"
_DATES = "Airflow 3 no longer has it; use logical_date, or data_interval_start and data_interval_end"

#: Keys of Airflow's context, current or former, that do not exist here, each with the reason.
LEFT_OUT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("inlet_events", "outlet_events", "triggering_asset_events", "asset_state_store"), _ASSETS),
    **dict.fromkeys(("partition_key", "partition_date"), "runs have no partitions"),
    **dict.fromkeys(("execution_date", "next_execution_date", "prev_execution_date"), _DATES),
    **dict.fromkeys(("next_ds", "next_ds_nodash", "prev_ds", "prev_ds_nodash"), _DATES),
    **dict.fromkeys(("tomorrow_ds", "tomorrow_ds_nodash", "yesterday_ds", "yesterday_ds_nodash"), _DATES),
    "prev_execution_date_success": "Airflow 3 no longer has it; use prev_data_interval_start_success",
    "conf": "Airflow 3 no longer has it; use dag_run.conf",
}
_OF_DATE: Final = frozenset({"ds", "ds_nodash", "ts", "ts_nodash", "ts_nodash_with_tz"})


class Context(dict[str, Any]):
    """The context of a running task, by key; a `**context` parameter of a function receives all of it.

    Args:
        values: Values that are already known.
        later: Functions that return the values of further keys; each is called at most once.
    """

    def __init__(self, values: Mapping[str, Any], later: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(values)
        self._later = later

    def __missing__(self, key: str) -> Any:
        """Request the value of a key, or raise an error that says why there is none."""
        if key in self._later:
            value = self[key] = self._later[key]()
            return value
        if key in LEFT_OUT:
            raise LeftOutError(f"the context has no {key!r}: {LEFT_OUT[key]}")
        if key in _OF_DATE:
            raise NotFoundError(
                f"the context has no {key!r}, because the run has no logical date; set one with --logical-date"
            )
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        """Return whether the key has a value, known or requested on access."""
        return super().__contains__(key) or key in self._later

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if there is none."""
        return self[key] if key in self else default  # noqa: SIM401 - it is what `get` is made of

    def copy(self) -> Context:
        """Return a context with the same values."""
        return self.extend({})

    def extend(self, more: Mapping[str, Any]) -> Context:
        """Return a context with more values."""
        return Context({**self, **more}, self._later)

    def read_all(self) -> dict[str, Any]:
        """Return all values, requesting those that are not yet known."""
        return {**self, **{key: self[key] for key in self._later}}
