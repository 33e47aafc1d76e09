"""The templates of a worker: decides which files have one, and which process forks the next task process of a file.

The first process of a file starts its template, and waits until the template has imported the file. The file is thus
imported once, however many attempts begin together. Invariants: a template forks a process only while all files that it
has read are unchanged, and not much longer than `dags.reparse_seconds`. A template ends after the processes that it
forked, which would end with it. Whatever happens to templates, the zygote forks the processes that they do not.
"""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from tidemill.core.tasks.rereading import find_interval
from tidemill.dags.opened_files import Signature, sign_file
from tidemill.services.worker.messages import FileLoaded, ForkedTask
from tidemill.services.worker.signatures import is_unchanged
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.link import ForkedProcess, ForkLink, ZygoteError
from tidemill.services.zygote.messages import Setup, Started

log = structlog.get_logger(__name__)

_TARGET = "tidemill.services.worker.task.template:main"
#: Maximum number of templates. A template shares the zygote's imports; a small file takes a few MB more.
MAX_TEMPLATES = 32
#: How long an unused template is kept.
IDLE_SECONDS = 60.0
_LOOK_SECONDS = 1.0
#: How many templates are tried for a process, because a file may be saved during its import.
_ATTEMPTS = 2
#: How many files without a template are remembered.
_MAX_REMEMBERED = 1000


@dataclass(eq=False, slots=True)
class _Template:
    """A template.

    Attributes:
        sign: The signature of its file when it was started.
        used: When it was last needed.
        loaded: The imported file; None: the template is not ready.
        known: Set once it is ready, or has failed.
    """

    sign: Signature
    started: float
    used: float
    link: ForkLink | None = None
    process: ForkedProcess | None = None
    loaded: FileLoaded | None = None
    known: asyncio.Event = field(default_factory=asyncio.Event)


class Templates:
    """The templates of a worker.

    Args:
        zygote: Forks them, and the processes that they do not.
        folder: The folder of DAGs.
        import_seconds: How long a task process may take to import its file, including the wait for its template.
        reparse_seconds: How long an import is used, unless importing is slow.
    """

    def __init__(
        self, zygote: ZygoteClient, folder: Path, import_seconds: float, reparse_seconds: float = math.inf
    ) -> None:
        self._zygote, self._folder = zygote, folder
        # The other half is left for importing the file without a template.
        self._import_seconds = import_seconds / 2
        self._reparse_seconds = reparse_seconds
        self._loop = asyncio.get_running_loop()
        self._templates: dict[str, _Template] = {}
        self._leaving: list[_Template] = []
        #: The signatures of files that have no template, each with the time at which that expires.
        self._refused: dict[str, tuple[Signature, float]] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def find(self, task: ForkedTask) -> tuple[ForkLink, FileLoaded | None]:
        """Return the link that forks the next process of a file, and the imported file; waits for the import."""
        for _ in range(_ATTEMPTS):
            if (template := self._choose(task)) is None:
                break
            await template.known.wait()
            if template.link is None or template.loaded is None:
                break
            if self.is_current(template.loaded):
                return template.link, template.loaded
        return self._zygote.link, None

    def is_current(self, loaded: FileLoaded) -> bool:
        """Return whether an import would probably give the same result now."""
        interval = find_interval(self._reparse_seconds, loaded.cpu_seconds)
        return self._loop.time() < loaded.at + interval and is_unchanged(self._folder, loaded.files)

    def close(self) -> None:
        """End all templates, and all processes that they have forked."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._starting:
            task.cancel()
        for file in list(self._templates):
            self._leave(file)
        for template in self._leaving:
            self._end(template)
        self._leaving.clear()

    def _choose(self, task: ForkedTask) -> _Template | None:
        """Return the template of a file, which may still be starting; None: the file cannot have one."""
        sign, now = sign_file(self._folder / task.file), self._loop.time()
        template = self._templates.get(task.file)
        if template is not None and not self._is_fresh(template, sign):
            self._leave(task.file)
            template = None
        if template is None:
            refused, until = self._refused.get(task.file, ((), 0.0))
            if not sign or (refused == sign and now < until):
                return None
            template = _Template(sign, now, now)
            self._start(task, template)
        template.used = now
        return template

    def _is_fresh(self, template: _Template, sign: Signature) -> bool:
        return template.sign == sign and (template.loaded is None or self.is_current(template.loaded))

    # -- start and end of templates --------------------------------------------------------------------------------

    def _start(self, task: ForkedTask, template: _Template) -> None:
        while len(self._templates) >= MAX_TEMPLATES:
            self._leave(min(self._templates, key=lambda file: self._templates[file].used))
        self._templates[task.file] = template
        starting = self._loop.create_task(self._fork(task, template), name=f"template of {task.file}")
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    async def _fork(self, task: ForkedTask, template: _Template) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        template.link = ForkLink(
            lambda started: self._note_started(task.file, template, started),
            lambda: self._note_gone(task.file, template),
            lambda: self._kill_stuck(task.file, template),
        )
        template.link.attach(ours, Setup())
        try:
            template.process = await self._zygote.fork(_TARGET, msgspec.msgpack.encode(task), [theirs.fileno()])
        except (ZygoteError, OSError):
            template.link.lose()
            self._note_gone(task.file, template)
        finally:
            theirs.close()

    def _note_started(self, file: str, template: _Template, started: Started) -> None:
        if started.about:
            template.loaded = msgspec.msgpack.decode(started.about, type=FileLoaded)
            template.known.set()
        else:  # the import left something that cannot be shared, which stays so until the file changes
            self._refuse(file, template, math.inf)

    def _note_gone(self, file: str, template: _Template) -> None:
        if template.loaded is None and not template.known.is_set():
            # For example, the import failed, which may change soon.
            taken = self._loop.time() - template.started
            self._refuse(file, template, self._loop.time() + find_interval(self._reparse_seconds, taken))
        if self._templates.get(file) is template:
            del self._templates[file]

    def _kill_stuck(self, file: str, template: _Template) -> None:
        """Kill a template that does not answer; a task, which is its child, may have stopped it."""
        log.error("the template process of a DAG file does not answer; killing it", file=file)
        if template.process is not None:
            self._zygote.signal(template.process, signal.SIGKILL, group=True)

    def _refuse(self, file: str, template: _Template, until: float) -> None:
        log.debug("a file has no template; each task process imports it", file=file)
        self._refused.pop(file, None)
        self._refused[file] = template.sign, until
        if len(self._refused) > _MAX_REMEMBERED:
            del self._refused[next(iter(self._refused))]
        template.known.set()

    def _leave(self, file: str) -> None:
        template = self._templates.pop(file)
        template.known.set()
        self._leaving.append(template)

    def _look(self) -> None:
        """End the templates that are no longer needed."""
        self._timer, now = None, self._loop.time()
        for file, template in list(self._templates.items()):
            if template.loaded is None:
                if now - template.started > self._import_seconds:
                    self._refuse(file, template, now + find_interval(self._reparse_seconds, self._import_seconds))
                    self._leave(file)
            elif now - template.used > IDLE_SECONDS or not self.is_current(template.loaded):
                self._leave(file)
        for template in list(self._leaving):
            if template.link is None or not template.link.is_busy:
                self._end(template)
                self._leaving.remove(template)
        if self._templates or self._leaving:
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _end(self, template: _Template) -> None:
        if template.link is not None:
            template.link.lose()
        if template.process is not None and template.loaded is None:  # it may hang
            self._zygote.signal(template.process, signal.SIGKILL, group=True)
