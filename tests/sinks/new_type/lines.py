"""Appends lines to one file: the sink that `test_new_type.py` adds to a copy of tidemill."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tidemill.config.sections.sink_settings import LinesSinkSettings
from tidemill.core.errors import ConfigError
from tidemill.sinks.base import Encoded, Refusal, Sink, to_json
from tidemill.sinks.payloads import LinesPayload


class LinesSink(Sink):
    type = "lines"

    def __init__(self, name: str, settings: LinesSinkSettings) -> None:
        super().__init__(name)
        self._path = Path(settings.path)

    async def connect(self) -> None:
        if not self._path.parent.is_dir():
            raise ConfigError(f"{self.section}: {self._path.parent} is not a folder")

    def encode(self, payload: LinesPayload) -> Encoded:
        body = payload.title.encode() + b" " + to_json(payload.data)
        return Encoded(payload.title, body, len(body))

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        with self._path.open("ab") as file:
            file.write(b"".join(item.body + b"\n" for item in batch))
        return [None] * len(batch)

    async def close(self) -> None:
        pass
