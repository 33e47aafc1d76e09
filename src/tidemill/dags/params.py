"""Params of runs: their defaults, and the JSON schema that their values must match."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, Final

from tidemill.dags.exceptions import DagError, ParamValidationError
from tidemill.runtime.json.schema import SchemaError, check_schema, find_mismatch

#: Stands for a missing default; each run must then supply the value.
NOT_SET: Final = object()
#: Defaults measured above this size are refused; it is several times the limit for the values of a run.
_MOST: Final = 8 * 1024 * 1024


class Param:
    """A param of a run.

    Args:
        default: The value for runs that do not supply one; without a default, every run must supply a value.
        description: A description for people.
        schema: The JSON schema of the values, as keywords: `Param(5, type="integer", minimum=1)`.

    Example:
        >>> Param(5, type="integer", minimum=1).resolve(7)
        7
    """

    def __init__(self, default: Any = NOT_SET, description: str | None = None, **schema: Any) -> None:
        self.default = default
        self.description = description
        # Airflow also accepts the schema as a single argument.
        self.schema: dict[str, Any] = {**schema.pop("schema", {}), **schema}

    @property
    def has_default(self) -> bool:
        """Whether runs may omit the value."""
        return self.default is not NOT_SET

    def resolve(self, value: Any = NOT_SET, name: str = "param") -> Any:
        """Return the value for a run.

        Args:
            value: The value that the run supplies, if any.
            name: The name of the param, for messages.

        Raises:
            ParamValidationError: The value does not match the schema, or there is neither a value nor a default.
        """
        found = self.default if value is NOT_SET else value
        if found is NOT_SET:
            raise ParamValidationError(f"param {name!r} has no default; give it a value")
        if self.schema:
            check_value(name, found, self.schema)
        return found

    def check_schema(self, owner: str, name: str) -> None:
        """Check that the schema is valid.

        Raises:
            DagError: The schema is invalid.
        """
        try:
            check_schema(self.schema)
        except SchemaError as error:
            raise DagError(f"{owner}: the schema of param {name!r} is invalid: {error}") from None

    def require(self, name: str) -> Param:
        """Return this param, or a copy without the default if the schema does not allow the default."""
        try:
            self.resolve(name=name)
        except ParamValidationError:
            required = copy.copy(self)
            required.default = NOT_SET
            return required
        return self

    def check_default(self, owner: str, name: str) -> None:
        """Check the default, if there is one.

        Raises:
            DagError: The default does not match the schema.
        """
        if self.has_default:
            try:
                self.resolve(name=name)
            except ParamValidationError as error:
                raise DagError(f"{owner}: the default of {error}") from None

    def __repr__(self) -> str:
        default = repr(self.default) if self.has_default else ""
        return f"Param({', '.join([default, *(f'{key}={value!r}' for key, value in self.schema.items())])})"


def check_value(name: str, value: Any, schema: Mapping[str, Any]) -> None:
    """Check a value against a JSON schema.

    Raises:
        ParamValidationError: The value does not match.
    """
    try:
        mismatch = find_mismatch(json.dumps(schema), value, f"param {name!r}")
    except SchemaError as error:
        raise ParamValidationError(f"the schema of param {name!r} is invalid: {error}") from None
    if mismatch:
        raise ParamValidationError(mismatch)


def wrap_params(owner: str, params: Mapping[str, Any] | None, *, may_lack: bool = False) -> dict[str, Param]:
    """Return params by name; a plain value becomes the default of a param without a schema.

    Args:
        owner: The owner of the params, for messages.
        params: The params.
        may_lack: Whether to drop a default that the schema does not allow, so that each run must supply the value; used
            for DAGs without a schedule. If False, such a default is an error.

    Raises:
        DagError: A name is not a string, or a param is invalid.
    """
    if params is not None and not isinstance(params, Mapping):
        raise DagError(f"{owner}: params must be a mapping of names to values, got {params!r}")
    found: dict[str, Param] = {}
    for name, value in (params or {}).items():
        if not isinstance(name, str) or not name:
            raise DagError(f"{owner}: the name of a param must be a string, got {name!r}")
        param = value if isinstance(value, Param) else Param(value)
        _check_size(owner, name, param.default)
        if param.schema:
            param.check_schema(owner, name)
            found[name] = param.require(name) if may_lack else param
            found[name].check_default(owner, name)
        else:
            found[name] = param
    return found


def _check_size(owner: str, name: str, default: Any) -> None:
    """Reject a default that refers to shared parts so often that serializing it would exhaust the memory."""
    from tidemill.runtime.json.validator import measure

    if isinstance(default, dict | list | tuple | set | frozenset) and measure(default, _MOST)[0] >= _MOST:
        raise DagError(f"{owner}: the default of param {name!r} is too large, or contains itself; pass a path or a key")
