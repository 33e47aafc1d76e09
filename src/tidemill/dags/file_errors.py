"""Describes errors raised by DAG files, with hints where Airflow uses another name."""

from __future__ import annotations

import re
from pathlib import Path

from tidemill.core.errors import describe_error

#: Arguments of Airflow that tidemill does not have, and what to do instead.
OLD_ARGUMENTS = {
    "access_control": "remove it",
    "concurrency": "use max_active_tasks",
    "default_view": "remove it",
    "email": "use on_failure_callback",
    "email_on_failure": "use on_failure_callback",
    "email_on_retry": "use on_retry_callback",
    "fail_stop": "use fail_fast",
    "is_paused_upon_creation": "remove it; pause the DAG with `tidemill dags pause`",
    "map_index_template": "give it to partial() of a mapped task",
    "max_failed_elements": "give it to partial() of a mapped task",
    "max_outstanding": "give it to partial() of a mapped task",
    "orientation": "remove it",
    "provide_context": "remove it: a function receives the context values that its parameters name",
    "schedule_interval": "use schedule",
    "sla": "use execution_timeout",
    "sla_miss_callback": "use dagrun_timeout and on_failure_callback",
    "task_concurrency": "use max_active_tis_per_dag",
    "timetable": "use schedule",
}
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")
_NAMES = "tidemill does not need Airflow; use its own names: from tidemill.dags import DAG, task"


def explain_file_error(error: BaseException) -> str:
    """Return the type and message of a DAG file's error, with a hint if one is known.

    Example:
        >>> explain_file_error(ModuleNotFoundError("No module named 'airflow'", name="airflow"))[:62]
        "ModuleNotFoundError: No module named 'airflow'; tidemill does "
    """
    return describe_error(error) + find_hint(error)


def find_hint(error: BaseException) -> str:
    """Return a hint to append to the error message; empty if none is known."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "airflow":
        return f"; {_NAMES}"
    if isinstance(error, TypeError) and (found := _UNEXPECTED.search(str(error))) is not None:
        advice = OLD_ARGUMENTS.get(found[1])
        return "" if advice is None else f"; {advice}"
    return ""


def find_location(error: BaseException) -> str:
    """Return the file and line of a syntax error, which the last line of a traceback lacks; empty for other errors."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno is not None:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    return ""
