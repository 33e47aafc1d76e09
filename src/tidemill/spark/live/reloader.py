"""Replaces the engines of a running pipeline when the user's code is saved, as `core.supervision.reload` decides.

Any thread may put events into an inbox; the thread that runs the pipeline is woken and feeds them to the state machine
in `step`. Code is loaded in a separate thread, because importing it may take any time.

Invariants: the running engines are not touched before the new code has been loaded and packed; loaded code is stored
only under the fingerprint of the files it was loaded from.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, TidemillError, describe_error
from tidemill.core.supervision import reload
from tidemill.core.supervision.reload import Reload
from tidemill.core.supervision.slot_events import EngineEnding
from tidemill.core.supervision.slot_group import RunFinished
from tidemill.pipeline.handler.base import Handler
from tidemill.spark.live.supervisor import Supervisor
from tidemill.spark.preflight import make_handler, refuse_unrunnable, run_startup, with_full_paths
from tidemill.spark.session.packaging import pack_handler

log = structlog.get_logger(__name__)

#: A load that takes longer is reported.
SLOW_LOAD_SECONDS = 10.0
#: Sections that a reload cannot change, because the group, its topic and Spark stay the same.
_FIXED_SECTIONS = ("kafka", "spark", "worker_name_env")
#: Endings that mean that no engine was lost.
_CLEAN = (EngineEnding.DRAINED, EngineEnding.ABSENT)


class EngineCode(msgspec.Struct, frozen=True):
    """The code that engines run.

    Attributes:
        settings: The configuration, as `on_startup` left it.
        packed: The handler, pickled.
    """

    settings: Settings
    packed: bytes


class CodeFiles(Protocol):
    """The files of the user's code."""

    @property
    def imported(self) -> str:
        """The fingerprint of the initially imported code, taken before the import."""
        ...

    def fingerprint(self) -> str:
        """Return a value that changes whenever the content of a file does."""
        ...

    def load(self) -> tuple[Handler[Any, Any], Settings]:
        """Import the handler from the current files, and read the configuration.

        Raises:
            TidemillError: The files are invalid; nothing in this process has changed then.
        """
        ...

    def watch(self, on_saved: Callable[[], None]) -> None:
        """Call a function, in another thread, whenever files were saved, until `close`."""

    def close(self) -> None:
        """Stop watching."""


