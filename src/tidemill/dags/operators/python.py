"""Operators that call a Python function, some of which skip downstream tasks depending on its result."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import Any, ClassVar

from tidemill.dags.attempt.current import get_services
from tidemill.dags.attempt.lazy_context import Context
from tidemill.dags.attempt.yielding import emit_all
from tidemill.dags.context.context import CONTEXT_KEYS
from tidemill.dags.exceptions import DagError, TaskDeferred, TaskFailed
from tidemill.dags.operator import BaseOperator
from tidemill.dags.operators.branching import skip, skip_all_downstream, skip_all_except


class PythonOperator(BaseOperator):
    """Calls a function, also an `async def` one.

    If the function is a generator (`yield` in a `def` or an `async def`), each value that it yields is stored at once,
    and a task that is mapped over its output runs for it while the generator goes on. For other tasks its output is a
    `LazySequence` of all values. A retry yields from the start; it has to yield the same values as far as the last one.

    A parameter of the function with the name of a context key receives the value of that key.

    Args:
        python_callable: The function.
        op_args: Positional arguments of the function.
        op_kwargs: Keyword arguments of the function.
        templates_dict: More templates; the rendered values are in the context as `templates_dict`.
        kwargs: The arguments of `BaseOperator`.
    """

    template_fields = ("templates_dict", "op_args", "op_kwargs")
    ui_color = "#ffefeb"
    #: Whether the function may be a generator.
    may_yield: ClassVar[bool] = True

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        templates_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not callable(python_callable):
            raise DagError(f"task {self.task_id!r}: python_callable must be a function, got {python_callable!r}")
        self.python_callable = python_callable
        self.op_args = list(op_args or ())
        self.op_kwargs = dict(op_kwargs or {})
        self.templates_dict = templates_dict
        in_loop = self.dag is None or getattr(self.mapped_group, "kind", None) == "looped"
        check_call(f"task {self.task_id!r}", python_callable, self.op_args, self.op_kwargs, in_loop=in_loop)
        if self.is_generator:
            self._check_generator()

    @property
    def is_generator(self) -> bool:
        """Whether the function is a generator."""
        return is_generator(self.python_callable)

    def _check_generator(self) -> None:
        if not self.may_yield:
            refuse_generator(self, self.python_callable)
        owner = f"task {self.task_id!r}: the function is a generator"
        if not self.do_xcom_push or self.multiple_outputs:
            wrong = "multiple_outputs=True" if self.do_xcom_push else "do_xcom_push=False"
            raise DagError(f"{owner}, whose values are stored one by one; remove {wrong}")

    def execute(self, context: Any) -> Any:
        """Call the function. The values of a generator are stored; then this returns None."""
        if self.templates_dict is not None:
            context = context.extend({"templates_dict": self.templates_dict})
        if not self.is_generator:
            return call_function(self.python_callable, self.op_args, self.op_kwargs, context)
        wanted = select_context(self.python_callable, self.op_args, self.op_kwargs, context)
        try:
            emit_all(self.python_callable(*self.op_args, **self.op_kwargs, **wanted), get_services())
        except TaskDeferred as deferral:
            raise _refuse_deferral(deferral) from None
        return None


class BranchPythonOperator(PythonOperator):
    """Calls a function that returns the ids of tasks or groups to follow; other direct downstream tasks are skipped."""

    may_yield = False

    def execute(self, context: Any) -> Any:
        """Call the function, and skip the tasks that it did not choose."""
        chosen = super().execute(context)
        skip_all_except(context, chosen)
        return chosen


class ShortCircuitOperator(PythonOperator):
    """Calls a function; if the result is falsy, downstream tasks are skipped.

    Args:
        ignore_downstream_trigger_rules: Whether to skip all downstream tasks. If False, only direct downstream tasks
            are skipped, and trigger rules decide about the others.
        kwargs: The arguments of `PythonOperator`.
    """

    may_yield = False

    def __init__(self, *, ignore_downstream_trigger_rules: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_downstream_trigger_rules = ignore_downstream_trigger_rules

    def execute(self, context: Any) -> Any:
        """Call the function, and skip downstream tasks if the result is falsy."""
        result = super().execute(context)
        if not result:
            if self.ignore_downstream_trigger_rules:
                skip_all_downstream(context)
            else:
                skip(context, self.downstream_task_ids)
        return result


def check_call(
    owner: str, function: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any], *, in_loop: bool = True
) -> None:
    """Check that a function accepts the arguments, together with those from the context.

    Args:
        owner: The task, for messages.
        function: The function.
        args: The positional arguments.
        kwargs: The other arguments.
        in_loop: Whether the context has `loop`, or might have it.

    Raises:
        DagError: The function does not accept them.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # the function has no signature, for example because it is written in C
    try:
        bound = signature.bind_partial(*args, **kwargs)
        known = CONTEXT_KEYS if in_loop else CONTEXT_KEYS - {"loop"}
        from_context = {name for name in signature.parameters if name in known and name not in bound.arguments}
        signature.bind(*args, **kwargs, **dict.fromkeys(from_context))
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise DagError(f"{owner}: {name}{signature} cannot be called with these arguments: {error}") from None


def call_function(
    function: Callable[..., Any], args: Collection[Any], kwargs: Mapping[str, Any], context: Mapping[str, Any]
) -> Any:
    """Call a user's function with its arguments and the context values that it asks for.

    Raises:
        TaskFailed: The function tried to defer.
    """
    wanted = select_context(function, args, kwargs, context)
    try:
        result = function(*args, **kwargs, **wanted)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
    except TaskDeferred as deferral:
        raise _refuse_deferral(deferral) from None
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TaskFailed(
            "the function returned a generator; only a @task function that has `yield` itself gives its values one by "
            "one: use `yield from` in it, or return a list"
        )
    return result


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether calling a function returns a generator, as far as its definition says."""
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):  # the usual case, without the search of `inspect`
        return bool(code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR))
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def refuse_generator(operator: BaseOperator, function: Callable[..., Any]) -> None:
    """Check that the function of an operator that needs its return value is no generator.

    Raises:
        DagError: It is a generator.
    """
    if is_generator(function):
        raise DagError(
            f"task {operator.task_id!r}: the function is a generator, but {operator.task_type} needs its return value; "
            "use return instead of yield"
        )


def _refuse_deferral(deferral: TaskDeferred) -> TaskFailed:
    methods = " and ".join(f"{name}()" for name in dict.fromkeys(("execute", deferral.method_name)))
    return TaskFailed(
        "a @task function cannot defer, because there is no method to continue with; write an operator with "
        f"{methods}, or use a sensor"
    )


async def _wait(result: Any) -> Any:
    return await result


def select_context(
    function: Callable[..., Any], args: Collection[Any], kwargs: Mapping[str, Any], context: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the context values for a function: those that its parameters name, or all if it has `**kwargs`."""
    try:
        signature = inspect.signature(function)
        bound = signature.bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return {}
    wanted = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            values = context.read_all() if isinstance(context, Context) else context
            wanted.update({key: value for key, value in values.items() if key not in bound.arguments})
        elif parameter.kind is not parameter.VAR_POSITIONAL and name not in bound.arguments and name in context:
            wanted[name] = context[name]
    return {key: value for key, value in wanted.items() if key not in kwargs}
