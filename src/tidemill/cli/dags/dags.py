"""`tidemill dags list | show | errors | trigger | test | pause | unpause`: the DAGs of a folder."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.dags.asking import AsJson, Config, DagId, Folder, StoreAsker, asking, find_user
from tidemill.cli.help import App
from tidemill.cli.reporting import divert_prints, reporting
from tidemill.core.errors import ConfigError
from tidemill.core.times import parse_moment
from tidemill.runtime.process.exitcode import ExitCode

if TYPE_CHECKING:
    from tidemill.store.calls.run_calls import CreateRun, RunRecord

app = App(help="Show, run and pause DAGs.")

Conf = Annotated[
    str | None,
    typer.Option(
        "--conf",
        metavar="JSON|@FILE|-",
        help="The configuration of the run, as a JSON object; @FILE: from a file; -: from standard input.",
    ),
]
LogicalDate = Annotated[
    str | None,
    typer.Option(
        "--logical-date", metavar="TIME", help="Such as 2026-03-01 or 2026-03-01T12:00:00+01:00; default: none."
    ),
]
#: How often the command checks whether a run has ended.
_WAIT_SECONDS = 0.2
#: In a longer configuration there may be lists that are sent value by value: a list that is too large to be checked
#: against a schema as a whole may be written with a third of its measure.
_LONG_CONF = 20 * 1024


@app.command("list")
def list_(
    tag: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Show only DAGs with this tag.")] = None,
    inactive: Annotated[bool, typer.Option("--inactive", help="Include DAGs that no file defines any more.")] = False,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List DAGs by id."""
    with reporting():
        from tidemill.cli.dags.views import DAGS, show_rows
        from tidemill.store.calls.dag_calls import ListDags

        with asking(config, folder) as store:
            pages = store.ask_pages(lambda after: ListDags(after=after, inactive=inactive, tag=tag))
            nothing = f"no DAGs{_explain_nothing(store)}"
            show_rows(pages, DAGS, as_json=as_json, nothing=nothing)
            if not as_json:
                _tell_errors(store)


def _explain_nothing(store: StoreAsker) -> str:
    """Return the end of a message about an empty list; '' if files have been parsed."""
    from tidemill.store.calls.service_calls import ListFiles

    return "" if store.ask(ListFiles()) else ": no file has been parsed yet; run `tidemill dev` to parse them"


def _tell_errors(store: StoreAsker) -> None:
    from tidemill.store.calls.service_calls import ListFileDifferences, ListFiles

    broken = len(store.ask(ListFiles(broken=True)))
    if broken:
        files = "1 file has" if broken == 1 else f"{broken} files have"
        typer.echo(f"{files} an error: tidemill dags errors", err=True)
    different = len({one.path for one in store.ask(ListFileDifferences())})
    if different:
        files = "1 file differs" if different == 1 else f"{different} files differ"
        typer.echo(f"{files} between hosts: tidemill dags errors", err=True)


