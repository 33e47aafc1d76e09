"""Reads the log of a try part by part, and formats its lines."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tidemill.core.errors import ConfigError
from tidemill.core.tasks.instance import format_instance
from tidemill.runtime.log.task_lines import TaskLine, decode_lines, overwrite_lines

if TYPE_CHECKING:
    from tidemill.cli.dags.asking import StoreAsker
    from tidemill.store.calls.run_calls import RunRecord

_ENDED = ("success", "failed", "skipped", "upstream_failed", "removed")


def has_ended(store: StoreAsker, run: RunRecord, task: str, map_index: int) -> bool:
    """Return whether a task instance of a run has ended.

    Raises:
        ConfigError: The run has no such instance.
    """
    from tidemill.store.calls.instance_calls import ListTasks

    found = store.ask(ListTasks(run.dag_id, run.run_id, task_id=task, map_index=map_index)).rows
    if not found:
        raise ConfigError(
            f"{run.dag_id} {run.run_id} has no task {format_instance(task, map_index)!r}; "
            f"`tidemill tasks states {run.dag_id} --run {run.run_id}` lists its tasks"
        )
    return found[0].state in _ENDED


def read_log(
    store: StoreAsker, run: RunRecord, task: str, map_index: int, try_number: int | None, after: str | None
) -> tuple[list[TaskLine], str | None]:
    """Return the lines of a log after a part, and the last part that was read.

    Args:
        store: The store.
        run: The run.
        task: The task.
        map_index: The index of an element of a mapped task; -1: the task itself.
        try_number: The number of the try; None: the last one.
        after: The last part read so far; None: read from the beginning.
    """
    from tidemill.store.calls.log_calls import ReadLog

    lines: list[TaskLine] = []
    while True:
        page = store.ask(ReadLog(run.dag_id, run.run_id, task, map_index, try_number, after))
        for part in page.rows:
            lines += decode_lines(zlib.decompress(part.data))
            after = str(part.number)
        if page.next is None:
            return lines, after


def read_callback_log(store: StoreAsker, run: RunRecord, callback: int) -> list[TaskLine]:
    """Return the log lines of a callback of a run itself."""
    from tidemill.store.calls.callback_calls import ReadCallbackLog

    pages = store.ask_pages(lambda after: ReadCallbackLog(run.dag_id, run.run_id, callback, after))
    return [line for page in pages for part in page for line in decode_lines(zlib.decompress(part.data))]


def format_log_line(line: TaskLine) -> str:
    r"""Return a log line in readable form; times are UTC.

    Example:
        >>> format_log_line(TaskLine(1_500_000, "info", "stdout", "hello"))
        '00:00:01.500 hello'
        >>> format_log_line(TaskLine(1_500_000, "info", "stdout", "\r 50%\r100%"))
        '00:00:01.500 100%'
    """
    clock = datetime.fromtimestamp(line.time_us / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3]
    level = "" if line.level in ("info", "debug") and line.source != "logging" else f"{line.level.upper()} "
    text = overwrite_lines(line.text)
    text = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
    return f"{clock} {level}{text}"


def encode_log_line(line: TaskLine, map_index: int | None = None) -> str:
    """Return a log line as one line of JSON. `map_index`: the element that it is of; None: of the only one shown."""
    document: dict[str, Any] = {
        **({} if map_index is None else {"map_index": map_index}),
        "time": datetime.fromtimestamp(line.time_us / 1e6, UTC).isoformat(timespec="milliseconds"),
        "level": line.level,
        "source": line.source,
        "text": line.text,
    }
    return json.dumps(document)
