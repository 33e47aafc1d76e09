"""The operator class or the `@task` function that a map runs, and the checks of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, Final

from tidemill.core.tasks.structure import ChunkStructure
from tidemill.dags.arguments import check_duration, check_int, check_optional_int, suggest
from tidemill.dags.exceptions import DagError
from tidemill.dags.operator import BaseOperator
from tidemill.dags.operator_arguments import check_names, list_names, list_required, name_task
from tidemill.dags.operators.python import check_call

#: The arguments of a map itself.
MAP_OPTIONS: Final = frozenset({"max_outstanding", "max_failed_elements", "map_index_template", "task_concurrency"})
#: The arguments that the scheduler reads: those of `BaseOperator`, and these of other classes.
_FOR_ALL: Final = (
    (list_names(BaseOperator, BaseOperator)[0] - {"trigger_kwargs"}) | MAP_OPTIONS | {"soft_fail", "never_fail"}
)
_MAX_OUTSTANDING: Final = 10_000
#: An attempt holds all items of its list in memory.
_MAX_ITEMS: Final = 100_000
_MAX_CONCURRENCY: Final = 1_000


class MapTarget:
    """An operator class or a `@task` function that is mapped, with the arguments that all elements share.

    Args:
        operator_class: The class.
        kwargs: Its arguments.
        function: The function whose arguments are mapped; None: those of the class are.
        chunk: How items are put into lists; None: they are not.
        iterated: Whether one attempt runs all elements.
    """

    def __init__(
        self,
        operator_class: type[BaseOperator],
        kwargs: dict[str, Any],
        function: Any = None,
        chunk: ChunkStructure | None = None,
        iterated: bool = False,
    ) -> None:
        self.operator_class = operator_class
        self.kwargs = kwargs
        self.function = function
        self.chunk = chunk
        self.iterated = iterated
        self.owner = name_task(kwargs.get("task_id"))

    @property
    def shared(self) -> Mapping[str, Any]:
        """The arguments that `partial` has given."""
        return self.kwargs if self.function is None else self.kwargs["op_kwargs"]

    def check_element(self, names: Collection[str], *, strict: bool, call: str) -> None:
        """Check the names of the arguments that an element gives.

        Raises:
            DagError: An argument is unknown, cannot differ between elements, or was given in `partial`.
        """
        for name in names:
            if name in self.shared and strict:
                raise DagError(
                    f"{self.owner}: argument {name!r} is in partial() and in {call}(); give it in one of them"
                )
            if self.function is None and name in _FOR_ALL:
                raise DagError(
                    f"{self.owner}: argument {name!r} of {call}() has to be the same for all elements; give it in "
                    "partial()"
                )
        self._check_known(names, call)

    def _check_known(self, names: Collection[str], call: str) -> None:
        if self.function is None:
            check_names(self.operator_class, self.owner, dict.fromkeys(names), BaseOperator)
            return
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):
            return  # the function has no signature, for example because it is written in C
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return
        known = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        for name in names:
            if name not in known:
                advice = suggest(name, known) if known else "it has no parameters"
                shown = getattr(self.function, "__name__", repr(self.function))
                raise DagError(f"{self.owner}: {shown} has no parameter {name!r}, which {call}() gives; {advice}")

    def check_complete(self, names: Collection[str], defaults: Collection[str], call: str) -> None:
        """Check that all arguments without a default are given.

        Raises:
            DagError: An argument is missing.
        """
        if self.function is not None:
            self._check_no_settings(self.function)
            check_call(self.owner, self.function, [], {**self.shared, **dict.fromkeys(names)}, in_loop=False)
            return
        missing = list_required(self.operator_class) - set(self.kwargs) - set(defaults) - set(names)
        if missing:
            raise DagError(
                f"{self.owner}: {self.operator_class.__name__} needs {min(missing)!r}, which neither partial() nor "
                f"{call}() gives; add it to partial()"
            )

    def _check_no_settings(self, function: Any) -> None:
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return  # the function has no signature, for example because it is written in C
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        for name in self.shared:
            if name in _FOR_ALL and name not in parameters and not takes_any:
                raise DagError(
                    f"{self.owner}: {name!r} is a setting of the task; give it to @task(...) or override(...) instead "
                    "of partial()"
                )

    def join(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the class for an element."""
        if self.function is None:
            return {**self.kwargs, **values}
        return {**self.kwargs, "op_kwargs": {**self.shared, **values}}


def check_concurrency(owner: str, task_concurrency: object, *, iterated: bool) -> int | None:
    """Return the number of elements that an attempt runs at a time; None: one per core.

    Raises:
        DagError: The value is not a number or is out of range, or the task has an attempt per element.
    """
    if task_concurrency is None:
        return None
    if not iterated:
        raise DagError(
            f"{owner}: task_concurrency is for iterate(), which runs all elements in one attempt; expand() has "
            "max_active_tis_per_dagrun"
        )
    number = check_int(owner, "task_concurrency", task_concurrency, 1)
    if number > _MAX_CONCURRENCY:
        raise DagError(f"{owner}: task_concurrency must be at most {_MAX_CONCURRENCY:,}, got {number}")
    return number


def build_chunk(owner: str, before: ChunkStructure | None, max_items: object, max_wait: Any) -> ChunkStructure:
    """Return how items are put into lists.

    Args:
        owner: The task, for messages.
        before: What an earlier call of `chunk` gave.
        max_items: The maximum number of values of a list.
        max_wait: How many seconds the first value of a list waits for others; None: any time.

    Raises:
        DagError: A limit is not a number, or is out of range, or there are limits already.
    """
    if before is not None:
        raise DagError(f"{owner}: chunk() is called twice; call it once")
    most = check_int(owner, "max_items", max_items, 1)
    if most > _MAX_ITEMS:
        raise DagError(f"{owner}: max_items must be at most {_MAX_ITEMS:,}, got {max_items}")
    if max_wait is None:
        return ChunkStructure(most)
    return ChunkStructure(most, check_duration(owner, "max_wait", max_wait) // timedelta(microseconds=1))


def check_limits(owner: str, max_outstanding: object, max_failed_elements: object) -> tuple[int | None, int | None]:
    """Return both limits of a map.

    Raises:
        DagError: One of them is not a number, or is out of range.
    """
    most = None if max_outstanding is None else check_int(owner, "max_outstanding", max_outstanding, 1)
    if most is not None and most > _MAX_OUTSTANDING:
        raise DagError(f"{owner}: max_outstanding must be at most {_MAX_OUTSTANDING:,}, got {max_outstanding}")
    return most, check_optional_int(owner, "max_failed_elements", max_failed_elements, 0)
