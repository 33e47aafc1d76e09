"""What tests of the web UI share: each template is compiled once, not once for each of the hundreds of UIs.

So is what checks each parameter of a route, which takes most of the time in which a UI is made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import fastapi.dependencies.utils
import fastapi.routing
import pytest
from jinja2 import BytecodeCache, Environment
from jinja2.bccache import Bucket
from pydantic.fields import FieldInfo

from tidemill.web import pages


class _Compiled(BytecodeCache):
    def __init__(self) -> None:
        self._compiled: dict[tuple[str, str], bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if (compiled := self._compiled.get((bucket.key, bucket.checksum))) is not None:
            bucket.bytecode_from_string(compiled)

    def dump_bytecode(self, bucket: Bucket) -> None:
        self._compiled[bucket.key, bucket.checksum] = bucket.bytecode_to_string()


@pytest.fixture(scope="session", autouse=True)
def _templates_are_compiled_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "Environment", functools.partial(Environment, bytecode_cache=_Compiled()))
        yield


@pytest.fixture(scope="session", autouse=True)
def _parameters_are_prepared_once() -> Iterator[None]:
    prepare, prepared = fastapi.routing.create_model_field, dict[object, Any]()

    def repeat(field_info: FieldInfo | None = None, **given: Any) -> Any:
        if field_info is None:
            described: object = repr(given), given["type_"]
        else:
            # Its own words leave out what FastAPI checks.
            said = [*FieldInfo.__repr_args__(field_info), *sorted(vars(field_info).items()), field_info.annotation]
            described = type(field_info), given["name"], given.get("mode"), repr(said)
        if described not in prepared:
            prepared[described] = prepare(field_info=field_info, **given)
        return prepared[described]

    with pytest.MonkeyPatch.context() as patch:
        for module in (fastapi.routing, fastapi.dependencies.utils):
            patch.setattr(module, "create_model_field", repeat)
        yield
