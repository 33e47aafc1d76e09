"""`tidemill tasks states | elements | history | events | logs | xcoms | clear | retry-failed | mark`: a run's tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tidemill.cli.dags.asking import AsJson, Config, DagId, Folder, RunId, StoreAsker, asking, find_user
from tidemill.cli.dags.runs import check_states, find_run
from tidemill.cli.help import App
from tidemill.cli.reporting import reporting
from tidemill.core.tasks.instance import MAX_INDEX, UNMAPPED, format_instance
from tidemill.core.wording import format_count

if TYPE_CHECKING:
    from tidemill.store.calls.instance_calls import TaskRecord
    from tidemill.store.calls.run_calls import RunRecord

app = App(help="Show, clear and mark the tasks of a run.")

TaskId = Annotated[str, typer.Argument(metavar="TASK", help="The id of the task.")]
TaskIds = Annotated[list[str] | None, typer.Argument(metavar="TASK", help="The ids of the tasks; default: all.")]
Index = Annotated[
    int | None,
    typer.Option("--index", metavar="N", min=0, max=MAX_INDEX, help="The index of an element of a mapped task."),
]
Indexes = Annotated[
    str | None,
    typer.Option("--index", metavar="N|A-B", help="The index of an element of a mapped task, or a range of indexes."),
]
_OPEN = ("none", "scheduled", "queued", "running", "deferred", "up_for_retry", "ending")
_ENDED = ("success", "failed", "skipped", "upstream_failed")
_STATES = (*_OPEN, "mapped", *_ENDED)
_ELEMENT_STATES = (*_OPEN, "mapped", *_ENDED, "removed")
_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?", re.ASCII)
#: How often a followed log is read again.
_FOLLOW_SECONDS = 0.5


@app.command()
def states(
    dag: DagId,
    run: RunId = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Show only tasks in this state.")
    ] = None,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of each task of a run, and why it waits; of a mapped task, the counts of its elements."""
    with reporting():
        from tidemill.cli.dags.waits import describe_waits, show_tasks
        from tidemill.store.calls.instance_calls import ListTasks

        wanted = check_states(state or [], _STATES)
        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            pages = store.ask_pages(lambda after: ListTasks(dag, found.run_id, after=after))
            tasks = [task for page in pages for task in page]
            waits = describe_waits(store, found, tasks)
            tasks = [task for task in tasks if not wanted or task.state in wanted]
            show_tasks(tasks, waits, as_json=as_json, nothing="no such tasks")


@app.command()
def elements(
    dag: DagId,
    task: TaskId,
    run: RunId = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Show only elements in this state.")
    ] = None,
    index: Indexes = None,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show the elements of a mapped task or group, by index."""
    with reporting():
        from tidemill.cli.dags.views import ELEMENTS, show_rows
        from tidemill.store.calls.element_calls import ListElements

        wanted = check_states(state or [], _ELEMENT_STATES)
        first, last = _parse_range(index) or (None, None)
        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            pages = store.ask_pages(
                lambda after: ListElements(dag, found.run_id, task, wanted, first, last, after=after)
            )
            show_rows(pages, ELEMENTS, as_json=as_json, nothing="no such elements")


@app.command()
def history(
    dag: DagId,
    task: TaskId,
    run: RunId = None,
    index: Index = None,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show the history of a task: each change of its state, with the reason and the cause."""
    with reporting():
        from tidemill.cli.dags.views import CHANGES, show_rows
        from tidemill.store.calls.instance_calls import TaskHistory

        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            number = _number(index)
            pages = store.ask_pages(lambda after: TaskHistory(dag, found.run_id, task, number, after=after))
            show_rows(pages, CHANGES, as_json=as_json, nothing="the task has no history yet")


