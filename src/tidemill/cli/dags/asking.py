"""How the commands about DAGs reach the store: their options, and one call, or one page after another.

A process that has the store open answers over its socket; otherwise the command opens the store itself.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    import asyncio

    from tidemill.store.calls.call import Call, Listed
    from tidemill.store.database import Caller

T = TypeVar("T")

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="The YAML file with settings; default: the one that TIDEMILL_CONFIG names."
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", metavar="DIR", help="The folder of the DAG files; default: dags.folder, itself dags."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document per line.")]
DagId = Annotated[str, typer.Argument(metavar="DAG", help="The id of the DAG.")]
RunId = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The id of the run; default: the newest one of the DAG.")
]


class Asker:
    """A store that is open for the calls of one command.

    Args:
        runner: Its loop.
        open_store: Opens it, for the first time, or again after the process that had it open has ended.
        is_file: Whether it is a file, which one process at a time may have open.
    """

    def __init__(
        self, runner: asyncio.Runner, open_store: Callable[[], Coroutine[Any, Any, Caller]], *, is_file: bool = False
    ) -> None:
        """Open it."""
        self._runner, self._open, self._is_file = runner, open_store, is_file
        self._store = runner.run(open_store())

    def close(self) -> None:
        """Close it."""
        self._runner.run(self._store.close())

    def wait(self, seconds: float) -> None:
        """Wait before it is asked again; meanwhile another process, such as `tidemill dev`, may open the store.

        Raises:
            ConfigError: Another process has it open now, and does not answer.
            RemoteError: It cannot be reached.
        """
        import time

        from tidemill.store.wire.remote import RemoteStore

        is_held = self._is_file and not isinstance(self._store, RemoteStore)
        if is_held:
            self.close()
        time.sleep(seconds)
        if is_held:
            self._store = self._runner.run(self._open())

    def ask(self, call: Call[T]) -> T:
        """Return the answer to a call.

        Raises:
            ConfigError: The store refuses it, or it has text that is not UTF-8.
            RemoteError: The store failed.
        """
        from tidemill.core.errors import ConfigError, RemoteError
        from tidemill.store.calls.call import CallRefusedError
        from tidemill.store.calls.reads import READS
        from tidemill.store.wire.remote import ConnectionLostError

        _check_text(call)
        try:
            try:
                return self._runner.run(self._store.call(call))
            except ConnectionLostError as error:
                if type(call) not in READS:
                    raise RemoteError(
                        f"{error}; it may have done this before, or not: look, and give the command again if needed"
                    ) from error
                self.close()
                self._store = self._runner.run(self._open())
                return self._runner.run(self._store.call(call))
        except CallRefusedError as error:
            raise ConfigError(str(error)) from error

    def ask_pages(self, build: Callable[[str | None], Call[Listed[T]]]) -> Iterator[tuple[T, ...]]:
        """Yield the rows of one page after another.

        Args:
            build: Returns the call for the page after a key.
        """
        after: str | None = None
        while True:
            page = self.ask(build(after))
            yield page.rows
            after = page.next
            if after is None:
                return


def _check_text(call: Call[Any]) -> None:
    """Check that the arguments in a call are text: bytes on a command line may be anything.

    Raises:
        ConfigError: They are not UTF-8.
    """
    import msgspec

    from tidemill.core.errors import ConfigError

    try:
        msgspec.msgpack.encode(call)
    except UnicodeEncodeError as error:
        part = error.object[max(0, error.start - 20) : error.end + 20]
        raise ConfigError(f"the argument with {part!r} is not UTF-8; correct it") from None


@contextmanager
def asking(config: Path | None, folder: Path | None, *, create: bool = False) -> Iterator[Asker]:
    """Open the store of a folder of DAGs for the block.

    Args:
        config: The file with settings.
        folder: The folder.
        create: Whether the store is created if it does not exist.

    Raises:
        ConfigError: There is none, or it cannot be used.
        RemoteError: It cannot be reached.
    """
    import asyncio

    from tidemill.config.loading import load_settings
    from tidemill.services.dag_store import choose_folder, choose_url, open_dag_store
    from tidemill.store.engines.opening import find_file

    settings = load_settings(config)
    with asyncio.Runner() as runner:
        place = choose_folder(settings, folder)
        is_file = find_file(choose_url(settings, place)) is not None
        asker = Asker(runner, lambda: open_dag_store(settings, place, create=create), is_file=is_file)
        try:
            yield asker
        finally:
            asker.close()


def find_user() -> str:
    """Return who gives the command, for the journal."""
    try:
        return f"{getpass.getuser()} (command line)"
    except (KeyError, OSError):
        return "the command line"
