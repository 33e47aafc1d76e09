"""`tidemill web`: shows recordings in a browser, without a pipeline."""

from __future__ import annotations

import secrets
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.options import ConfigPath
from tidemill.cli.recordings.location import expand_folder, load_quietly
from tidemill.cli.reporting import reporting
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.process.stop_signals import find_stop_signals

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from tidemill.config.debug_settings import DebugSettings
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
    """Show recordings in a browser, read-only, until Ctrl-C; also while pipelines write them.

    Prints the address. With CONFIG, the pages also show its dead letters, and its users may log in.
    """
    with reporting():
        from tidemill.config.loading import find_source
        from tidemill.runtime.sockets.ports import format_address

        settings = load_quietly(config)
        debug = settings.debug
        folder = _find_recordings(debug, directory)
        listener = _listen(debug)
        key = None if debug.users or debug.tokens else secrets.token_urlsafe(_KEY_BYTES)

        from tidemill.web.standalone.start import build_server

        server = build_server(listener, key, settings, folder, letters_of=find_source(config))
        address = debug.debug_url.rstrip("/") or format_address(listener)
        _serve(server, f"recordings in {folder}: {address}/{f'?key={key}' if key is not None else ''}")


def _find_recordings(debug: DebugSettings, directory: Path | None) -> Path:
    """Return the folder, if it has recordings.

    Raises:
        ConfigError: There are no recordings.
    """
    from tidemill.recorder.format.file_layout import list_periods, list_worker_folders

    folder = expand_folder(debug) if directory is None else directory
    where = "debug.db_dir" if directory is None else "--dir"
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--dir {directory}: not a folder of recordings")
    if not any(list_periods(worker) for worker in list_worker_folders(folder)):
        raise ConfigError(
            f"no recordings of this user in {folder} ({where}); pipelines write them while debug.enabled is true and "
            "debug.db_dir is this folder; pass the pipeline's configuration, or its folder with --dir"
        )
    return folder


def _listen(debug: DebugSettings) -> socket.socket:
    """Return a listening socket on the port or the next free one, since the pipeline itself may use the port.

    Raises:
        ConfigError: No port is free, or the address is not protected by users or tokens.
    """
    from tidemill.config.web_settings import is_loopback
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
