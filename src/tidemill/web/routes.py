"""Routes of a section, collected until they are added to an application.

FastAPI's own router prepares each route when it is declared, and again when the router is included; that took half of
the web UI's startup timeup time. Routes declared here are prepared once.
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
    """Collects routes, declared as with FastAPI's router.

    Args:
        prefix: The path in front of every route's path.
        tags: Tags of all routes in the OpenAPI document.
        route_class: The class of the routes.
        include_in_schema: Whether the OpenAPI document lists the routes.
        dependencies: Called before every route, included ones too.
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
        self._prefix = prefix
        self._options: dict[str, Any] = {
            "tags": list(tags),
            "route_class_override": route_class,
            "include_in_schema": include_in_schema,
            "dependencies": list(dependencies),
        }
        self._declared: list[_Declared] = []

    def get(self, path: str, **options: Any) -> Callable[[EndpointT], EndpointT]:
        """Declare the function that answers GET; takes FastAPI's options."""
        return self._declare(path, "GET", options)

    def post(self, path: str, **options: Any) -> Callable[[EndpointT], EndpointT]:
        """Declare the function that answers POST; takes FastAPI's options."""
        return self._declare(path, "POST", options)

    def add(self, path: str, endpoint: Callable[..., Any], methods: Sequence[str] = ("GET",), **options: Any) -> None:
        """Declare a function that answers several methods."""
        merged = {**self._options, **options, "methods": list(methods)}
        self._declared.append(_Declared(self._prefix + path, endpoint, merged))

    def include(self, other: Routes) -> None:
        """Add all current routes of another collection; the dependencies of this one run first."""
        for route in other._declared:
            before = [*self._options["dependencies"], *route.options["dependencies"]]
            self._declared.append(replace(route, options={**route.options, "dependencies": before}))

    def mount(
        self, app: FastAPI, prefix: str = "", *, dependencies: Sequence[Depends] = (), include_in_schema: bool = True
    ) -> None:
        """Add the routes to an application.

        Args:
            app: The application.
            prefix: The path in front of every route's path.
            dependencies: Called before every route.
            include_in_schema: Whether the OpenAPI document may list the routes.
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