@app.command()
def events(
    dag: DagId,
    task: TaskId,
    run: RunId = None,
    index: Index = None,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show the events of the trigger that a task waits for, or has waited for last; newest first."""
    with reporting():
        from tidemill.cli.dags.views import EVENTS, show_rows
        from tidemill.store.calls.stream_calls import ListTaskEvents

        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            number = _number(index)
            pages = store.ask_pages(lambda after: ListTaskEvents(dag, found.run_id, task, number, after=after))
            show_rows(pages, EVENTS, as_json=as_json, nothing="no events")


@app.command()
def xcoms(
    dag: DagId,
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="Show only XComs of this task.")] = None,
    run: RunId = None,
    index: Annotated[
        str | None,
        typer.Option("--index", metavar="N|A-B", help="Show only XComs of the elements with this index, or a range."),
    ] = None,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show the values that the tasks of a run have returned and pushed."""
    with reporting():
        from tidemill.cli.dags.views import XCOMS, show_rows
        from tidemill.store.calls.xcom_calls import ListXComs

        first, last = _parse_range(index) or (None, None)
        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            pages = store.ask_pages(
                lambda after: ListXComs(dag, found.run_id, task, after=after, map_index=first, last_index=last)
            )
            show_rows(pages, XCOMS, as_json=as_json, nothing="no XComs")


@app.command()
def logs(
    dag: DagId,
    task: TaskId,
    run: RunId = None,
    index: Indexes = None,
    try_number: Annotated[
        int | None,
        typer.Option(
            "--try", metavar="N", min=0, help="The number of the try; 0: the callbacks; default: the last try."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until the task has ended.")] = False,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show the log of a task: its output, log entries and errors; for a range of elements, one after the other."""
    with reporting():
        from tidemill.cli.dags.log_view import encode_log_line, format_log_line, has_ended, read_log
        from tidemill.core.errors import ConfigError

        number, indexes = _choose_elements(index)
        if indexes is not None and follow:
            raise ConfigError(f"--follow shows one element; give it an index instead of --index {index}")
        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            if indexes is not None:
                for element in _list_elements(store, found, task, *indexes):
                    if not as_json:
                        typer.echo(f"--- {format_instance(task, element.map_index)}: {element.state}")
                    for line in read_log(store, found, task, element.map_index, try_number, None)[0]:
                        typer.echo(encode_log_line(line, element.map_index) if as_json else format_log_line(line))
                return
            after: str | None = None
            while True:
                # Checked before reading, so that no later lines are missed.
                ended = has_ended(store, found, task, number)
                lines, after = read_log(store, found, task, number, try_number, after)
                for line in lines:
                    typer.echo(encode_log_line(line) if as_json else format_log_line(line))
                if not follow or ended:
                    return
                store.wait(_FOLLOW_SECONDS)


@app.command()
def clear(
    dag: DagId,
    tasks: TaskIds = None,
    run: RunId = None,
    index: Indexes = None,
    downstream: Annotated[bool, typer.Option("--downstream", help="Also clear downstream tasks.")] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Clear only tasks that are failed or upstream_failed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the tasks that would run again.")] = False,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Clear tasks so that they run again from the beginning; a run that has ended continues."""
    with reporting():
        from tidemill.store.calls.instance_calls import ClearTasks

        number, indexes = _choose_elements(index)
        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            names = store.ask(
                ClearTasks(
                    dag,
                    found.run_id,
                    tuple(tasks or ()),
                    find_user(),
                    downstream=downstream,
                    failed=failed,
                    dry_run=dry_run,
                    map_index=number,
                    indexes=indexes,
                )
            )
        _say_changed(names, "would run again" if dry_run else "cleared", as_json=as_json)


@app.command("retry-failed")
def retry_failed(
    dag: DagId,
    task: TaskId,
    run: RunId = None,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Run the failed elements of a mapped task or group again, and the tasks that failed because of them."""
    with reporting():
        from tidemill.store.calls.instance_calls import ClearTasks, ListTasks, split_clear

        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            call = ClearTasks(dag, found.run_id, (task,), find_user(), downstream=True, failed=True)
            rows = store.ask(ListTasks(dag, found.run_id, task_id=task)).rows
            parts = split_clear(call, rows[0].elements if rows else None)
            names = tuple(name for part in parts for name in store.ask(part))
        _say_changed(names, "cleared", as_json=as_json)


@app.command()
def mark(
    dag: DagId,
    tasks: Annotated[list[str], typer.Argument(metavar="TASK", help="The ids of the tasks.")],
    state: Annotated[str, typer.Option("--as", metavar="STATE", help="success, failed or skipped.")],
    run: RunId = None,
    index: Indexes = None,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Mark tasks as success, failed or skipped; a running task is stopped."""
    with reporting():
        from tidemill.core.errors import ConfigError
        from tidemill.store.calls.instance_calls import MarkTasks

        outcomes: dict[str, Literal["success", "failed", "skipped"]] = {
            "success": "success",
            "failed": "failed",
            "skipped": "skipped",
        }
        if state not in outcomes:
            raise ConfigError(f"--as {state}: a task can be marked as success, failed or skipped")
        number, indexes = _choose_elements(index)
        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            call = MarkTasks(dag, found.run_id, tuple(tasks), outcomes[state], find_user(), number, indexes)
            names = store.ask(call)
        _say_changed(names, f"marked as {state}", as_json=as_json)


def _list_elements(store: StoreAsker, run: RunRecord, task: str, first: int, last: int) -> Iterator[TaskRecord]:
    """Yield the elements of a mapped task within a range of indexes.

    Raises:
        ConfigError: There is none.
    """
    from tidemill.core.errors import ConfigError
    from tidemill.store.calls.element_calls import ListElements

    number = 0
    for page in store.ask_pages(lambda after: ListElements(run.dag_id, run.run_id, task, (), first, last, after)):
        number += len(page)
        yield from page
    if not number:
        raise ConfigError(
            f"{run.dag_id} {run.run_id} has no elements {first} to {last} of task {task!r}; "
            f"`tidemill tasks elements {run.dag_id} {task} --run {run.run_id}` lists them"
        )


def _number(index: int | None) -> int:
    """Return the map index that an option names."""
    return UNMAPPED if index is None else index


def _parse_range(index: str | None) -> tuple[int, int] | None:
    """Return the first and the last index that an option names.

    Raises:
        ConfigError: It names neither an index nor a range.
    """
    from tidemill.core.errors import ConfigError

    if index is None:
        return None
    found = _RANGE.fullmatch(index.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last or last > MAX_INDEX:
        raise ConfigError(f"--index {index}: give an index such as 3, or a range such as 3-7")
    return first, last


def _choose_elements(index: str | None) -> tuple[int, tuple[int, int] | None]:
    """Return the map index and the range of indexes that an option names; one of them says nothing."""
    found = _parse_range(index)
    if found is None or found[0] == found[1]:
        return (UNMAPPED if found is None else found[0]), None
    return UNMAPPED, found


def _say_changed(names: tuple[str, ...], what: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"tasks": list(names)}))
        return
    for name in names:
        typer.echo(name)
    typer.echo(f"{format_count(len(names), 'task')} {what}")
