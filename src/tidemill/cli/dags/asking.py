"""Options of the commands for DAGs, and their calls to the store: one call, or page after page.

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
    from tidemill.store.database import StoreClient

T = TypeVar("T")

Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The YAML file with settings; default: the file in TIDEMILL_CONFIG."),
]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", metavar="DIR", help="The folder of the DAG files; default: dags.folder, or else dags."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")]
DagId = Annotated[str, typer.Argument(metavar="DAG", help="The id of the DAG.")]
RunId = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The id of the run; default: the newest run of the DAG.")
]


class StoreAsker:
    """A store that is open for the calls of one command.

    Args:
        runner: The event loop of the calls.
        open_store: Opens the store, at first, and again after the process that had it open has ended.
        is_file: Whether the store is a file, which only one process at a time may have open.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        open_store: Callable[[], Coroutine[Any, Any, StoreClient]],
        *,
        is_file: bool = False,
    ) -> None:
        self._runner, self._open, self._is_file = runner, open_store, is_file
        self._store = runner.run(open_store())

    def close(self) -> None:
        self._runner.run(self._store.close())

    def wait(self, seconds: float) -> None:
        """Wait between calls; meanwhile another process, such as `tidemill dev`, may open the store.

        Raises:
            ConfigError: Another process has the store open and does not answer.
            RemoteError: The store cannot be reached.
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
            ConfigError: The store rejects the call, or an argument is not UTF-8.
            RemoteError: The store failed.
        """
        from tidemill.core.errors import ConfigError, RemoteError
        from tidemill.store.calls.call import CallRefusedError
        from tidemill.store.wire.remote import ConnectionLostError

        _check_text(call)
        try:
            try:
                return self._runner.run(self._store.call(call))
            except ConnectionLostError as error:
                if not call.reads:
                    raise RemoteError(
                        f"{error}; the change may or may not have been made; check, and repeat the command if needed"
                    ) from error
                self.close()
                self._store = self._runner.run(self._open())
                return self._runner.run(self._store.call(call))
        except CallRefusedError as error:
            raise ConfigError(str(error)) from error

    def ask_pages(self, build: Callable[[str | None], Call[Listed[T]]]) -> Iterator[tuple[T, ...]]:
        """Yield the rows of page after page.

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
    """Check that the arguments of a call are text; a command line may contain any bytes.

    Raises:
        ConfigError: An argument is not UTF-8.
    """
    import msgspec

    from tidemill.core.errors import ConfigError

    try:
        msgspec.msgpack.encode(call)
    except UnicodeEncodeError as error:
        part = error.object[max(0, error.start - 20) : error.end + 20]
        raise ConfigError(f"the argument with {part!r} is not UTF-8; correct it") from None


@contextmanager
def asking(
    config: Path | None, folder: Path | None, *, create: bool = False, upgrade: bool = False
) -> Iterator[StoreAsker]:
    """Open the store of a folder of DAGs during the block.

    Args:
        config: The file with settings.
        folder: The folder.
        create: Whether to create the store if it does not exist.
        upgrade: Whether to bring the tables up to date, also those of a PostgreSQL database.

    Raises:
        ConfigError: The store does not exist, or cannot be used.
        RemoteError: The store cannot be reached.
    """
    import asyncio

    from tidemill.config.loading import load_settings
    from tidemill.services.dag_store import choose_folder, choose_url, open_dag_store
    from tidemill.store.database import SchemaChange
    from tidemill.store.engines.opening import find_file

    schema = SchemaChange.UPGRADE if upgrade else SchemaChange.CREATE
    settings = load_settings(config)
    with asyncio.Runner() as runner:
        chosen = choose_folder(settings, folder)
        is_file = find_file(choose_url(settings, chosen)) is not None
        asker = StoreAsker(
            runner, lambda: open_dag_store(settings, chosen, create=create, schema=schema), is_file=is_file
        )
        try:
            yield asker
        finally:
            asker.close()


def find_user() -> str:
    """Return the name of the user, for the journal."""
    try:
        return f"{getpass.getuser()} (command line)"
    except (KeyError, OSError):
        return "the command line"
