"""Loops: a `@task_group` function whose tasks run again until a result is good enough.

A looped group is a mapped group whose elements are the iterations, one at a time. Its last task is the gate, which
decides in each iteration whether another one follows.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from tidemill.core.errors import escape_surrogates
from tidemill.core.tasks.structure import LoopStructure, MapSource, MapStructure
from tidemill.core.wording import shorten
from tidemill.dags.arguments import check_int
from tidemill.dags.attempt.task_services import XComQuery
from tidemill.dags.edges import Node, connect
from tidemill.dags.exceptions import DagError, TaskFailed
from tidemill.dags.group import GroupOutput
from tidemill.dags.map_sources import ExpandInput
from tidemill.dags.maps.mapped_group import MappedTaskGroup
from tidemill.dags.operator import BaseOperator
from tidemill.dags.operators.python import call_function, check_call
from tidemill.dags.xcom_arg import RETURN_VALUE, PlainXComArg, XComArg
from tidemill.runtime.json.codec import decode

log = logging.getLogger(__name__)

GATE: Final = "loop_gate"
_MAX_ITERATIONS: Final = 10_000
_ON_MAX: Final = ("fail", "succeed")
#: The most characters of a result in the label of an iteration.
_MAX_SHOWN: Final = 80
#: The most characters of a reason.
_MAX_REASON: Final = 1_000


@dataclass(frozen=True, slots=True)
class LoopDecision:
    """The decision of a gate, which `until` may return instead of a bool.

    Attributes:
        done: Whether the loop ends with this iteration.
        reason: Why, for people.
    """

    done: bool
    reason: str = ""


class LoopState:
    """The iteration that a task of a loop runs in: the keyword `loop` of its function.

    Args:
        index: The number of the iteration, from 1.
        max_iterations: The most iterations.
        read: Reads the result of the task whose result counts, by map index.
    """

    def __init__(self, index: int, max_iterations: int, read: Callable[[int], Any]) -> None:
        self.index, self.max_iterations, self._read = index, max_iterations, read

    @cached_property
    def previous(self) -> Any:
        """The result of the iteration before; None in the first."""
        return None if self.index == 1 else self._read(self.index - 2)

    @cached_property
    def result(self) -> Any:
        """The result of this iteration, for `until`."""
        return self._read(self.index - 1)

    def __repr__(self) -> str:
        return f"<iteration {self.index} of at most {self.max_iterations}>"


class LoopGate(BaseOperator):
    """Decides whether another iteration of a loop follows.

    Args:
        until: The function of the loop; None: the loop has all its iterations.
        on_max: What happens if the last iteration does not end the loop: `fail` or `succeed`.
        kwargs: The arguments of `BaseOperator`.
    """

    ui_color = "#e8e4fb"

    def __init__(self, *, until: Callable[..., Any] | None, on_max: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.until, self.on_max = until, on_max
        # The label of an iteration.
        self.map_index_template = "{{ decision }}"

    def execute(self, context: Any) -> dict[str, Any]:
        """Return the decision."""
        loop = context["loop"]
        result = shorten(repr(loop.result), _MAX_SHOWN)
        context["decision"] = f"result {result}, no decision"
        decision = LoopDecision(False)
        if self.until is not None:
            decision = _read_decision(call_function(self.until, (), {}, context))
        is_last = loop.index >= loop.max_iterations
        if not decision.done and is_last:
            if self.until is not None and self.on_max == "fail":
                why = f": {decision.reason}" if decision.reason else ""
                raise TaskFailed(
                    f"the loop has not ended after {loop.max_iterations:,} iterations{why}; raise max_iterations, or "
                    "set on_max='succeed'"
                )
            decision = LoopDecision(True, decision.reason or f"it has had {loop.max_iterations:,} iterations")
        reason = f": {decision.reason}" if decision.reason else ""
        context["decision"] = f"{'ends' if decision.done else 'goes on'}{reason}, result {result}"
        log.info("iteration %d: the loop %s", loop.index, context["decision"])
        return {"done": decision.done, "reason": decision.reason}


def _read_decision(found: Any) -> LoopDecision:
    """Return what `until` has decided.

    Raises:
        TaskFailed: It returned something else.
    """
    done = found.done if isinstance(found, LoopDecision) else found
    if not isinstance(done, bool):
        kind = type(done)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(found, LoopDecision):
            raise TaskFailed(f"LoopDecision.done is {name}; give a bool, like bool(result)")
        raise TaskFailed(f"until() returned {name}; return a bool, like bool(result), or a LoopDecision")
    if not isinstance(found, LoopDecision):
        return LoopDecision(done)
    # A reason often quotes a result, which can be long and have characters that no database accepts.
    reason = "" if found.reason is None else escape_surrogates(str(found.reason)).replace("\0", "\\x00")
    return LoopDecision(done, shorten(reason, _MAX_REASON))


class LoopedTaskGroup(MappedTaskGroup):
    """A looped group; `loop` of a `@task_group` function creates it.

    Args:
        group_id: The id of the group.
        function: The function that creates the tasks.
        shared: The arguments of the function.
        max_iterations: The most iterations.
        options: Further arguments of `TaskGroup`.

    Raises:
        DagError: An argument is invalid, or the group is inside of a mapped or looped one.
    """

    kind = "looped"

    def __init__(
        self,
        group_id: str,
        *,
        function: Callable[..., Any],
        shared: Mapping[str, Any],
        max_iterations: int,
        **options: Any,
    ) -> None:
        super().__init__(group_id, function=function, expand_input=ExpandInput({}), shared=shared, **options)
        owner = f"group {self.group_id!r}"
        self.max_iterations = check_int(owner, "max_iterations", max_iterations, 1)
        if self.max_iterations > _MAX_ITERATIONS:
            raise DagError(f"{owner}: max_iterations must be at most {_MAX_ITERATIONS:,}, got {max_iterations}")
        self.max_outstanding = 1
        self.gate: Any = None
        #: The id of the task whose result is that of an iteration.
        self.result_id = ""

    @property
    def map_structure(self) -> MapStructure:
        """The structure of the loop, as the store keeps it."""
        loop = LoopStructure(self.max_iterations, self.gate.task_id)
        return MapStructure(("loop",), (MapSource("loop"),), 1, loop=loop)

    def close(self, output: Any, until: Callable[..., Any] | None, on_max: str) -> None:
        """Add the gate after the tasks of the body.

        Raises:
            DagError: The body has no tasks, or more than one has the result.
        """
        owner = f"group {self.group_id!r}"
        tasks = {task.task_id: task for task in self.iter_tasks()}
        leaves = [task for task in tasks.values() if tasks.keys().isdisjoint(task.downstream_task_ids)]
        if not tasks:
            raise DagError(f"{owner} is looped, but has no tasks; create them in its function")
        while isinstance(output, GroupOutput):
            output = output.value
        if isinstance(output, PlainXComArg) and output.key == RETURN_VALUE and output.operator.task_id in tasks:
            self.result_id = output.operator.task_id
        elif not (output is None or (isinstance(output, Node) and not isinstance(output, XComArg))):
            raise DagError(
                f"{owner}: its function returns {shorten(repr(output), _MAX_SHOWN)}, which cannot be the result of an "
                "iteration; return the output of one of its tasks, as a whole, or nothing"
            )
        elif len(leaves) == 1:
            self.result_id = leaves[0].task_id
        else:
            names = ", ".join(sorted(task.task_id for task in leaves))
            raise DagError(f"{owner}: the loop needs one task whose result counts ({names}); return its output")
        self.gate = LoopGate(task_id=GATE, until=until, on_max=on_max)
        for task in leaves:
            task >> self.gate

    def check(self) -> None:
        """Have what follows a task of the loop follow the gate, too, and check the group.

        Raises:
            DagError: One of its tasks cannot run in a loop.
        """
        tasks = {task.task_id: task for task in self.iter_tasks()}
        for task in list(tasks.values()):
            for name in sorted(task.downstream_task_ids - tasks.keys()):
                connect(self.gate, self.dag.task_dict[name])
        if self.result_id and self.dag.task_dict[self.result_id].is_generator:
            raise DagError(
                f"group {self.group_id!r}: task {self.result_id!r} yields its values, but the result of an iteration "
                "is one value; return a list"
            )
        super().check()

    def build_state(self, map_index: int, services: Any) -> LoopState:
        """Return the iteration of an attempt."""

        def read(index: int) -> Any:
            (text,) = services.get_xcom(XComQuery((self.result_id,), RETURN_VALUE, index))
            return None if text is None else decode(text)

        return LoopState(map_index + 1, self.max_iterations, read)


def check_until(owner: str, until: Any, on_max: object) -> None:
    """Check the arguments of `loop`.

    Raises:
        DagError: One of them is invalid.
    """
    if on_max not in _ON_MAX:
        raise DagError(f"{owner}: on_max must be 'fail' or 'succeed', got {on_max!r}")
    if until is not None and not callable(until):
        raise DagError(f"{owner}: until must be a function, got {until!r}")
    if until is None:
        return
    if getattr(until, "is_task_function", False):
        raise DagError(f"{owner}: until is a @task function, but runs in the gate of the loop; remove the decorator")
    try:
        takes_loop = "loop" in inspect.signature(until).parameters
    except (TypeError, ValueError):  # a function that is written in C
        takes_loop = False
    if not takes_loop:
        raise DagError(f"{owner}: until must take the keyword `loop`: def until(*, loop)")
    check_call(f"{owner}: until", until, [], {})
