"""A trigger that claims its upstream for its list."""

from __future__ import annotations

from typing import Any

from tests.services.triggerer.hosted import Counting


class Claiming(Counting):
    def __init__(self, upstream: str | None = None, fails: bool = False) -> None:
        super().__init__(then="wait")
        self.upstream, self.fails = upstream, fails

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.claiming.Claiming", {"upstream": self.upstream, "fails": self.fails}

    def upstream_claim(self) -> str | None:
        if self.fails:
            raise ValueError("cannot say")
        return self.upstream
