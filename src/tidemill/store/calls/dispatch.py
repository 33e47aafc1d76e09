"""Finds all kinds of calls, and answers calls with the functions that their kinds name.

Invariant: a kind of call is declared in a module `*_calls` of this package; no other list of kinds exists.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill.store import calls
from tidemill.store.calls.call import Call

# Clients list the kinds without SQLAlchemy.
if TYPE_CHECKING:
    from sqlalchemy import Connection

    from tidemill.store.context import CallContext

T = TypeVar("T")


@cache
def list_kinds() -> tuple[type[Call[Any]], ...]:
    """Return all kinds of calls, by name."""
    names = [module.name for module in pkgutil.iter_modules(calls.__path__) if module.name.endswith("_calls")]
    modules = [importlib.import_module(f"{calls.__name__}.{name}") for name in names]
    kinds = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Call) and value is not Call
    }
    return tuple(sorted(kinds, key=lambda kind: kind.__name__))


@cache
def load_functions() -> dict[type[Call[Any]], Callable[[Connection, Any, CallContext], Any]]:
    """Return the function of each kind of call. All are imported at once: later calls run the same version of them."""
    return {kind: pkgutil.resolve_name(f"tidemill.store.queries.{kind.function}") for kind in list_kinds()}


def answer_call(connection: Connection, request: Call[T], context: CallContext) -> T:
    """Answer a call; the functions are imported with the first call.

    Args:
        connection: A connection inside a transaction or a savepoint, which is rolled back if this raises.
        request: The call.
        context: The transaction's time, cipher and side effects.

    Raises:
        CallRefusedError: The call was refused.
    """
    answer: T = load_functions()[type(request)](connection, request, context)
    return answer
