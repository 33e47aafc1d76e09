"""Variables: texts that all DAGs share."""

from __future__ import annotations

import json
from typing import Any, Final

from tidemill.dags.current import find_services
from tidemill.dags.exceptions import NotFoundError

_NOT_GIVEN: Final = object()


class Variable:
    """Variables, by key."""

    @classmethod
    def get(cls, key: str, default: Any = _NOT_GIVEN, deserialize_json: bool = False) -> Any:
        """Return the value of a variable.

        Args:
            key: Its key.
            default: What to return if it does not exist.
            deserialize_json: Whether its text is JSON.

        Raises:
            NotFoundError: It does not exist, and there is no default.
            ValueError: It is not JSON.
        """
        text = find_services(f"variable {key!r}").get_variable(key)
        if text is None:
            if default is _NOT_GIVEN:
                raise NotFoundError(
                    f"variable {key!r} does not exist; set it with `tidemill variables set {key} VALUE`"
                )
            return default
        return json.loads(text) if deserialize_json else text

    @classmethod
    def set(cls, key: str, value: Any, description: str | None = None, serialize_json: bool = False) -> None:
        """Set a variable to a text; `serialize_json`: to a value as JSON."""
        text = json.dumps(value, indent=2) if serialize_json else str(value)
        find_services(f"variable {key!r}").set_variable(key, text, description)

    @classmethod
    def delete(cls, key: str) -> None:
        """Delete a variable, if it exists."""
        find_services(f"variable {key!r}").delete_variable(key)


class VariableAccessor:
    """Variables in templates: `var.value.name`, `var.json.name`, `var.value.get('name', 'default')`."""

    def __init__(self, *, deserialize_json: bool) -> None:
        """Read texts, or JSON."""
        self._deserialize_json = deserialize_json

    def __getattr__(self, key: str) -> Any:
        """Return a variable."""
        if key.startswith("__"):
            raise AttributeError(key)
        return Variable.get(key, deserialize_json=self._deserialize_json)

    def get(self, key: str, default: Any = _NOT_GIVEN) -> Any:
        """Return a variable, or a default."""
        return Variable.get(key, default, deserialize_json=self._deserialize_json)
