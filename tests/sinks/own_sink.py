"""A sink as another package would bring it, for the tests of such."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from tidemill import ConfigError
from tidemill.sinks.base import Encoded, Refusal, Sink, to_json


class Options(pydantic.BaseModel, extra="forbid"):
    path: Path
    most_bytes: int = pydantic.Field(1000_000, gt=0)


class LinesSink(Sink):
    """Appends lines to one file."""

    type: ClassVar[str] = "lines"
    options_model: ClassVar[Any] = Options

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name)
        self.options = options

    async def connect(self) -> None:
        if not self.options.path.parent.is_dir():
            raise ConfigError(f"{self.section}: {self.options.path.parent} is not a folder")

    def encode(self, payload: Any) -> Encoded:
        body = to_json(payload.data)
        if len(body) > self.options.most_bytes:
            raise ValueError(f"{len(body)} bytes are too many")
        return Encoded(payload.key, body, len(body))

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        lines = b"".join(item.body + b"\n" for item in batch)
        await asyncio.to_thread(self._append, lines)
        return [None] * len(batch)

    def _append(self, lines: bytes) -> None:
        with self.options.path.open("ab") as file:
            file.write(lines)

    async def close(self) -> None:
        pass


class NoSink:
    """What somebody named by mistake."""


class Broken(LinesSink):
    type: ClassVar[str] = "broken"

    def __init__(self, name: str, options: Options) -> None:
        raise RuntimeError("no luck")


class Misnamed(LinesSink):
    type: ClassVar[str] = "other"


class Bare(LinesSink):
    type: ClassVar[str] = "bare"
    options_model: ClassVar[Any] = None
