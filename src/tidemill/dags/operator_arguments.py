"""The arguments that an operator accepts, and those that it takes from `default_args` of its DAG and groups."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from tidemill.dags.exceptions import DagError
from tidemill.dags.file_errors import OLD_ARGUMENTS
from tidemill.dags.group import find_open_group
from tidemill.dags.scope import open_dags


def name_task(task_id: object) -> str:
    """Return the name of a task for messages, before its id has been checked."""
    return f"task {task_id!r}" if isinstance(task_id, str) else "a task without task_id"


def collect_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged `default_args` for an operator with these arguments: of DAG, groups and operator."""
    group = given.get("task_group")
    dag = given.get("dag") or (group.dag if group is not None else None) or open_dags.current
    own = given.get("default_args") or {}
    if dag is None:
        return dict(own)
    return {**dag.default_args, **(group or find_open_group(dag)).all_default_args, **own}


@functools.lru_cache(maxsize=1024)
def list_names(cls: type, last: type) -> tuple[frozenset[str], bool]:
    """Return the argument names that a class accepts, and whether it accepts any other names.

    A `**kwargs` parameter stands for the arguments of the next class in the MRO, up to `last`.
    """
    names: set[str] = set()
    for each in cls.__mro__:
        init = each.__dict__.get("__init__")
        if init is None:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        names |= {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        if each is last or not any(one.kind is one.VAR_KEYWORD for one in parameters):
            return frozenset(names), False
    return frozenset(names), True


def check_names(cls: type, owner: str, given: Mapping[str, Any], last: type) -> frozenset[str]:
    """Return the argument names that a class accepts.

    Raises:
        DagError: A given argument is not among them.
    """
    names, others = list_names(cls, last)
    for name in given:
        if name not in names and not others:
            if (advice := OLD_ARGUMENTS.get(name)) is not None:
                raise DagError(f"{owner}: {cls.__name__} has no argument {name!r}; {advice}")
            near = difflib.get_close_matches(name, sorted(names), n=1)
            advice = f"did you mean {near[0]!r}?" if near else "remove it"
            raise DagError(f"{owner}: {cls.__name__} has no argument {name!r}; {advice}")
    return names


def list_required(cls: type) -> frozenset[str]:
    """Return the names of the arguments without a default that the constructor of a class names itself.

    Those of the classes above it are left out, because the constructor may give them.
    """
    init = next(each.__dict__["__init__"] for each in cls.__mro__ if "__init__" in each.__dict__)
    parameters = list(inspect.signature(init).parameters.values())[1:]
    return frozenset(
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.default is one.empty
    )


def list_changed_defaults(cls: type, last: type) -> dict[str, Any]:
    """Return the arguments of `last` for which a class below it has a default of its own, such as `retries=5`."""
    names, _ = list_names(last, last)
    found: dict[str, Any] = {}
    for each in cls.__mro__:
        if each is last:
            break
        if (init := each.__dict__.get("__init__")) is not None:
            for one in inspect.signature(init).parameters.values():
                if one.name in names and one.default is not one.empty:
                    found.setdefault(one.name, one.default)
    return found
