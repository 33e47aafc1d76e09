"""A mapped task: one task of a DAG, of which a run has an element for each value that it is mapped over.

Invariants: every argument is checked when the file is parsed, as far as its values are known there; the arguments that
    the scheduler reads (retries, pool, trigger rule and so on) are the same for all elements of a map.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from tidemill.core.tasks.structure import ChunkStructure, MapStructure, find_followed
from tidemill.dags.arguments import check_bool, check_text
from tidemill.dags.edges import connect
from tidemill.dags.exceptions import DagError
from tidemill.dags.map_sources import (
    ALL_ARGUMENTS,
    ExpandInput,
    LeafItem,
    LiteralItems,
    check_source,
    describe_sources,
)
from tidemill.dags.maps.target import MapTarget, check_concurrency, check_limits
from tidemill.dags.operator import BaseOperator
from tidemill.dags.scope import open_dags, open_teardowns
from tidemill.dags.triggers.trigger_text import check_triggers
from tidemill.dags.xcom_arg import RunValue, RunValues, list_outputs

_NOT_PASSED: Final = frozenset({"task_id", "dag", "task_group", "default_args"})


class MappedOperator(BaseOperator):
    """A mapped task; `tidemill.dags.maps.expanding.OperatorPartial.expand` creates it.

    In a run it has an element for each value. An attempt of an element creates the operator with the element's
    arguments and runs it.

    Args:
        target: The operator, and the arguments that all elements share.
        expand_input: The sources of the other arguments.
        fallbacks: Arguments of the operator from `default_args`.
        max_outstanding: How many elements may be unfinished at a time, deferred ones included, at most 10,000; None:
            `dags.max_outstanding`.
        max_failed_elements: How many elements may fail before no more are started; None: any number.
        task_concurrency: How many elements an attempt runs at a time that runs all of them; None: one per core.
        map_index_template: A template of the label that is shown with the index of an element. It is rendered after the
            attempt; what the task adds to the context can be used in it.
        kwargs: The arguments of `BaseOperator`.
    """

    is_mapped: ClassVar[bool] = True

    def __init__(
        self,
        *,
        target: MapTarget,
        expand_input: ExpandInput,
        fallbacks: Mapping[str, Any],
        max_outstanding: int | None = None,
        max_failed_elements: int | None = None,
        map_index_template: str | None = None,
        task_concurrency: int | None = None,
        **kwargs: Any,
    ) -> None:
        owner = target.owner
        self._target, self._expand_input, self._fallbacks = target, expand_input, fallbacks
        self.max_outstanding, self.max_failed_elements = check_limits(owner, max_outstanding, max_failed_elements)
        self.task_concurrency = check_concurrency(owner, task_concurrency, iterated=target.iterated)
        if target.iterated:
            _refuse_limits(owner, max_outstanding, max_failed_elements, map_index_template)
        self.map_index_template = (
            None if map_index_template is None else check_text(owner, "map_index_template", map_index_template)
        )
        self.factors = describe_sources(owner, expand_input)
        cls = target.operator_class
        self.template_fields, self.template_ext = cls.template_fields, cls.template_ext
        self.ui_color, self.ui_fgcolor = cls.ui_color, cls.ui_fgcolor
        given = {**fallbacks, **target.kwargs}
        for name in ("soft_fail", "never_fail"):
            setattr(self, name, check_bool(owner, name, given.get(name, getattr(cls, name))))
        self.start_from_trigger, self.start_trigger_args = cls.start_from_trigger, cls.start_trigger_args
        super().__init__(**kwargs)

    @property
    def operator_class(self) -> type[BaseOperator]:
        """The class of the operator that runs for an element."""
        return self._target.operator_class

    @property
    def partial_kwargs(self) -> dict[str, Any]:
        """The arguments that all elements share."""
        return {**self._fallbacks, **self._target.kwargs}

    @property
    def task_type(self) -> str:
        """The name of the operator's class."""
        return self.operator_class.__name__

    @property
    def is_sensor(self) -> bool:  # type: ignore[override]
        """Whether the elements are sensors."""
        return self.operator_class.is_sensor

    @property
    def map_structure(self) -> MapStructure:
        """The structure of the map, as the store keeps it."""
        return MapStructure(
            tuple(self._expand_input.sources),
            self.factors,
            self.max_outstanding,
            self.max_failed_elements,
            self.map_index_template or "",
            self.chunking,
            self.is_iterated,
        )

    @property
    def chunking(self) -> ChunkStructure | None:
        """The lists into which items are put; None: there are none."""
        return self._target.chunk

    @property
    def maps_function(self) -> bool:
        """Whether the mapped arguments are those of a function, as opposed to those of the operator."""
        return self._target.function is not None

    @property
    def is_iterated(self) -> bool:
        """Whether one attempt runs all elements."""
        return self._target.iterated

    @property
    def expand_input(self) -> ExpandInput:
        """The mapped arguments with their sources."""
        return self._expand_input

    def evaluate(self, leaves: Sequence[LeafItem], values: RunValues) -> tuple[dict[str, Any], Any]:
        """Return the arguments of an element, and which of their values are data; see `ExpandInput.evaluate`."""
        return self._expand_input.evaluate(leaves, values)

    def unmap(self, values: Mapping[str, Any]) -> BaseOperator:
        """Return the operator of an element, which stands for this task without being in the DAG.

        Args:
            values: The arguments that the element gives.

        Raises:
            DagError: An argument is unknown, missing or invalid.
        """
        target, cls = self._target, self._target.operator_class
        if ALL_ARGUMENTS in self._expand_input.sources:
            target.check_element(values, strict=self._expand_input.strict, call="expand_kwargs")
        given = {**self._fallbacks, **target.join(values)}
        given = {"task_id": self.label, **{name: each for name, each in given.items() if name not in _NOT_PASSED}}
        open_dags.push(None)  # the operator must not join the DAG of a file that is being parsed
        try:
            operator: BaseOperator = type.__call__(cls, **given)  # without what `OperatorMeta` adds
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise DagError(f"task {self.task_id!r}: {error}") from error
        finally:
            open_dags.pop()
        check_triggers(f"task {self.task_id!r}", given)
        return self._lend_place(operator)

    def _lend_place(self, operator: BaseOperator) -> BaseOperator:
        """Give an operator the place of this task in the DAG."""
        operator.task_id, operator.label = self.task_id, self.label
        operator._dag, operator.task_group = self._dag, self.task_group
        operator.trigger_rule = self.trigger_rule
        operator.is_setup, operator.is_teardown = self.is_setup, self.is_teardown
        operator.on_failure_fail_dagrun = self.on_failure_fail_dagrun
        operator.upstream_task_ids, operator.downstream_task_ids = self.upstream_task_ids, self.downstream_task_ids
        return operator

    def __getattr__(self, name: str) -> Any:
        """Return an argument that all elements share."""
        target = self.__dict__.get("_target")
        if target is not None and not name.startswith("_"):
            if name in target.kwargs:
                return target.kwargs[name]
            if name in self._expand_input.sources:
                raise AttributeError(
                    f"task {self.task_id!r} is mapped over {name!r}: only its elements have a value; use ti.task"
                )
        raise AttributeError(f"{type(self).__name__} {self.__dict__.get('task_id')!r} has no {name!r}")

    def __repr__(self) -> str:
        return f"<Mapped {self.task_type} {self.task_id!r}>"

    # -- checks of the file --------------------------------------------------------------------------------------------

    def _finish(self, given: Mapping[str, Any]) -> None:
        """Add edges from the sources and from outputs among the other arguments, and check the first element."""
        owner = f"task {self.task_id!r}"
        shared = {**self._fallbacks, **self._target.kwargs}
        for name, value in shared.items():
            if name not in _NOT_PASSED:
                self._check_not_followed(owner, name, value)
                self._connect_outputs(owner, name, value)
        for name, source in self._expand_input.sources.items():
            if isinstance(source, LiteralItems):
                self._connect_literal(owner, name, source.items)
            else:
                self._connect_source(owner, name, source)
        check_triggers(owner, shared)
        teardown = open_teardowns.current
        if teardown is not None:
            teardown.enclose(self)
        self._check_first()

    def _check_not_followed(self, owner: str, name: str, value: Any) -> None:
        """Reject an argument that needs all results of the map that this task follows element by element."""
        followed = find_followed(self.trigger_rule, self.factors)
        if followed is None or self.chunking is not None or self.is_iterated or name not in self.template_fields:
            return
        for output in list_outputs(owner, name, value):
            if any(task.task_id == followed for task in output.iter_tasks()):
                raise DagError(
                    f"{owner}: argument {name!r} of partial() needs all results of task {followed!r}, but expand() "
                    "starts an element as soon as one of them exists; set trigger_rule='none_failed', so that the task "
                    "waits for all"
                )

    def _connect_source(self, owner: str, name: str, source: RunValue) -> None:
        for task in check_source(owner, name, source, self._dag):
            connect(task, self)

    def _connect_literal(self, owner: str, name: str, items: Iterable[Any]) -> None:
        for item in items:
            if name != ALL_ARGUMENTS:
                self._connect_outputs(owner, name if self._target.function is None else "op_kwargs", item)
            elif isinstance(item, RunValue):
                self._connect_source(owner, name, item)
            else:
                for key, value in item.items():
                    self._connect_outputs(owner, key if self._target.function is None else "op_kwargs", value)

    def _connect_outputs(self, owner: str, name: str, value: Any) -> None:
        if name not in self.template_fields:
            self._check_no_outputs(owner, name, value)
            return
        for output in list_outputs(owner, name, value):
            for task in output.iter_tasks():
                connect(task, self)

    def _check_first(self) -> None:
        """Create the operator of the first element, so that its constructor checks the arguments."""
        sources = self._expand_input.sources
        if not self._expand_input.is_literal or not all(source.items for source in sources.values()):
            return
        values = {name: source.items[0] for name, source in sources.items()}
        if self.chunking is not None:
            values = {name: [value] for name, value in values.items()}
        item = values.get(ALL_ARGUMENTS, values)
        if not isinstance(item, RunValue):
            self.unmap(item)


def _refuse_limits(owner: str, *given: object) -> None:
    """Reject arguments of maps with an attempt per element."""
    for name, value in zip(("max_outstanding", "max_failed_elements", "map_index_template"), given, strict=True):
        if value is not None:
            raise DagError(f"{owner}: {name} is for expand(); iterate() runs all elements in one attempt: remove it")
