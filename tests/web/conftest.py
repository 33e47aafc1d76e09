"""What tests of the web UI share: each template is compiled once, not once for each of the hundreds of UIs."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from jinja2 import BytecodeCache, Environment
from jinja2.bccache import Bucket

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
