"""What all sections of the configuration have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NonEmpty = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A section refuses keys that it does not know, and values of another type ("5" is not 5)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=False,
        validate_assignment=True,
        strict=True,
        allow_inf_nan=False,
        # Wherever such an error ends up, a password must not be in it.
        hide_input_in_errors=True,
    )
