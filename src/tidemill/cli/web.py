"""`tidemill web`: shows DAGs and recordings in a browser, without a pipeline and without services."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.options import ConfigPath
from tidemill.cli.recordings.location import expand_folder, load_quietly
from tidemill.cli.reporting import reporting
from tidemill.config.redaction import redact_text
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.process.stop_signals import find_stop_signals

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from tidemill.config.sections.debug_settings import DebugSettings
    from tidemill.config.settings import Settings
    from tidemill.services.hosts.store_thread import StoreThread
    from tidemill.web.server import WebServer

_KEY_BYTES = 24
#: How long the shutdown waits for running requests.
_END_SECONDS = 3.0
#: How often the command checks that the server is alive.
_LOOK_SECONDS = 0.5


def web(
    config: ConfigPath = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="The folder of recordings; default: debug.db_dir.", show_default=False
        ),
    ] = None,
) -> None:
    """Show DAGs and recordings in a browser until Ctrl-C; also while pipelines and services write them.

    Prints the address. If store.url of CONFIG is a PostgreSQL database, the pages show its DAGs and services, and may
    trigger runs. With CONFIG, the pages of recordings also show its dead letters, and its users may log in.
    """
    with reporting():
        from tidemill.config.loading import find_source
        from tidemill.runtime.sockets.ports import format_address

        settings = load_quietly(config)
        debug = settings.debug
        store = None if directory is not None else _find_store(settings)
        folder = _find_recordings(debug, directory, needed=store is None)
        listener = _listen(debug)
        key = None if debug.users or debug.tokens else secrets.token_urlsafe(_KEY_BYTES)

        from tidemill.web.standalone.start import WebContent, build_server

        with contextlib.ExitStack() as closing:
            if store is not None:
                _configure_log(settings)
                closing.callback(store.close)
                store.start()
            server = build_server(listener, key, settings, WebContent(folder, find_source(config), store))
            address = debug.debug_url.rstrip("/") or format_address(listener)
            shown = [] if store is None else [f"DAGs in {redact_text(settings.store.url)}"]
            shown += [] if folder is None else [f"recordings in {folder}"]
            _serve(server, f"{' and '.join(shown)}: {address}/{f'?key={key}' if key is not None else ''}")


def _find_store(settings: Settings) -> StoreThread | None:
    """Return the store of the DAGs; None if the settings name no PostgreSQL database.

    Raises:
        ConfigError: The URL is not a store URL.
    """
    if not settings.store.url:
        return None
    from tidemill.services.hosts.store_thread import StoreThread
    from tidemill.store.engines.opening import has_one_writer

    # A SQLite file belongs to `tidemill dev`, which shows its DAGs itself.
    return None if has_one_writer(settings.store.url) else StoreThread(settings, settings.store.url)


def _configure_log(settings: Settings) -> None:
    from tidemill.runtime.identity import find_worker_name
    from tidemill.runtime.log.setup import configure

    configure(settings.logging, worker_id=find_worker_name(settings))


def _find_recordings(debug: DebugSettings, directory: Path | None, *, needed: bool) -> Path | None:
    """Return the folder, if it has recordings.

    Args:
        debug: Provides `debug.db_dir`.
        directory: The folder on the command line.
        needed: Whether there is nothing else to show.

    Raises:
        ConfigError: There are no recordings, but they are needed.
    """
    from tidemill.recorder.format.file_layout import list_periods, list_worker_folders

    if not needed and not debug.db_dir:
        return None
    folder = expand_folder(debug) if directory is None else directory
    where = "debug.db_dir" if directory is None else "--dir"
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--dir {directory}: not a folder of recordings")
    if not any(list_periods(worker) for worker in list_worker_folders(folder)):
        if not needed:
            return None
        dags = "set store.url to a PostgreSQL database" + (" and leave out --dir" if directory is not None else "")
        raise ConfigError(
            f"no recordings of this user in {folder} ({where}); pipelines write them while debug.enabled is true and "
            "debug.db_dir is this folder; pass the pipeline's configuration, or its folder with --dir; for DAGs, "
            f"{dags}"
        )
    return folder


def _listen(debug: DebugSettings) -> socket.socket:
    """Return a listening socket on the port or the next free one, since the pipeline itself may use the port.

    Raises:
        ConfigError: No port is free, or the address is not protected by users or tokens.
    """
    from tidemill.config.sections.web_settings import is_loopback
    from tidemill.runtime.sockets.ports import Purpose, listen

    if not is_loopback(debug.host) and not (debug.users or debug.tokens):
        # Loading the configuration checks this only if debug.enabled is true.
        raise ConfigError(
            f"debug.host {debug.host} can be reached from other machines; set debug.users or debug.tokens"
        )
    listener = listen(debug, is_chosen=False, purpose=Purpose("debug", "web UI"))
    if listener is None:
        raise ConfigError(
            f"debug.port: port {debug.port} and the next ones are in use; set another port, or 0 for any free one"
        )
    return listener


def _serve(server: WebServer, address: str) -> None:
    """Print the address, and serve until a stop signal.

    Raises:
        RemoteError: The server has failed.
    """
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in find_stop_signals():
        signal.signal(number, stop)
    thread = threading.Thread(target=server.run, name="tidemill-web", daemon=True)
    thread.start()
    typer.echo(address)
    while thread.is_alive():
        if stopped.wait(_LOOK_SECONDS):
            server.stop()
            thread.join(_END_SECONDS)
            return
    raise RemoteError("the web UI has failed; see the error in the log above")
