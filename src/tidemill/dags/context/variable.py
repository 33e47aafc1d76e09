"""Variables: strings that all DAGs share."""

from __future__ import annotations

import json
from typing import Any, Final

from tidemill.dags.attempt.current import find_shared_values
from tidemill.dags.exceptions import NotFoundError

_NOT_GIVEN: Final = object()


class Variable:
    """Access to variables, which are strings shared by all DAGs."""

    @classmethod
    def get(cls, key: str, default: Any = _NOT_GIVEN, deserialize_json: bool = False) -> Any:
        """Return the value of a variable.

        Args:
            key: The key of the variable.
            default: The value to return if the variable does not exist.
            deserialize_json: Whether to decode the value as JSON.

        Raises:
            NotFoundError: The variable does not exist, and there is no default.
            ValueError: The value is not JSON.
        """
        text = find_shared_values(f"variable {key!r}").get_variable(key)
        if text is None:
            if default is _NOT_GIVEN:
                raise NotFoundError(
                    f"variable {key!r} does not exist; set it with `tidemill variables set {key} VALUE`"
                )
            return default
        return json.loads(text) if deserialize_json else text

    @classmethod
    def set(cls, key: str, value: Any, description: str | None = None, serialize_json: bool = False) -> None:
        """Set a variable to a string, or to the JSON of `value` if `serialize_json` is True."""
        text = json.dumps(value, indent=2) if serialize_json else str(value)
        find_shared_values(f"variable {key!r}").set_variable(key, text, description)

    @classmethod
    def delete(cls, key: str) -> None:
        """Delete a variable, if it exists."""
        find_shared_values(f"variable {key!r}").delete_variable(key)


class VariableAccessor:
    """Access to variables in templates: `var.value.name`, `var.json.name`, `var.value.get('name', 'default')`."""

    def __init__(self, *, deserialize_json: bool) -> None:
        self._deserialize_json = deserialize_json

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return Variable.get(key, deserialize_json=self._deserialize_json)

    def get(self, key: str, default: Any = _NOT_GIVEN) -> Any:
        """Return the value of a variable, or `default` if it does not exist."""
        return Variable.get(key, default, deserialize_json=self._deserialize_json)