@app.command()
def show(dag: DagId, config: Config = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """Show a DAG: its schedule, and its tasks with their dependencies."""
    with reporting():
        from tidemill.cli.dags.structure_view import format_structure, show_structure
        from tidemill.cli.dags.views import encode_dag
        from tidemill.store.calls.dag_calls import GetDag

        with asking(config, folder) as store:
            found = store.ask(GetDag(dag))
        if found is None:
            raise build_unknown_error(dag)
        if as_json:
            document = {**encode_dag(found.dag), "unshared": found.unshared}
            typer.echo(json.dumps({**document, "structure": show_structure(found.structure)}))
            return
        for line in format_structure(found):
            typer.echo(line)


def build_unknown_error(dag: str) -> ConfigError:
    return ConfigError(
        f"there is no DAG {dag!r}; `tidemill dags list` lists all DAGs, and `tidemill dags errors` files with errors"
    )


@app.command()
def errors(config: Config = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """Show the files that cannot be parsed, with their errors, and those that differ between hosts."""
    with reporting():
        from tidemill.cli.dags.views import describe_difference, encode_difference
        from tidemill.core.times import format_iso
        from tidemill.store.calls.service_calls import ListFileDifferences, ListFiles

        with asking(config, folder) as store:
            files = store.ask(ListFiles(broken=True))
            differences = store.ask(ListFileDifferences())
            nothing = f"no errors{_explain_nothing(store)}"
        for file in files:
            if as_json:
                document = {"file": file.path, "error": file.error, "time": format_iso(file.parsed_us)}
                typer.echo(json.dumps(document))
            else:
                typer.echo(f"{file.path}:\n{file.error}\n")
        for difference in differences:
            typer.echo(json.dumps(encode_difference(difference)) if as_json else describe_difference(difference))
        if not files and not differences and not as_json:
            typer.echo(nothing)


@app.command()
def trigger(
    dag: DagId,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="The id of the run; default: generated.")
    ] = None,
    conf: Conf = None,
    logical_date: LogicalDate = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of the run; exit code 4 if it fails.")] = False,
    config: Config = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Start a run of a DAG."""
    with reporting():
        from tidemill.cli.dags.views import encode_run
        from tidemill.cli.dags.waits import find_services
        from tidemill.store.calls.run_calls import CreateRun

        values = parse_conf(conf)
        call = CreateRun(
            dag,
            run,
            parse_logical_date(logical_date),
            encode_conf(values),
            by=find_user(),
            request=uuid.uuid4().hex,
        )
        with asking(config, folder) as store:
            made = store.ask(_send_lists(store, call, values))
            for warning in made.warnings:
                typer.echo(f"warning: {warning}", err=True)
            if made.ended_us is None and (missing := find_services(store).explain_all()):
                typer.echo(f"warning: the run waits: {missing}", err=True)
            if wait:
                made = _wait_for_end(store, made)
        if as_json:
            typer.echo(json.dumps(encode_run(made)))
        else:
            typer.echo(f"{made.dag_id} {made.run_id}: {made.state}")
        if wait and made.state != "success":
            raise typer.Exit(ExitCode.REMOTE)


def _send_lists(store: StoreAsker, call: CreateRun, conf: dict[str, Any]) -> CreateRun:
    """Send the long lists in a configuration that tasks are mapped over; return the call with the rest."""
    import msgspec

    from tidemill.store.calls.dag_calls import GetDag

    found = store.ask(GetDag(call.dag_id)) if len(call.conf) >= _LONG_CONF else None
    if found is None:  # the store refuses an unknown DAG
        return call
    from tidemill.services.conf_lists import send_lists
    from tidemill.store.dag_plan import read_structure

    shows = sys.stderr.isatty()

    def tell(done: int, total: int) -> None:
        if shows:
            typer.echo(f"\r{done:,} of {total:,} values of --conf sent", err=True, nl=done == total)

    text, stage = send_lists(store.ask, read_structure(found.structure), conf, tell)
    return msgspec.structs.replace(call, conf=text, stage=stage)


def _wait_for_end(store: StoreAsker, run: RunRecord) -> RunRecord:
    from tidemill.store.calls.run_calls import GetRun

    while run.ended_us is None:
        store.wait(_WAIT_SECONDS)
        found = store.ask(GetRun(run.dag_id, run.run_id))
        if found is None:
            raise ConfigError(f"{run.dag_id} {run.run_id} was deleted while it was running")
        run = found
    return run


@app.command("test")
def run_once(
    dag: DagId,
    conf: Conf = None,
    logical_date: LogicalDate = None,
    config: Config = None,
    folder: Folder = None,
) -> None:
    """Run a DAG and its triggers in this process, without `tidemill dev`; breakpoints work, and nothing is stored."""
    with reporting(), divert_prints(False):
        from tidemill.config.loading import load_settings
        from tidemill.runtime.process.stop_signals import stop_on_signals
        from tidemill.services.dag_store import choose_folder
        from tidemill.services.dag_test import run_dag_test

        settings = load_settings(config)
        stop_on_signals()  # at a signal, processes of tasks are stopped, and temporary files removed
        state = run_dag_test(
            settings,
            choose_folder(settings, folder),
            dag,
            parse_conf(conf),
            parse_logical_date(logical_date),
            typer.echo,
        )
        typer.echo(f"{dag}: {state}")
        if state != "success":
            raise typer.Exit(ExitCode.REMOTE)


@app.command()
def pause(dag: DagId, config: Config = None, folder: Folder = None) -> None:
    """Pause a DAG: no run of it starts; running runs continue."""
    _set_paused(dag, config, folder, paused=True)


@app.command()
def unpause(dag: DagId, config: Config = None, folder: Folder = None) -> None:
    """Unpause a DAG."""
    _set_paused(dag, config, folder, paused=False)


def _set_paused(dag: str, config: Path | None, folder: Path | None, *, paused: bool) -> None:
    with reporting():
        from tidemill.store.calls.dag_calls import PauseDag

        with asking(config, folder) as store:
            changed = store.ask(PauseDag(dag, paused, find_user()))
        state = "paused" if paused else "active"
        typer.echo(f"{dag} is {state}" if changed else f"{dag} was already {state}")


def encode_conf(conf: dict[str, Any]) -> str:
    """Return the configuration of a run as stored.

    Raises:
        ConfigError: It has values that JSON lacks, such as NaN.
    """
    from tidemill.runtime.json.codec import EncodingError, encode

    try:
        return encode(conf, "--conf")
    except EncodingError as error:
        raise ConfigError(str(error)) from error


def parse_conf(text: str | None) -> dict[str, Any]:
    """Return the configuration of a run.

    Raises:
        ConfigError: The text is not a JSON object.

    Example:
        >>> parse_conf('{"n": 1}')
        {'n': 1}
    """
    if text is None:
        return {}
    try:
        found = json.loads(_read_conf(text))
    except UnicodeDecodeError as error:
        raise ConfigError(f"--conf {text} is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ConfigError("--conf is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"--conf is not JSON: {error}; write an object such as '{{\"rows\": 10}}'") from None
    if not isinstance(found, dict):
        raise ConfigError("--conf must be a JSON object, such as '{\"rows\": 10}'")
    return found


def _read_conf(text: str) -> str:
    """Return the text that `--conf` refers to; an argument itself holds at most 128 KiB.

    Raises:
        ConfigError: The file cannot be read.
        UnicodeDecodeError: The text is not UTF-8.
    """
    if text == "-":
        return sys.stdin.buffer.read().decode()
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"--conf {text} cannot be read: {error.strerror}") from None


def parse_logical_date(text: str | None) -> int | None:
    """Return a time in UTC microseconds; a time without a zone is UTC.

    Raises:
        ConfigError: The text is not a time.

    Example:
        >>> parse_logical_date("1970-01-02")
        86400000000
    """
    if text is None:
        return None
    try:
        return parse_moment(text)
    except ValueError:
        raise ConfigError(f"--logical-date {text}: not a time; write 2026-03-01 or 2026-03-01T12:00:00+01:00") from None
