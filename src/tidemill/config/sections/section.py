"""The base class of all sections of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tidemill.config.redaction import redact

NonEmpty = Annotated[str, Field(min_length=1)]


def _check_queue(name: str) -> str:
    if "\0" in name:
        raise ValueError("the name of a queue may not contain a NUL character")
    return name


QueueNames = Annotated[list[Annotated[NonEmpty, AfterValidator(_check_queue)]], Field(min_length=1)]


class Section(BaseModel):
    """A section rejects unknown keys and values of another type ("5" is not 5)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=False,
        validate_assignment=True,
        strict=True,
        allow_inf_nan=False,
        # A password must not be part of an error, wherever that is shown.
        hide_input_in_errors=True,
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the settings with secrets masked, since settings objects end up in logs and tracebacks."""
        for name, value in super().__repr_args__():
            yield name, redact({name: value})[name] if name else value


def to_upper(value: object) -> object:
    """Return text in upper case, and any other value unchanged: for validators of names like `info`."""
    return value.upper() if isinstance(value, str) else value
