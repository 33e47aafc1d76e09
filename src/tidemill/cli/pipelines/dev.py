"""The additions of `tidemill run --dev`: a broker if none answers on this machine, and code reloading."""

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

from tidemill.cli.pipelines.handlers import load_handler
from tidemill.config.kafka_names import is_loopback
from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings
from tidemill.runtime.files.code_watch import FirstFiles, SavedFiles, find_code_folders
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.stop_signals import find_stop_signals, handle_signal
from tidemill.spark.session.packaging import find_own_modules

if TYPE_CHECKING:
    from tidemill.pipeline.handler.base import Handler

#: The number of partitions of an embedded broker's source topic.
SOURCE_PARTITIONS = 4
_CONNECT_SECONDS = 1.0
_PLAIN = "plaintext"


# -- the broker -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dev_broker(settings: Settings) -> Iterator[None]:
    """Run a broker with the pipeline's topics during the block, if `kafka.brokers` is this machine and no broker
    answers.

    Raises:
        RemoteError: The broker does not start.
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
        _say(f"no Kafka answered at {settings.kafka.brokers}; started one there; Ctrl-C stops it and deletes its data")
        _say(f"topics: {', '.join(f'{name}:{partitions}' for name, partitions in topics.items())}")
        try:
            yield
        finally:
            for number in find_stop_signals():
                signal.signal(number, signal.SIG_IGN)
            broker.kill()  # its data is deleted, so it need not shut down cleanly


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """End the command with exit code 0 at a stop signal, until the pipeline handles signals itself."""

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
    """Return the port for an embedded broker; None if a broker answers, or an address is not on this machine.

    Args:
        brokers: The addresses, as in `kafka.brokers`.
    """
    addresses = [address.strip().rpartition(":") for address in brokers.split(",")]
    ports = [int(port) for _, _, port in addresses if port.isdecimal()]
    if len(ports) < len(addresses) or not all(is_loopback(host) for host, _, _ in addresses):
        return None
    for host, _, port in addresses:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            return None
    return ports[0]


def list_topics(settings: Settings) -> dict[str, int]:
    """Return the topics that a pipeline reads and writes at `kafka.brokers`, with their numbers of partitions."""
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
    """The handler and the configuration as they are on disk; the `CodeFiles` of a pipeline.

    Args:
        spec: The handler, as given to `--handler`.
        config: The YAML file; None: the file in TIDEMILL_CONFIG.
        first: The files before the handler was imported; None: their current state.
    """

    def __init__(self, spec: str, config: Path | None, first: FirstFiles | None = None) -> None:
        """Find the folders of the imported code."""
        first = first or FirstFiles(config)
        self._spec = spec
        self._config = config
        self._root = first.root
        self._find_folders()
        self._saved = SavedFiles(lambda: self._folders, first.others)
        now = self._saved.fingerprint()
        # Only after the import is it known which other folders belong to the code.
        self._imported = first.fingerprint if first.have_changed() else now

    @property
    def imported(self) -> str:
        """The fingerprint of the files that were imported first."""
        return self._imported

    def fingerprint(self) -> str:
        """Return a text that changes whenever the content of a file changes."""
        return self._saved.fingerprint()

    def watch(self, on_saved: Callable[[], None]) -> None:
        """Call a function whenever files are saved."""

        def look_again() -> None:
            self._find_folders()
            on_saved()

        self._saved.watch(look_again)

    def close(self) -> None:
        """Stop watching."""
        self._saved.close()

    def load(self) -> tuple[Handler[Any, Any], Settings]:
        """Read the configuration, and import the handler and all user modules again.

        Raises:
            TidemillError: The files have an error; the previous modules are restored.
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
    """Import the user's modules from their files within the block; restore the previous modules if it fails."""
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
        # A namespace package would keep its old modules as attributes, and `from package import module` would find
        # those.
        while name := name.rpartition(".")[0]:
            if getattr(sys.modules.get(name), "__file__", None) is None:
                names.add(name)
    return {name: sys.modules.pop(name) for name in sorted(names) if name in sys.modules}
