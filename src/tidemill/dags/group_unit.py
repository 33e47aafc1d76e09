"""The values that the arguments of a mapped group have for one element of the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tidemill.dags.exceptions import TaskError, TaskFailed
from tidemill.dags.map_sources import LeafItem
from tidemill.dags.xcom_arg import MISSING, MappedArgument, RunValues, resolve_outputs


class GroupUnit:
    """One element of a mapped group, for an attempt of one of its tasks.

    Args:
        group: The `MappedTaskGroup`.
        leaves: The items of the sources of the group.
        values: The values of the DAG's run.
    """

    def __init__(self, group: Any, leaves: Sequence[LeafItem], values: RunValues) -> None:
        self._group = group
        self._leaves = leaves
        self._values = values

    def read(self, argument: MappedArgument) -> Any:
        """Return the value of an argument of the function.

        Raises:
            TaskFailed: The values do not fit the function.
            TaskError: The file was changed after the run began, or the argument is of another group.
            Exception: An exception of a function of `.map`.
        """
        if argument.group is not self._group:
            raise TaskError(f"{argument!r} has no value in group {self._group.group_id!r}")
        value = self._given.get(argument.name, argument.default)
        if value is MISSING:
            raise TaskFailed(
                f"expand_kwargs() of group {self._group.group_id!r} gives no {argument.name!r} for this element: add "
                "it to the dict, or give the parameter a default"
            )
        return resolve_outputs(value, self._values)

    @cached_property
    def _given(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._group.expand_input.evaluate(self._leaves, self._values)[0]
        for name in found:
            if name not in self._group.arguments:
                given = "partial() gives already" if name in self._group.shared else "the function does not have"
                raise TaskFailed(
                    f"expand_kwargs() of group {self._group.group_id!r} gives {name!r} for this element, which {given}"
                )
        return found
