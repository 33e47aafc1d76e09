"""A task that does nothing."""

from __future__ import annotations

from typing import Any

from tidemill.dags.operator import BaseOperator


class EmptyOperator(BaseOperator):
    """Does nothing: joins branches or marks a point in the DAG."""

    ui_color = "#e8f7e4"

    def execute(self, context: Any) -> None:
        return
