"""Each kind of call names a function that takes it and returns its answer."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
from sqlalchemy import Connection

from tidemill.store.calls.call import Call, find_answer_type
from tidemill.store.calls.dispatch import list_kinds, load_functions
from tidemill.store.context import CallContext
from tidemill.store.wire import frames


@pytest.mark.parametrize("kind", list_kinds(), ids=lambda kind: kind.__name__)
def test_the_function_of_a_call_has_the_types_of_its_declaration(kind: type[Call[Any]]) -> None:
    function = load_functions()[kind]
    hints = get_type_hints(function)
    connection, request, context = (hints[name] for name in inspect.signature(function).parameters)
    assert (connection, context) == (Connection, CallContext)
    assert kind == request or kind in getattr(request, "__args__", ())
    assert hints["return"] in (find_answer_type(kind), type(find_answer_type(kind)))


@pytest.mark.parametrize("kind", list_kinds(), ids=lambda kind: kind.__name__)
def test_a_client_can_decode_every_kind_of_answer(kind: type[Call[Any]]) -> None:
    frames._build_answer_decoder(kind)
