"""Keeps the store up to date with the DAG files: reads a file again when it or its inputs have changed.

The inputs of a file are its imports and the files it reads. Changes are detected by notifications of the operating
system and by a periodic scan. An unchanged file is also read again from time to time, because it may depend on a
database, for example; differences are then logged, and create no version. A link to the folder may be moved.

Invariants:
- One process at a time reads a file.
- The stored DAGs match the file's content when it was read; if it changed meanwhile, it is read again.
- A file that hangs or crashes delays others only until its time limit, and not at all while another process is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
import watchfiles

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.tasks.rereading import Rereading
from tidemill.dags.loading import combine_digests, digest_files
from tidemill.services.parser.differences import FolderDifferences
from tidemill.services.parser.files import Signature, find_files, is_relevant, sign_files
from tidemill.services.parser.reading import FileReading, Forker, read_file
from tidemill.services.worker.signatures import is_unchanged
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.service_calls import ClaimFiles, ListFiles, RemoveFile, ReportFiles, StoreFile
from tidemill.store.database import StoreAwayError, StoreCalls

log = structlog.get_logger(__name__)

#: The interval of scans, in addition to notifications.
SCAN_SECONDS: Final = 30.0
#: The pause before a retry after an error that no file caused.
RETRY_SECONDS: Final = 2.0
#: The pause before a second look at files that differ from those of other hosts.
CONFIRM_SECONDS: Final = 2.0
#: The interval of checks for a moved link to the folder.
FOLLOW_SECONDS: Final = 2.0
#: The interval of checks for unchanged files that are due.
_DUE_SECONDS: Final = 1.0
#: The number of files that are read at the same time.
PROCESSES: Final = 2
_WATCH_MILLISECONDS: Final = 100
_FIRST_MILLISECONDS: Final = 1_000
_MAX_LINE: Final = 300


@dataclass(slots=True)
class _File:
    """The state of a file since it was last read.

    Attributes:
        signature: The signature of the file and its imports; empty: the file must be read again.
        names: The file and its imports.
        opened: Other files that it read, with their signatures.
        unsteady: Its DAGs that differ although no input has changed.
        digest: The hash of the file and its imports.
        changed: Whether a notification reported a write to one of these, whatever the signature.
        broken: Whether the file cannot be read.
        refused: Whether another file has the id of one of its DAGs.
    """

    signature: Signature = ()
    names: list[str] = field(default_factory=list)
    opened: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unsteady: frozenset[str] = frozenset()
    digest: str = ""
    changed: bool = False
    broken: bool = False
    refused: bool = False


class ParserManager:
    """Reads the files of a folder and stores their DAGs.

    Args:
        store: The store.
        forker: Starts the processes that read files.
        folder: The folder.
        parse_timeout_seconds: The time limit for reading a file.
        paused_at_creation: Whether new DAGs are paused.
        reparse_seconds: The interval at which unchanged files are read again.
        session: The session of the parser, which shares the files with the parsers of other hosts; None: it is the
            only one.
        grace_seconds: How long the files of a parser that has ended are kept although no other host has them.
    """

    def __init__(
        self,
        store: StoreCalls,
        forker: Forker,
        folder: Path,
        parse_timeout_seconds: float = 30.0,
        paused_at_creation: bool = False,
        reparse_seconds: float = 60.0,
        session: int | None = None,
        grace_seconds: float = 30.0,
    ) -> None:
        self._session = session
        self._grace_us = round(grace_seconds * 1e6)
        self._store = store
        self._forker = forker
        self._folder = Path(os.path.abspath(folder))  # noqa: PTH100 - a link to it may be moved
        self._target = os.path.realpath(folder)
        self._moved = asyncio.Event()
        self._rereading = Rereading(reparse_seconds)
        self._timeout_seconds = parse_timeout_seconds
        self._paused = paused_at_creation
        self._files: dict[str, _File] = {}
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._waiting: set[str] = set()
        self._reading: set[str] = set()
        self._changed = asyncio.Event()
        self._differences = FolderDifferences(self._folder)
        self._told_differences: dict[str, str] = {}
        self._is_first = True
        #: Set once all files present at the start have been read and stored.
        self.ready = asyncio.Event()

    @property
    def broken(self) -> int:
        """The number of files that cannot be read or stored."""
        return sum(file.broken or file.refused for file in self._files.values())

    async def run(self) -> None:
        """Keep the store up to date until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._follow())
            tasks.create_task(self._reread())
            for _ in range(PROCESSES):
                tasks.create_task(self._read_queued())
            while True:
                self._changed.clear()
                try:
                    await self._scan()
                except StoreAwayError:
                    pass  # it is logged
                except ConfigError:
                    raise  # the tables are no longer those of this program
                except (CallRefusedError, RemoteError, OSError) as error:
                    # A session that has ended is noticed by its heartbeat, too.
                    log.warning("the folder of DAG files cannot be scanned now", error=str(error))
                except Exception:
                    log.exception("the folder of DAG files cannot be scanned; this is a bug in tidemill")
                try:
                    wait_seconds = CONFIRM_SECONDS if self._differences.unsure else SCAN_SECONDS
                    await asyncio.wait_for(self._changed.wait(), wait_seconds)
                except TimeoutError:
                    continue

    async def _watch(self) -> None:
        """Watch for notifications; where they do not work, scans detect changes."""
        while True:
            self._moved.clear()
            try:
                first = True
                async for changes in watchfiles.awatch(
                    self._folder,
                    watch_filter=None,
                    step=_WATCH_MILLISECONDS,
                    debounce=_WATCH_MILLISECONDS * 5,
                    rust_timeout=_FIRST_MILLISECONDS,
                    yield_on_timeout=True,
                    stop_event=self._moved,
                ):
                    # The system watches only from the first wait on, so the first iteration scans for earlier changes.
                    opened = self._list_opened()
                    relevant = {path for _, path in changes if self._is_relevant(path, opened)}
                    if first or relevant:
                        self._note_changes(relevant)
                    first = False
            except (OSError, RuntimeError) as error:
                log.warning("cannot watch the DAG files; only scans detect changes", error=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), SCAN_SECONDS)

    def _list_opened(self) -> set[str]:
        return {os.path.join(self._target, name) for file in self._files.values() for name in file.opened}  # noqa: PTH118

    def _is_relevant(self, path: str, opened: set[str]) -> bool:
        if is_relevant(path) or not Path(path).suffix:
            return True
        # Files read by DAG files are known by the target of the link to the folder.
        real = os.path.join(self._target, os.path.relpath(path, self._folder))  # noqa: PTH118
        return real in opened or os.path.dirname(real) in opened  # noqa: PTH120

    async def _follow(self) -> None:
        """Detect that the link to the folder was moved, and watch the new target."""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            target = await asyncio.to_thread(os.path.realpath, self._folder)
            if target != self._target:
                log.info("the folder of DAG files has a new target", folder=str(self._folder), target=target)
                self._target = target
                self._moved.set()
                self._changed.set()

    async def _reread(self) -> None:
        """Read unchanged files again when they are due, one at a time."""
        loop = asyncio.get_running_loop()
        while True:
            name = self._rereading.find_due(loop.time())
            if name is None or name in self._waiting or name in self._reading:
                if name is not None:
                    self._rereading.note_read(name, loop.time())
                await asyncio.sleep(_DUE_SECONDS)
                continue
            self._rereading.note_read(name, loop.time())
            await self._read(name, reread=True)

    def _note_changes(self, paths: Collection[str]) -> None:
        # Two writes within one tick of the file clock leave the same signature.
        names = {os.path.relpath(path, self._folder) for path in paths}
        for name, file in self._files.items():
            file.changed = file.changed or not names.isdisjoint(file.names or [name])
            # A broken file may lack a module that exists now.
            if file.broken or file.refused:
                file.signature = ()
        self._changed.set()

    async def _scan(self) -> None:
        """Queue changed files, and remove deleted ones."""
        try:
            found = await asyncio.to_thread(find_files, self._folder)
        except FileNotFoundError as error:
            # The disk may be unmounted, so remove nothing.
            log.warning(f"{error}; create it, or correct dags.folder")
            return
        known = set(self._files)
        if self._is_first or self._session is not None:
            removable = await self._store.call(ListFiles(removable_by=self._session))
            known |= {record.path for record in removable}
        for name in sorted(known - set(found)):
            was_removed = await self._store.call(RemoveFile(name, self._session, self._grace_us))
            self._files.pop(name, None)
            self._rereading.forget(name)
            self._note_refused(name, False)
            if was_removed:
                log.info("a DAG file was removed; its DAGs are inactive", file=name)
        for name in await self._claim(found):
            file = self._files.setdefault(name, _File())
            if name not in self._waiting and await asyncio.to_thread(self._is_changed, name, file):
                self._waiting.add(name)
                self._queue.put_nowait(name)
        self._is_first = False
        self._check_ready()
        await self._compare(found)

    async def _compare(self, found: Sequence[str]) -> None:
        """Tell the store how this folder differs from the files that other parsers have read."""
        if self._session is None:
            return
        others = await self._store.call(ListFiles(not_of=self._session))
        found_now = await asyncio.to_thread(self._differences.look, others, found)
        if found_now == self._told_differences:
            return
        missing, differing = (
            tuple(sorted(path for path, kind in found_now.items() if kind == wanted))
            for wanted in ("missing", "differs")
        )
        await self._store.call(ReportFiles(self._session, missing, differing))
        for path in sorted(found_now.keys() - self._told_differences.keys()):
            log.warning("a DAG file differs between hosts", file=path, here=found_now[path])
        self._told_differences = found_now

    async def _claim(self, found: Sequence[str]) -> Sequence[str]:
        """Return the files that this parser reads; other live parsers read the others."""
        if self._session is None:
            return found
        mine = await self._store.call(ClaimFiles(self._session, tuple(found)))
        for name in set(self._files).difference(mine):
            del self._files[name]
            self._rereading.forget(name)
        return mine

    def _is_changed(self, name: str, file: _File) -> bool:
        names = file.names or [name]
        if sign_files(self._folder, names) != file.signature or not is_unchanged(self._folder, file.opened):
            return True
        written, file.changed = file.changed, False
        return written and digest_files(self._folder, names) != file.digest

    def _check_ready(self) -> None:
        if not self._waiting and not self._reading and not self._is_first:
            self.ready.set()

    async def _read_queued(self) -> None:
        while True:
            name = await self._queue.get()
            if name in self._reading:
                # Another process reads it; the next scan then checks whether the file has changed since.
                self._waiting.discard(name)
                continue
            self._waiting.discard(name)
            await self._read(name)

    async def _read(self, name: str, *, reread: bool = False) -> None:
        self._reading.add(name)
        try:
            again = await self._update(name, reread)
        finally:
            self._reading.discard(name)
        if again:
            self._changed.set()
        else:
            self._check_ready()

    async def _update(self, name: str, reread: bool) -> bool:
        """Read a file and store its DAGs; returns whether it must be read again. `reread`: the file is read although
        unchanged.
        """
        file, loop = self._files.get(name), asyncio.get_running_loop()
        if file is None:
            return False
        path = self._folder / name
        try:
            reading = await read_file(self._forker, path, self._folder, self._timeout_seconds)
            modules = reading.result.modules if reading.result else None
            opened = reading.result.opened if reading.result else {}
            self._rereading.note_read(name, loop.time())
            if reread:
                self._rereading.note_cost(reading.cpu_seconds, loop.time())
            before = await asyncio.to_thread(sign_files, self._folder, modules or [name])
            now = await asyncio.to_thread(digest_files, self._folder, list(modules or [name]))
            if reading.result is not None and now != reading.result.digest:
                # It changed while it was read.
                return True
            reread = reread and before == file.signature and opened == file.opened
            if self._files.get(name) is file:
                await self._keep(name, reading, now, reread)
            if self._files.get(name) is not file:
                await self._store.call(RemoveFile(name, self._session, self._grace_us))  # it was removed meanwhile
        except CallRefusedError as error:
            log.error("the DAGs of a file cannot be stored", file=name, error=str(error))  # noqa: TRY400
        except (RemoteError, OSError) as error:
            if not isinstance(error, StoreAwayError):
                log.warning("a DAG file cannot be read or stored; retrying", file=name, error=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            return True
        except ConfigError:
            return False  # the tables are no longer those of this program; the next scan ends it
        except Exception:
            # Continue with the other files; each scan retries this one.
            log.exception("a DAG file cannot be read or stored; this is a bug in tidemill", file=name)
            return False
        file.signature, file.names, file.digest, file.opened = before, list(modules or [name]), now, opened
        return False

    async def _keep(self, name: str, reading: FileReading, digest: str, reread: bool) -> None:
        result = reading.result
        modules = result.modules if result is not None else {name: digest}
        structures = result.structures if result is not None and reading.error is None else ()
        call = StoreFile(
            path=name,
            digest=digest if result is not None else combine_digests(modules),
            modules=modules,
            error=reading.error,
            structures=structures,
            paused=self._paused,
            unshared=None if result is None else result.unshared,
            reread=reread,
            session=self._session,
        )
        stored = await self._store.call(call)
        self._note_unsteady(name, {dag.dag_id: dag.differs for dag in stored if dag.differs})
        changed = [(dag.dag_id, dag.refused) for dag in stored if dag.changed or (dag.refused and not reread)]
        self._tell(name, reading, changed, reread)
        self._note_refused(name, any(dag.refused for dag in stored))

    def _note_unsteady(self, name: str, differs: Mapping[str, str]) -> None:
        """Log once that a DAG differs although no input of its file has changed."""
        if (file := self._files.get(name)) is None:
            return
        for dag_id, what in differs.items():
            if dag_id not in file.unsteady:
                log.warning(
                    "a DAG differs from its stored version although no input of its file has changed; the stored "
                    "version stays. Make the file define the same DAG each time, or save it to store a new version",
                    dag=dag_id,
                    file=name,
                    differs=what,
                )
        file.unsteady = frozenset(differs)

    def _note_refused(self, name: str, is_refused: bool) -> None:
        """Record whether another file has the id of a DAG of this one; if not, retry other refused files, since an id
        may be free.
        """
        if (file := self._files.get(name)) is not None:
            file.refused = is_refused
        waiting = [] if is_refused else [other for other in self._files.values() if other.refused]
        for other in waiting:
            other.signature = ()
        if waiting:
            self._changed.set()

    def _tell(self, name: str, reading: FileReading, changed: list[tuple[str, str]], reread: bool) -> None:
        file = self._files.get(name)
        was_broken = file is not None and file.broken
        if file is not None:
            file.broken = reading.error is not None
        if reading.output.strip() and not reread:
            log.info("a DAG file printed output", file=name, output=reading.output.strip()[:_MAX_LINE])
        if reading.error is not None and not (reread and was_broken):
            last = reading.error.strip().splitlines()[-1] if reading.result else reading.error.splitlines()[0]
            log.error("a DAG file cannot be read; its DAGs stay unchanged", file=name, error=last[:_MAX_LINE])
        elif was_broken and reading.error is None:
            log.info("a DAG file can be read again", file=name)
        for dag_id, refused in changed:
            if refused:
                log.error("a DAG is not stored", file=name, dag=dag_id, error=refused)
            else:
                log.info("a DAG is stored", file=name, dag=dag_id)
