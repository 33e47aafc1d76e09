"""Reloading for `tidemill run --dev`: when saved code is loaded, and when engines with the new code replace the old
ones.

Theory of operation. Code is identified by a fingerprint of its files. After a save that changes the fingerprint, the
code is loaded (imported, `on_startup` run, packed). Only code that loads replaces the running code: the engines drain
and commit, and when all have ended, engines with the new code start. Until all of those are ready, the new code is on
trial: if its engines end before that, the previous code starts again. A save during a load makes the result of the load
obsolete; a save during a drain replaces the code that will start after it.

Invariants:
- At most one load and one drain are under way.
- Engines start only when the previous ones have ended, and never after a stop was requested.
- Code that does not load, or that already runs, never causes a drain.
- If engines end without a request, the run ends, unless their code was on trial.

The shell feeds the inputs in order, and carries out the effects in order.
"""

from __future__ import annotations

from dataclasses import dataclass

# -- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """Files were saved; `code` is their fingerprint."""

    code: str


@dataclass(frozen=True, slots=True)
class CodeLoaded:
    """The requested code was loaded."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The requested code cannot be loaded."""

    error: str


@dataclass(frozen=True, slots=True)
class EnginesReady:
    """All engines that were started last are ready."""


@dataclass(frozen=True, slots=True)
class EnginesEnded:
    """All engines have ended.

    Attributes:
        error: The error; None if they drained.
        final: Whether no other engines may replace them, whatever code they run.
    """

    error: str | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The pipeline is to stop; the shell drains the engines."""


Input = Saved | CodeLoaded | LoadFailed | EnginesReady | EnginesEnded | StopRequested


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadCode:
    """Load the files as they are now; `CodeLoaded` or `LoadFailed` must follow."""

    code: str


@dataclass(frozen=True, slots=True)
class DrainEngines:
    """Let all engines drain and commit; `EnginesEnded` must follow."""


@dataclass(frozen=True, slots=True)
class StartEngines:
    """Start engines with this code, which is already loaded."""

    code: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Show this to the user, as a warning if there is an error."""

    text: str
    error: str | None = None


Effect = LoadCode | DrainEngines | StartEngines | Finish | Tell


class Reload:
    """The reloads of one run.

    Args:
        code: The fingerprint of the code that the first engines run.
    """

    def __init__(self, code: str) -> None:
        self._running = code
        #: The code that ran before the current one, while the current one is on trial.
        self._last_good: str | None = None
        #: The fingerprint of the newest save; "" if that code could not be loaded.
        self._saved = code
        self._loading: str | None = None
        #: Code that was loaded and starts when the engines have ended.
        self._next: str | None = None
        self._draining = False
        self._stopping = False

    @property
    def needed(self) -> frozenset[str]:
        """The code that may still have to be started; the shell can forget all other code."""
        codes = {self._running, self._last_good, self._next, self._loading}
        return frozenset(code for code in codes if code is not None)

    def feed(self, event: Input) -> list[Effect]:
        """Process one input and return the effects, in order."""
        match event:
            case Saved(code):
                return self._on_saved(code)
            case CodeLoaded():
                return self._on_loaded()
            case LoadFailed(error):
                return self._on_load_failed(error)
            case EnginesReady():
                return self._on_ready()
            case EnginesEnded():
                return self._on_ended(event)
            case StopRequested():  # pragma: no branch - mypy knows that nothing else is left
                self._stopping = True
                self._next = None
                return []

    def _on_saved(self, code: str) -> list[Effect]:
        if self._stopping or code == self._saved:
            return []
        self._saved = code
        return [] if self._loading is not None else self._load()

    def _load(self) -> list[Effect]:
        """Load the code that was saved last, unless it runs already or will run next."""
        if self._saved == (self._next or self._running):
            return [Tell("the files match the running code again; nothing is reloaded")]
        if self._draining and self._saved == self._running:
            # It was loaded before and is still available.
            self._next = self._running
            return [Tell("the files match the running code again; its engines restart")]
        self._loading = self._saved
        return [LoadCode(self._saved)]

    def _on_loaded(self) -> list[Effect]:
        code, self._loading = self._loading, None
        if self._stopping:
            return []
        if code != self._saved:
            return self._load()
        self._next = code
        if self._draining:
            return []
        self._draining = True
        return [Tell("code saved; the engines drain, then restart with the new code"), DrainEngines()]

    def _on_load_failed(self, error: str) -> list[Effect]:
        code, self._loading = self._loading, None
        if self._stopping:
            return []
        if code != self._saved:
            return self._load()
        self._saved = ""  # any save loads it again: it may load the next time
        kept = "the previously saved code" if self._next is not None else "the running code"
        return [Tell(f"the saved code cannot be loaded; {kept} stays in use", error)]

    def _on_ready(self) -> list[Effect]:
        if self._draining or self._last_good is None:
            return []
        self._last_good = None
        return [Tell("the new code is running")]

    def _on_ended(self, ended: EnginesEnded) -> list[Effect]:
        self._draining = False
        if self._stopping or ended.final:
            return [Finish()]
        if self._next is not None:
            if self._last_good is None:
                self._last_good = self._running
            return self._start(self._next)
        if self._last_good is not None:
            good, self._last_good = self._last_good, None
            said = "the engines with the new code have ended; the previous code starts again"
            return [Tell(said, ended.error), *self._start(good)]
        return [Finish()]

    def _start(self, code: str) -> list[Effect]:
        self._running, self._next = code, None
        return [StartEngines(code)]
