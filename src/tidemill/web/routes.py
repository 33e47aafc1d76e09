"""Routes of a section, until they are those of an application.

A router of FastAPI prepares each route when it is declared, and once more when the router is included: half of what a
web UI costs when it starts. What is declared here is prepared once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.params import Depends
from fastapi.routing import APIRoute

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _Declared:
    path: str
    endpoint: Callable[..., Any]
    options: dict[str, Any]


class Routes:
    """Routes that are declared as those of FastAPI.

    Args:
        prefix: The path before all others; ''.
        tags: Of all routes, in the description of the API.
        route_class: Their class.
        include_in_schema: Whether the description of the API has them.
        dependencies: Called before each of them, and before those that are included.
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        tags: Sequence[str] = (),
        route_class: type[APIRoute] = APIRoute,
        include_in_schema: bool = True,
        dependencies: Sequence[Depends] = (),
    ) -> None:
        """Declare nothing yet."""
        self._prefix = prefix
        self._options: dict[str, Any] = {
            "tags": list(tags),
            "route_class_override": route_class,
            "include_in_schema": include_in_schema,
            "dependencies": list(dependencies),
        }
        self._declared: list[_Declared] = []

    def get(self, path: str, **options: Any) -> Callable[[EndpointT], EndpointT]:
        """Declare the function that answers GET, with options as FastAPI has them."""
        return self._declare(path, "GET", options)

    def post(self, path: str, **options: Any) -> Callable[[EndpointT], EndpointT]:
        """Declare the function that answers POST, with options as FastAPI has them."""
        return self._declare(path, "POST", options)

    def add(self, path: str, endpoint: Callable[..., Any], methods: Sequence[str] = ("GET",), **options: Any) -> None:
        """Declare a function that answers several methods."""
        merged = {**self._options, **options, "methods": list(methods)}
        self._declared.append(_Declared(self._prefix + path, endpoint, merged))

    def include(self, other: Routes) -> None:
        """Add all routes of another one, as they are there, after the dependencies of this one."""
        for route in other._declared:
            before = [*self._options["dependencies"], *route.options["dependencies"]]
            self._declared.append(replace(route, options={**route.options, "dependencies": before}))

    def mount(
        self, app: FastAPI, prefix: str = "", *, dependencies: Sequence[Depends] = (), include_in_schema: bool = True
    ) -> None:
        """Make them routes of an application.

        Args:
            app: The application.
            prefix: The path before all of them.
            dependencies: Called before each of them.
            include_in_schema: Whether the description of the API may have them.
        """
        for route in self._declared:
            shown = include_in_schema and route.options["include_in_schema"]
            before = [*dependencies, *route.options["dependencies"]]
            options = {**route.options, "include_in_schema": shown, "dependencies": before}
            app.router.add_api_route(prefix + route.path, route.endpoint, **options)

    def _declare(self, path: str, method: str, options: dict[str, Any]) -> Callable[[EndpointT], EndpointT]:
        def declare(endpoint: EndpointT) -> EndpointT:
            self.add(path, endpoint, [method], **options)
            return endpoint

        return declare
