"""A sensor that polls a Python function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from tidemill.dags.exceptions import DagError
from tidemill.dags.operators.python import call_function, check_call, refuse_generator
from tidemill.dags.sensors.base import BaseSensorOperator, PokeReturnValue


class PythonSensor(BaseSensorOperator):
    """Waits until a function returns a truthy value, or a `PokeReturnValue` that is done.

    Args:
        python_callable: The function.
        op_args: Positional arguments of the function.
        op_kwargs: Keyword arguments of the function.
        kwargs: The arguments of `BaseSensorOperator`.
    """

    template_fields = ("op_args", "op_kwargs")

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not callable(python_callable):
            raise DagError(f"task {self.task_id!r}: python_callable must be a function, got {python_callable!r}")
        self.python_callable = python_callable
        self.op_args = list(op_args or ())
        self.op_kwargs = dict(op_kwargs or {})
        check_call(f"task {self.task_id!r}", python_callable, self.op_args, self.op_kwargs)
        refuse_generator(self, python_callable)

    def poke(self, context: Any) -> bool | PokeReturnValue:
        """Call the function."""
        found = call_function(self.python_callable, self.op_args, self.op_kwargs, context)
        return found if isinstance(found, PokeReturnValue) else bool(found)