class Reloader:
    """The reloads of one run; a context manager that watches the files.

    Args:
        files: The user's code.
        running: The fingerprint of the files that `first` was loaded from.
        first: The code that the engines run at first.
        wake: Makes the thread that runs the pipeline call `step`; called from any thread.
        start: Starts engines with new code once all engines have ended.
    """

    def __init__(
        self,
        files: CodeFiles,
        running: str,
        first: EngineCode,
        wake: Callable[[], None],
        start: Callable[[Supervisor, EngineCode], None],
    ) -> None:
        self._files = files
        self._wake = wake
        self._start = start
        self._machine = Reload(running)
        self._codes = {running: first}
        self._first = first
        self._live: Supervisor | None = None
        self._inbox: queue.SimpleQueue[reload.Input | tuple[str, EngineCode]] = queue.SimpleQueue()
        self._over = False
        self._loads = 0
        #: The start time of the load in progress.
        self._load_started: float | None = None

    # -- any thread ------------------------------------------------------------------------------------------

    def on_all_ready(self) -> None:
        """Record that all engines are ready."""
        self._put(reload.EnginesReady())

    def _on_saved(self) -> None:
        started = self._load_started
        if started is not None and (seconds := time.monotonic() - started) > SLOW_LOAD_SECONDS:
            text = "the code was saved again while an earlier load is still running; if it hangs, restart tidemill"
            log.warning(text, seconds=round(seconds, 1))
        self._put(reload.Saved(self._files.fingerprint()))

    def _put(self, event: reload.Input | tuple[str, EngineCode]) -> None:
        self._inbox.put(event)
        self._wake()

    # -- the thread that runs the pipeline -------------------------------------------------------------------

    def attach(self, live: Supervisor) -> Self:
        """Set the supervisor whose engines are replaced."""
        self._live = live
        return self

    def __enter__(self) -> Self:
        """Start watching; files saved since the code was loaded count, too."""
        self._files.watch(self._on_saved)
        self._on_saved()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        self._files.close()

    def step(self) -> None:
        """Process all events in the inbox."""
        while True:
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, tuple):
                self._codes[event[0]] = event[1]
                event = reload.CodeLoaded()
            self._feed(event)

    def stop(self) -> None:
        """Record that the pipeline is to stop; the caller drains it."""
        self._feed(reload.StopRequested())

    def ended(self, finished: RunFinished | None) -> bool:
        """Record that all engines have ended; return whether the run is over."""
        self.step()
        error = None
        if finished is not None and finished.ending not in _CLEAN:
            error = f"slot {finished.slot}: {finished.error or finished.ending}"
        fenced = finished is not None and finished.ending is EngineEnding.FENCED
        self._feed(reload.EnginesEnded(error, final=fenced))
        return self._over

    def _feed(self, event: reload.Input) -> None:
        for effect in self._machine.feed(event):
            self._carry_out(effect)
        for code in self._codes.keys() - self._machine.needed:
            del self._codes[code]

    def _carry_out(self, effect: reload.Effect) -> None:
        assert self._live is not None
        match effect:
            case reload.LoadCode(code):
                self._loads += 1
                threading.Thread(target=self._load, args=(code,), name="tidemill-reload", daemon=True).start()
            case reload.DrainEngines():
                self._live.drain(keep_memberships=True)
            case reload.StartEngines(code):
                self._start(self._live, self._codes[code])
            case reload.Finish():
                self._over = True
            case reload.Tell(text, error):
                # The number distinguishes equal messages of different reloads.
                numbered = log.bind(reload=self._loads)
                numbered.info(text) if error is None else numbered.warning(text, error=error)

    # -- the loading thread ----------------------------------------------------------------------------------

    def _load(self, name: str) -> None:
        text = "the saved code is still being loaded; check whether its import or on_startup is waiting"
        watch = threading.Timer(SLOW_LOAD_SECONDS, log.warning, [text], {"seconds": SLOW_LOAD_SECONDS})
        watch.daemon = True
        watch.start()
        self._load_started = time.monotonic()
        result: reload.Input | tuple[str, EngineCode]
        try:
            result = name, self._load_code()
        except TidemillError as error:
            result = reload.LoadFailed(str(error))
        except BaseException as error:
            log.debug("loading the saved code failed", exc_info=True)
            result = reload.LoadFailed(describe_error(error))
        finally:
            watch.cancel()
            self._load_started = None
        saved = name
        with contextlib.suppress(Exception):  # a result must follow
            saved = self._files.fingerprint()
        if saved != name:
            # The loaded code may be a mixture of the old and the new files.
            text = "the files changed while they were loading"
            log.info(f"{text}; loading them again")
            self._put(reload.Saved(saved))
            result = reload.LoadFailed(text)
        self._put(result)

    def _load_code(self) -> EngineCode:
        handler, settings = self._files.load()
        code = prepare(handler, settings)
        _refuse_fixed(self._first.settings, code.settings)
        return code


def prepare(handler: Handler[Any, Any] | type[Handler[Any, Any]], settings: Settings) -> EngineCode:
    """Prepare the code as the start of a pipeline does.

    Raises:
        TidemillError: No engine could run the code.
    """
    instance = make_handler(handler)
    settings = with_full_paths(run_startup(instance, settings))
    refuse_unrunnable(settings)
    return EngineCode(settings, pack_handler(instance))


def _refuse_fixed(first: Settings, saved: Settings) -> None:
    """Reject a configuration that only a restart can apply.

    Raises:
        ConfigError: A section that a reload cannot change is different.
    """
    changed = [name for name in _FIXED_SECTIONS if getattr(first, name) != getattr(saved, name)]
    if changed:
        raise ConfigError(f"the configuration of {', '.join(changed)} has changed; restart tidemill to apply it")
