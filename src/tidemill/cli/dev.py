"""What `tidemill run --dev` adds: a broker if there is none on this machine, and the user's code as it is on disk."""

from __future__ import annotations

import contextlib
import importlib
import linecache
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from tidemill.cli.handlers import load_handler
from tidemill.config.kafka_names import is_loopback
from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings
from tidemill.runtime.files.code_watch import FirstFiles, SavedFiles, find_code_folders
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.stop_signals import find_stop_signals, handle_signal
from tidemill.spark.session.packaging import find_own_modules

if TYPE_CHECKING:
    from tidemill.pipeline.handler.base import Handler

#: How many partitions the source topic of an embedded broker has.
SOURCE_PARTITIONS = 4
_CONNECT_SECONDS = 1.0
_PLAIN = "plaintext"


# -- the broker -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dev_broker(settings: Settings) -> Iterator[None]:
    """Run a broker for the block, with the pipeline's topics, if `kafka.brokers` is this machine and none answers.

    Raises:
        RemoteError: It does not start.
    """
    port = find_free_address(settings.kafka.brokers)
    protocol = str(settings.kafka.client_config.get("security.protocol", _PLAIN))
    if port is None or protocol.lower() != _PLAIN:
        yield
        return
    from tidemill.runtime.embedded.broker import EmbeddedBroker

    with _ending_on_signals(), EmbeddedBroker(None, port, progress=_say) as broker:
        topics = list_topics(settings)
        for name, partitions in topics.items():
            broker.create_topic(name, partitions)
        _say(f"no Kafka answered at {settings.kafka.brokers}, so one was started; Ctrl-C stops it and deletes its data")
        _say(f"topics: {', '.join(f'{name}:{partitions}' for name, partitions in topics.items())}")
        try:
            yield
        finally:
            for number in find_stop_signals():
                signal.signal(number, signal.SIG_IGN)
            broker.kill()  # its data is removed, so it need not tidy up


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """End the command with exit code 0 at a signal to stop, as long as the pipeline does not handle it itself."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise typer.Exit(ExitCode.OK)

    before = {number: handle_signal(number, end) for number in find_stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_free_address(brokers: str) -> int | None:
    """Return the port for a broker of our own; None if one answers, or an address is not this machine.

    Args:
        brokers: As in `kafka.brokers`.
    """
    places = [address.strip().rpartition(":") for address in brokers.split(",")]
    ports = [int(port) for _, _, port in places if port.isdecimal()]
    if len(ports) < len(places) or not all(is_loopback(host) for host, _, _ in places):
        return None
    for host, _, port in places:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            return None
    return ports[0]


def list_topics(settings: Settings) -> dict[str, int]:
    """Return the topics that a pipeline reads and writes at `kafka.brokers`, with numbers of partitions."""
    topics = {settings.kafka.source_topic: SOURCE_PARTITIONS}
    if settings.dlq_brokers == settings.kafka.brokers:
        topics.setdefault(settings.dlq_topic, 1)
    for sink in settings.sinks.kafka.values():
        if sink.brokers in ("", settings.kafka.brokers):
            topics.setdefault(sink.topic, SOURCE_PARTITIONS)
    return topics


def _say(text: str) -> None:
    typer.echo(text, err=True)


# -- the code -------------------------------------------------------------------------------------------------


class DevFiles:
    """The handler and the configuration, as they are on disk; the `CodeFiles` of a pipeline.

    Args:
        spec: The handler, as `--handler` names it.
        config: The YAML file; None: the one that TIDEMILL_CONFIG names.
        first: The files as they were before the handler was imported; None: as they are now.
    """

    def __init__(self, spec: str, config: Path | None, first: FirstFiles | None = None) -> None:
        """Find the folders of the code that was imported."""
        first = first or FirstFiles(config)
        self._spec = spec
        self._config = config
        self._root = first.root
        self._find_folders()
        self._saved = SavedFiles(lambda: self._folders, first.others)
        now = self._saved.fingerprint()
        # Only the import has shown which folders elsewhere belong to the code.
        self._imported = first.fingerprint if first.have_changed() else now

    @property
    def imported(self) -> str:
        """The fingerprint of what was imported first."""
        return self._imported

    def fingerprint(self) -> str:
        """Return what changes whenever the content of a file does."""
        return self._saved.fingerprint()

    def watch(self, on_saved: Callable[[], None]) -> None:
        """Call a function whenever files were saved."""

        def look_again() -> None:
            self._find_folders()
            on_saved()

        self._saved.watch(look_again)

    def close(self) -> None:
        """Watch no longer."""
        self._saved.close()

    def load(self) -> tuple[Handler[Any, Any], Settings]:
        """Read the configuration and import the handler, and all of the user's modules, once more.

        Raises:
            TidemillError: Something is wrong with them; then the modules are those that they were.
        """
        settings = load_settings(self._config)
        with importing_again():
            handler = load_handler(self._spec, self._root)
        self._find_folders()
        return handler, settings

    def _find_folders(self) -> None:
        own = {Path(module.__file__).resolve().parent for module in find_own_modules() if module.__file__}
        self._folders = find_code_folders(self._root) | own


@contextlib.contextmanager
def importing_again() -> Iterator[None]:
    """Have the block import the user's modules from their files; if it fails, the modules are those that they were."""
    before = _forget_own_modules()
    importlib.invalidate_caches()
    linecache.checkcache()
    try:
        yield
    except BaseException:
        _forget_own_modules()
        sys.modules.update(before)
        raise


def _forget_own_modules() -> dict[str, ModuleType]:
    names = {module.__name__ for module in find_own_modules()}
    for name in list(names):
        # A package without a file would keep its old modules as attributes, and `from package import module` finds
        # those.
        while name := name.rpartition(".")[0]:
            if getattr(sys.modules.get(name), "__file__", None) is None:
                names.add(name)
    return {name: sys.modules.pop(name) for name in sorted(names) if name in sys.modules}
