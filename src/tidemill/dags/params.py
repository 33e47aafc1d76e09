"""Parameters of runs: their defaults, and the JSON schema that their values have to match."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, Final

from tidemill.dags.exceptions import DagError, ParamValidationError
from tidemill.runtime.json.schema import SchemaError, check_schema, find_mismatch

#: Stands for a default that is not given: a run has to give the value.
NOT_SET: Final = object()
#: Defaults that are measured as larger are refused: several times as much as a run may be given.
_MOST: Final = 8 * 1024 * 1024


class Param:
    """A parameter of a run.

    Args:
        default: Its value unless the run gives one; without it, the run has to give one.
        description: What it is, for people.
        schema: JSON schema of its values, by keyword: `Param(5, type="integer", minimum=1)`.

    Example:
        >>> Param(5, type="integer", minimum=1).resolve(7)
        7
    """

    def __init__(self, default: Any = NOT_SET, description: str | None = None, **schema: Any) -> None:
        """Keep them; the DAG checks them."""
        self.default = default
        self.description = description
        # Airflow has the schema in an argument of its own as well.
        self.schema: dict[str, Any] = {**schema.pop("schema", {}), **schema}

    @property
    def has_default(self) -> bool:
        """Whether a run need not give a value."""
        return self.default is not NOT_SET

    def resolve(self, value: Any = NOT_SET, name: str = "param") -> Any:
        """Return the value for a run.

        Args:
            value: What the run gives; by default nothing.
            name: How the param is called in messages.

        Raises:
            ParamValidationError: It does not match the schema, or there is none.
        """
        found = self.default if value is NOT_SET else value
        if found is NOT_SET:
            raise ParamValidationError(f"param {name!r} has no default; give it a value")
        if self.schema:
            check_value(name, found, self.schema)
        return found

    def check_schema(self, owner: str, name: str) -> None:
        """Check the schema.

        Raises:
            DagError: It cannot be used.
        """
        try:
            check_schema(self.schema)
        except SchemaError as error:
            raise DagError(f"{owner}: the schema of param {name!r} cannot be used: {error}") from None

    def require(self, name: str) -> Param:
        """Return a param without the default, if the schema does not allow that; else this one."""
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
            DagError: It does not match the schema.
        """
        if self.has_default:
            try:
                self.resolve(name=name)
            except ParamValidationError as error:
                raise DagError(f"{owner}: the default of {error}") from None

    def __repr__(self) -> str:
        """Show the default and the schema."""
        default = repr(self.default) if self.has_default else ""
        return f"Param({', '.join([default, *(f'{key}={value!r}' for key, value in self.schema.items())])})"


def check_value(name: str, value: Any, schema: Mapping[str, Any]) -> None:
    """Check a value against JSON schema.

    Raises:
        ParamValidationError: It does not match.
    """
    try:
        mismatch = find_mismatch(json.dumps(schema), value, f"param {name!r}")
    except SchemaError as error:
        raise ParamValidationError(f"param {name!r}: its schema cannot be used: {error}") from None
    if mismatch:
        raise ParamValidationError(mismatch)


def wrap_params(owner: str, params: Mapping[str, Any] | None, *, may_lack: bool = False) -> dict[str, Param]:
    """Return params by name, the plain ones among them as defaults without a schema.

    Args:
        owner: What has them, for messages.
        params: The params.
        may_lack: Whether a default that the schema does not allow means that each run has to give a value, as where
            no run is created by a schedule; else it is an error.

    Raises:
        DagError: A name is not a text, or a param is wrong.
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
    """Refuse what is built of shared parts, and would take all memory to be written."""
    from tidemill.runtime.json.validator import measure

    if isinstance(default, dict | list | tuple | set | frozenset) and measure(default, _MOST)[0] >= _MOST:
        raise DagError(f"{owner}: the default of param {name!r} is too large, or contains itself; use a path or a key")
