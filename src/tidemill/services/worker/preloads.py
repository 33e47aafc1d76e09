"""The modules that the zygote imports before it forks task processes, so that these find them in memory.

They are given by name, because the worker itself needs none of them.
"""

from __future__ import annotations

PRELOADS = (
    "asyncio",
    "jinja2",
    "jinja2.sandbox",
    "multiprocessing.resource_tracker",
    "zoneinfo",
    "tidemill.dags",
    "tidemill.dags.definition",
    "tidemill.dags.decorators",
    "tidemill.dags.operators.bash",
    "tidemill.dags.operators.empty",
    "tidemill.dags.operators.python",
    "tidemill.dags.execution.running",
    "tidemill.dags.sensors.base",
    "tidemill.dags.sensors.temporal",
    "tidemill.services.worker.task.process",
    "tidemill.services.worker.task.template",
    "tidemill.triggers.base",
)
