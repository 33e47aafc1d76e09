"""The templates of a worker: which files have one, and what forks the next task process of a file.

A file gets a template with the second process that it needs. Invariants: a process is forked from a template only while
all files that this has read are as it has read them; a template ends after the processes that it forked, which end with
it; whatever happens to templates, the zygote forks what they do not.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from tidemill.services.worker.messages import Task
from tidemill.services.worker.signatures import is_unchanged, sign_file
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.link import ForkedProcess, ForkLink, ZygoteError
from tidemill.services.zygote.messages import Setup, Started

log = structlog.get_logger(__name__)

_TARGET = "tidemill.services.worker.template:main"
#: How many files have one at a time.
MAX_TEMPLATES = 4
#: How long one is kept that forks nothing.
IDLE_SECONDS = 60.0
_LOOK_SECONDS = 1.0
#: How many files are remembered that have no template.
_MAX_REMEMBERED = 1000


@dataclass(eq=False, slots=True)
class _Template:
    """A template. `files`: what it has read; None: it is not ready. `used`: when it was last needed."""

    sign: tuple[int, ...]
    used: float
    link: ForkLink | None = None
    process: ForkedProcess | None = None
    files: dict[str, tuple[int, ...]] | None = None


class Templates:
    """The templates of a worker.

    Args:
        zygote: Forks them, and what they do not.
        folder: The folder of DAGs.
        import_seconds: How long the import of a file may take.
    """

    def __init__(self, zygote: ZygoteClient, folder: Path, import_seconds: float) -> None:
        """Have none yet."""
        self._zygote, self._folder, self._import_seconds = zygote, folder, import_seconds
        self._loop = asyncio.get_running_loop()
        self._templates: dict[str, _Template] = {}
        self._leaving: list[_Template] = []
        #: Files that one process was needed for, or that cannot have a template, as they were then.
        self._seen: dict[str, tuple[int, ...]] = {}
        self._refused: dict[str, tuple[int, ...]] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def find(self, task: Task) -> ForkLink:
        """Return what forks the next process of a file."""
        sign, now = sign_file(self._folder / task.file), self._loop.time()
        template = self._templates.get(task.file)
        if template is not None and not self._is_fresh(template, sign):
            self._leave(task.file)
            template = None
        if template is None:
            if self._seen.get(task.file) == sign and sign and self._refused.get(task.file) != sign:
                self._start(task, _Template(sign, now))
            self._remember(self._seen, task.file, sign)
            return self._zygote.link
        template.used = now
        ready = template.link is not None and template.files is not None
        return template.link if ready and template.link is not None else self._zygote.link

    def close(self) -> None:
        """End all templates, and all that they have forked."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._starting:
            task.cancel()
        for file in list(self._templates):
            self._leave(file)
        for template in self._leaving:
            self._end(template)
        self._leaving.clear()

    def _is_fresh(self, template: _Template, sign: tuple[int, ...]) -> bool:
        return template.sign == sign and (template.files is None or is_unchanged(self._folder, template.files))

    @staticmethod
    def _remember(signs: dict[str, tuple[int, ...]], file: str, sign: tuple[int, ...]) -> None:
        signs.pop(file, None)
        signs[file] = sign
        if len(signs) > _MAX_REMEMBERED:
            del signs[next(iter(signs))]

    # -- their lives -----------------------------------------------------------------------------------------------

    def _start(self, task: Task, template: _Template) -> None:
        while len(self._templates) >= MAX_TEMPLATES:
            self._leave(min(self._templates, key=lambda file: self._templates[file].used))
        self._templates[task.file] = template
        starting = self._loop.create_task(self._fork(task, template), name=f"template of {task.file}")
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    async def _fork(self, task: Task, template: _Template) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def note_started(started: Started) -> None:
            template.files = msgspec.msgpack.decode(started.about, type=dict[str, tuple[int, ...]])

        template.link = ForkLink(
            note_started, lambda: self._note_gone(task.file, template), lambda: self._kill_stuck(task.file, template)
        )
        template.link.attach(ours, Setup())
        try:
            template.process = await self._zygote.fork(_TARGET, msgspec.msgpack.encode(task), [theirs.fileno()])
        except (ZygoteError, OSError):
            template.link.lose()
            self._note_gone(task.file, template)
        finally:
            theirs.close()

    def _note_gone(self, file: str, template: _Template) -> None:
        if template.files is None:
            self._refuse(file, template)
        if self._templates.get(file) is template:
            del self._templates[file]

    def _kill_stuck(self, file: str, template: _Template) -> None:
        """Kill a template that does not answer: a task may have stopped it, which is its parent."""
        log.error("what starts the task processes of a DAG file does not answer; it is killed", file=file)
        if template.process is not None:
            self._zygote.signal(template.process, signal.SIGKILL, group=True)

    def _refuse(self, file: str, template: _Template) -> None:
        log.debug("a file has no template; each task process imports it", file=file)
        self._remember(self._refused, file, template.sign)

    def _leave(self, file: str) -> None:
        self._leaving.append(self._templates.pop(file))

    def _look(self) -> None:
        """End what is no longer needed."""
        self._timer, now = None, self._loop.time()
        for file, template in list(self._templates.items()):
            if now - template.used > (self._import_seconds if template.files is None else IDLE_SECONDS):
                if template.files is None:
                    self._refuse(file, template)
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
        if template.process is not None and template.files is None:  # it may hang
            self._zygote.signal(template.process, signal.SIGKILL, group=True)
