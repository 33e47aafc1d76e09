"""Calls the function or the operator of a task for one element after another, in an attempt that runs all of them."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tidemill.dags.attempt.lazy_context import Context
from tidemill.dags.attempt.task_services import TaskServices
from tidemill.dags.execution.elements import ElementToRun
from tidemill.dags.map_sources import LeafItem
from tidemill.dags.operators.python import PythonOperator, select_context
from tidemill.dags.templates import find_texts, has_marks


class ElementRunner:
    """Builds the arguments of elements and calls the task's function or operator with them.

    Args:
        mapped: The task.
        context: The context of the attempt.
        services: The access to the store.
        render: Renders the template fields of an operator: operator, context, and values that are data.
        render_value: Renders values of the file: the values, the context, and which of them are data.
    """

    def __init__(
        self,
        mapped: Any,
        context: Context,
        services: TaskServices,
        render: Callable[[Any, Context, Any], None],
        render_value: Callable[[Any, Context, Any], Any],
    ) -> None:
        self._mapped, self._context, self._services = mapped, context, services
        self._render, self._render_value = render, render_value
        is_plain = mapped.operator_class is PythonOperator and "python_callable" not in mapped.expand_input.sources
        #: The function that an element calls; None: it executes an operator.
        self._function: Any = mapped.python_callable if is_plain else None
        self.is_async = inspect.iscoroutinefunction(self._function)
        self._renders_values = mapped.expand_input.has_literals
        #: Whether the arguments that all elements share may have other values in each.
        self._varies = not mapped.maps_function or any(map(has_marks, find_texts(mapped.op_kwargs).values()))
        #: The arguments that all elements share, rendered.
        self._shared: Mapping[str, Any] | None = None
        #: The context values that the function takes; None: not known yet.
        self._wanted: tuple[str, ...] | None = None
        #: The operators that are executed now.
        self._operators: list[Any] = []
        self._lock = threading.Lock()

    def list_operators(self) -> list[Any]:
        """Return the operators that are executed now; those of an attempt that ends are to be killed."""
        with self._lock:
            return list(self._operators)

    def prepare(self, part: ElementToRun) -> tuple[dict[str, Any], Any, Context]:
        """Return the arguments of an element, which of them are data, and its context."""
        context = _make_context(self._context, part.number)
        found = [
            self._mapped.evaluate(
                [LeafItem(*leaf) for leaf in zip(item.leaf_indexes, item.elements, strict=True)], context["ti"]
            )
            for item in part.items
        ]
        if self._mapped.chunking is None:
            return (*found[0], context)
        (name,) = self._mapped.expand_input.sources
        return {name: [values[name] for values, _ in found]}, [one for _, data in found for one in data], context

    def find_call(self, part: ElementToRun) -> tuple[Context, Callable[[], Any]]:
        """Return the context of an element, and the call that runs it, which may return an awaitable."""
        values, data, context = self.prepare(part)
        if self._function is None:
            return context, lambda: self._execute(values, data, context)
        if self._varies:
            operator = self._mapped.unmap(values)
            self._render(operator, context, data)
            args, kwargs = tuple(operator.op_args), operator.op_kwargs
        else:
            args = ()
            with self._lock:
                if self._shared is None:
                    self._shared = self._render_shared(values, data)
            if self._renders_values:
                values = self._render_value(values, context, data)
            kwargs = {**self._shared, **values}
        wanted = self._select(args, kwargs, context)
        return context, lambda: self._function(*args, **kwargs, **wanted)

    def _render_shared(self, values: Mapping[str, Any], data: Any) -> dict[str, Any]:
        operator = self._mapped.unmap(values)
        self._render(operator, self._context, data)
        shared = self._mapped.op_kwargs
        return {name: value for name, value in operator.op_kwargs.items() if name in shared}

    def _select(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Context) -> dict[str, Any]:
        """Return the context values for the function; which it takes is usually the same for all elements."""
        if self._varies or self._mapped.expand_input.is_kwargs:
            return select_context(self._function, args, kwargs, context)
        if self._wanted is None:
            self._wanted = tuple(select_context(self._function, (), kwargs, context))
        return {name: context[name] for name in self._wanted}

    def _execute(self, values: Mapping[str, Any], data: Any, context: Context) -> Any:
        operator = self._mapped.unmap(values)
        context["task"] = context["ti"].task = operator
        self._render(operator, context, data)
        with self._lock:
            self._operators.append(operator)
        try:
            operator.pre_execute(context)
            result = operator.execute(context)
            operator.post_execute(context, result)
        finally:
            with self._lock:
                self._operators = [one for one in self._operators if one is not operator]
        return result


def _make_context(context: Context, number: int) -> Context:
    instance = copy.copy(context["ti"])
    instance.map_index = number
    return context.extend({"ti": instance, "task_instance": instance})
