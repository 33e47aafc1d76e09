"""`tidemill runs list | show | callbacks | cancel`: the runs of DAGs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.dags.asking import AsJson, Config, DagId, Folder, StoreAsker, asking, find_user
from tidemill.cli.help import App
from tidemill.cli.reporting import reporting
from tidemill.core.tasks.instance import UNMAPPED

if TYPE_CHECKING:
    from tidemill.store.calls.callback_calls import CallbackRecord
    from tidemill.store.calls.run_calls import RunRecord

app = App(help="Show and cancel runs of DAGs.")

Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="The id of the run; default: the newest run of the DAG.")
]


@app.command("list")
def list_(
    dag: Annotated[str | None, typer.Argument(metavar="DAG", help="Show only runs of this DAG.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", metavar="STATE", help="Show only runs in this state: queued, running, success or failed."
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="Show at most N runs.")] = 50,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    with reporting():
        from tidemill.cli.dags.views import RUNS, show_rows
        from tidemill.store.calls.run_calls import ListRuns

        states = check_states(state or [], ("queued", "running", "success", "failed"))
        with asking(config, folder) as store:
            page = store.ask(ListRuns(dag_id=dag, states=states, limit=limit))
            show_rows([page.rows], RUNS, as_json=as_json, nothing="no runs")


@app.command()
def show(dag: DagId, run: Run = None, config: Config = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """Show a run with its tasks, each with the reason why it waits."""
    with reporting():
        from tidemill.cli.dags.views import (
            CALLBACKS,
            RUNS,
            encode_callback,
            encode_run,
            show_rows,
        )
        from tidemill.cli.dags.waits import describe_waits, encode_waiting_task, find_services, show_tasks
        from tidemill.store.calls.instance_calls import ListTasks

        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            pages = store.ask_pages(lambda after: ListTasks(dag, found.run_id, after=after))
            tasks = [task for page in pages for task in page]
            waits = describe_waits(store, found, tasks)
            called = list_callbacks(store, found)
            if found.ended_us is None and (missing := find_services(store).explain_all()):
                typer.echo(f"warning: the run waits: {missing}", err=True)
            if as_json:
                shown = [encode_waiting_task(task, waits) for task in tasks]
                callbacks = [encode_callback(one) for one in called]
                typer.echo(json.dumps({**encode_run(found), "tasks": shown, "callbacks": callbacks}))
                return
            show_rows([[found]], RUNS, as_json=False, nothing="")
            typer.echo()
            show_tasks(tasks, waits, as_json=False, nothing="no tasks")
            if called:
                typer.echo()
                show_rows([called], CALLBACKS, as_json=False, nothing="")


@app.command()
def callbacks(
    dag: DagId, run: Run = None, config: Config = None, folder: Folder = None, as_json: AsJson = False
) -> None:
    """Show the outcomes and the output of a run's callbacks, and the failed callbacks of its tasks."""
    with reporting():
        from tidemill.cli.dags.log_view import encode_log_line, format_log_line, read_callback_log
        from tidemill.cli.dags.views import build_callback_row, encode_callback

        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            called = list_callbacks(store, found)
            for one in called:
                lines = read_callback_log(store, found, one.id) if one.task_id is None else []
                if as_json:
                    said = [json.loads(encode_log_line(line)) for line in lines]
                    typer.echo(json.dumps({**encode_callback(one), "log": said}))
                    continue
                name, of, state, _, error = build_callback_row(one)
                typer.echo(f"--- {name} of {of}: {state}{f': {error}' if error else ''}")
                for line in lines:
                    typer.echo(format_log_line(line))
                if one.task_id is not None:
                    index = "" if one.map_index == UNMAPPED else f" --index {one.map_index}"
                    typer.echo(
                        f"for its log, run: tidemill tasks logs {dag} {one.task_id} --run {found.run_id}{index} --try 0"
                    )
            if not called and not as_json:
                typer.echo("no callbacks of the run, and no failed callbacks of its tasks")


@app.command()
def cancel(dag: DagId, run: Run = None, config: Config = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """Cancel a run: tasks that have started fail; the others are skipped."""
    with reporting():
        from tidemill.cli.dags.views import encode_run
        from tidemill.store.calls.run_calls import CancelRun

        with asking(config, folder) as store:
            found = find_run(store, dag, run)
            cancelled = store.ask(CancelRun(dag, found.run_id, find_user()))
        if as_json:
            typer.echo(json.dumps(encode_run(cancelled)))
        elif found.ended_us is not None:
            typer.echo(f"{dag} {found.run_id} had already ended: {found.state}")
        else:
            typer.echo(f"{dag} {found.run_id} is cancelled")


def list_callbacks(store: StoreAsker, run: RunRecord) -> list[CallbackRecord]:
    """Return the callbacks of a run, and the failed callbacks of its tasks."""
    from tidemill.store.calls.callback_calls import ListCallbacks

    pages = store.ask_pages(lambda after: ListCallbacks(run.dag_id, run.run_id, after))
    return [one for page in pages for one in page]


def find_run(store: StoreAsker, dag: str, run: str | None) -> RunRecord:
    """Return a run; by default the newest run of the DAG.

    Raises:
        ConfigError: There is no such run.
    """
    from tidemill.core.errors import ConfigError
    from tidemill.store.calls.dag_calls import GetDag
    from tidemill.store.calls.run_calls import GetRun

    found = store.ask(GetRun(dag, run))
    if found is not None:
        return found
    if store.ask(GetDag(dag)) is None:
        raise ConfigError(f"there is no DAG {dag!r}; `tidemill dags list` lists all DAGs")
    if run is None:
        raise ConfigError(f"{dag} has no runs yet; to start one, run: tidemill dags trigger {dag}")
    raise ConfigError(f"{dag} has no run {run!r}; `tidemill runs list {dag}` lists its runs")


def check_states(states: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given states without repetitions.

    Raises:
        ConfigError: A state is unknown.
    """
    from tidemill.core.errors import ConfigError

    for state in states:
        if state not in known:
            raise ConfigError(f"--state {state}: not a state; use {', '.join(known)}")
    return tuple(dict.fromkeys(states))
