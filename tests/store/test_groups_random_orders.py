"""Runs with a mapped group that a user clears, marks and cancels at random end, and each map counts its elements."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
from tests.size import sized
from tests.store.dags import dag, task
from tests.store.server import PostgresServer
from tests.store.test_groups import group, part
from tests.store.test_maps_random_orders import Life, play

from tidemill.core.tasks.structure import DagStructure, MapSource


class GroupLife(Life):
    """A generator, a group over it that has four tasks, and tasks before and after the group."""

    NAMES: ClassVar[list[tuple[str, ...]]] = [
        ("m",), ("m",), ("n",), ("f",), ("h",), ("a",), ("g",), ("x",), ("z",), ("n", "h"), (),
    ]  # fmt: skip

    def build(self, rule: str, limit: int | None) -> DagStructure:
        rules = [self.random.choice(["all_success", "all_done", "one_failed", "none_failed"]) for _ in range(2)]
        return dag(
            task("g", is_generator=True, retries=2, retry_delay_us=0),
            task("x"),
            group(MapSource("generator", "g"), id="m", max_outstanding=2, max_failed_elements=limit),
            part("n", group="m", retries=1, retry_delay_us=0),
            part("f", "n", "x", group="m"),
            part("h", "n", group="m", rule=rules[0]),
            part("a", "f", "h", group="m", rule=rules[1]),
            task("z", "a", rule=rule),
            id=f"group{self.seed}",
            fail_fast=self.random.random() < 0.2,
        )


def test_random_orders_on_groups_in_sqlite(tmp_path: Path) -> None:
    play(f"sqlite:///{tmp_path}/tidemill.db", range(8), GroupLife)


@pytest.mark.nightly
def test_random_orders_on_groups_in_sqlite_often(tmp_path: Path) -> None:
    play(f"sqlite:///{tmp_path}/tidemill.db", range(1000, 1020), GroupLife)


@pytest.mark.long
def test_random_orders_on_groups_in_postgresql(postgres: PostgresServer) -> None:
    with asyncio.Runner() as runner:
        url = runner.run(postgres.new_database())
    play(url, range(sized(5, 10)), GroupLife)
