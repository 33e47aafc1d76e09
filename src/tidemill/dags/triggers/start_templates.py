"""Templates in the arguments of a trigger that starts its task: their check in the file, and their rendering later.

No worker and no DAG file is at hand when they are rendered, on a thread of the triggerer. So they see values of the run
alone (`NAMES`): no macros, no XComs, no variables, no files.

Invariants: what `check_templates` accepts fails later only because of a value; equal values render to equal texts, so a
trigger that moves to another triggerer keeps its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Final

import jinja2
import jinja2.exceptions
import jinja2.meta
import jinja2.nativetypes
import jinja2.nodes
import jinja2.sandbox

from tidemill.dags.arguments import suggest
from tidemill.dags.attempt.lazy_context import LEFT_OUT
from tidemill.dags.attempt.task_services import AttemptClaim
from tidemill.dags.context.context import build_run_values
from tidemill.dags.context.dag_run import open_lists
from tidemill.dags.exceptions import DagError
from tidemill.dags.templates import FILTERS, Renderer, has_marks
from tidemill.runtime.json.codec import decode, encode

#: The names that templates may use. `element`: the mapped arguments of an element, by name.
NAMES: Final = frozenset(
    {
        *("dag_run", "data_interval_end", "data_interval_start", "ds", "ds_nodash", "element", "expanded_ti_count"),
        *("logical_date", "params", "run_id", "start_date", "task_instance", "ti", "try_number", "ts", "ts_nodash"),
        "ts_nodash_with_tz",
    }
)
#: Names of an attempt's context that need more than values of the run, each with the reason.
_ELSEWHERE: Final = {
    **dict.fromkeys(("var", "conn"), "variables and connections are read by the trigger itself"),
    "macros": "macros may give another value when the trigger moves to another triggerer; compute it in the trigger",
    **dict.fromkeys(("dag", "task"), "the file of the DAG is not imported there"),
}
#: The maximum number of compiled templates that are kept.
_KEPT: Final = 1_000
#: The largest product or power that a template may compute.
_MAX_RESULT: Final = 1_000_000
_LOADS: Final = (jinja2.nodes.Include, jinja2.nodes.Extends, jinja2.nodes.Import, jinja2.nodes.FromImport)
_PULLS: Final = ("xcom_pull", "xcom_push")


class _StartEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment without access to files or to the internals of objects; it keeps what it has compiled.

    It refuses huge products and powers, which Python computes without giving way to other threads.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, cache_size=0, **options)
        self.filters.update(FILTERS)
        self._compiled: dict[Any, jinja2.Template] = {}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power of moderate size."""
        if _measure(operator, left, right) > _MAX_RESULT:
            raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def from_string(self, source: Any, globals: Any = None, template_class: Any = None) -> jinja2.Template:
        """Compile a template, unless this was done before."""
        found = self._compiled.get(source)
        if found is None:
            found = super().from_string(source, globals, template_class)
            if len(self._compiled) >= _KEPT:
                self._compiled.clear()
            self._compiled[source] = found
        return found


class _NativeStartEnvironment(_StartEnvironment, jinja2.nativetypes.NativeEnvironment):
    """The same, for DAGs whose templates render to Python values."""


def _measure(operator: str, left: Any, right: Any) -> int:
    """Return the approximate size of a product or power: in items of a sequence, or in bits of a number."""
    if operator == "*":
        if isinstance(left, int) and hasattr(right, "__len__"):
            left, right = right, left
        return len(left) * right if hasattr(left, "__len__") and isinstance(right, int) else 0
    return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0


_ENVIRONMENTS: Final = {False: _StartEnvironment(), True: _NativeStartEnvironment()}


def find_templates(value: Any) -> Iterator[str]:
    """Yield the texts in a value that are templates, at any depth of lists, tuples, sets and dicts."""
    if isinstance(value, str):
        if has_marks(value):
            yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from find_templates(key)
            yield from find_templates(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from find_templates(item)


def check_templates(where: str, dag: Any, value: Any) -> frozenset[str]:
    """Check the templates in the arguments of a trigger; return the names that they use.

    Args:
        where: The task and its argument, for messages.
        dag: The DAG of the task.
        value: The arguments.

    Raises:
        DagError: A template is invalid, or uses something that is not known when the trigger starts.
    """
    names: set[str] = set()
    for text in find_templates(value):
        names |= _check_template(f"{where}: the template {text!r}", dag, text)
    return frozenset(names)


def _check_template(where: str, dag: Any, text: str) -> set[str]:
    environment = _ENVIRONMENTS[False]
    try:
        tree = environment.parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise DagError(f"{where} is invalid: {error.message}") from error
    for one in tree.find_all(jinja2.nodes.Filter):
        if one.name in dag.user_defined_filters or one.name not in environment.filters:
            what = "a filter of the DAG" if one.name in dag.user_defined_filters else "not a filter"
            raise DagError(f"{where} uses {one.name!r}, {what}; {_say_known('filters of Jinja')}")
    for _ in tree.find_all(_LOADS):
        raise DagError(f"{where} loads a file; {_say_known('values of the run')}")
    for found in tree.find_all((jinja2.nodes.Getattr, jinja2.nodes.Getitem)):
        name = found.attr if isinstance(found, jinja2.nodes.Getattr) else getattr(found.arg, "value", None)  # type: ignore[attr-defined]
        if name in _PULLS:
            raise DagError(
                f"{where} uses {name!r}: a trigger that starts its task cannot read XComs; map the task over the value "
                "with expand(trigger_kwargs=...), or defer in execute"
            )
    names = jinja2.meta.find_undeclared_variables(tree)
    for name in sorted(names - NAMES):
        raise DagError(f"{where} uses {name!r}{_explain(dag, name)}")
    return names


def _explain(dag: Any, name: str) -> str:
    if name in dag.user_defined_macros:
        return f", a macro of the DAG; {_say_known('values of the run')}"
    if (reason := _ELSEWHERE.get(name) or LEFT_OUT.get(name)) is not None:
        return f", which is not known there: {reason}"
    return f", which is not known there; {suggest(name, sorted(NAMES))}"


def _say_known(what: str) -> str:
    return f"a trigger that starts its task sees only {what}; compute the rest in the trigger, or defer in execute"


def render_kwargs(
    text: str, claim: AttemptClaim, element: Mapping[str, Any], started: datetime, *, native: bool
) -> str:
    """Return the arguments of a trigger with their templates rendered.

    Args:
        text: The encoded arguments.
        claim: The values of the run and of the task.
        element: The mapped arguments of an element, by name.
        started: When the try started.
        native: Whether templates render to Python values.

    Raises:
        ValueError: A template cannot be rendered, or its value cannot be encoded.
    """
    values = build_run_values(claim, open_lists(decode(claim.params) or {}, None))
    instance = SimpleNamespace(
        dag_id=claim.dag_id,
        run_id=claim.run_id,
        task_id=claim.task_id,
        map_index=claim.map_index,
        try_number=claim.try_number,
        max_tries=claim.max_tries - 1,
        start_date=started,
    )
    names = {**values, "element": element, "start_date": started, "ti": instance, "task_instance": instance}
    try:
        rendered = Renderer(lambda: _ENVIRONMENTS[native], names).render(decode(text))
    except jinja2.TemplateError as error:
        raise ValueError(f"a template in trigger_kwargs cannot be rendered: {error.message}") from error
    return encode(rendered, "trigger_kwargs")
