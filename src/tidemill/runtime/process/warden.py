"""The process that cleans up after a killed engine, and the engine's handle on it.

An engine that is killed cannot end its children. Its warden outlives it: this file, run as
`python -I -S warden.py ENGINE_ID ENGINE_PID GRACE_SECONDS` in a session of its own. It waits for the end of the pipe
on its standard input, or of the engine's process in case a fork holds the pipe. Then it ends every process that
carries the engine's id, the other processes of their groups, and their descendants.

A process carries the id in the environment that it was started with. Below a zygote or a triggerer it also carries
it in a resource limit (`carry_number`), so that a program is found even if it clears its environment, has a session
of its own and has lost its parents.

Invariants: only small modules of the standard library are imported here (no pathlib, no contextlib), so that a warden
stays at some 9 MB. It keeps no descriptor of the engine except the pipe, and carries no engine's id itself. A byte on
the pipe means that the engine has ended its tasks; the warden then scans once, for programs that left their task's
group, and exits.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
import zlib

#: The variable that marks the processes of an engine.
ENGINE_ID_VARIABLE = "TIDEMILL_ENGINE_ID"
#: RLIMIT_LOCKS: Linux has not enforced it since 2.4.25, but processes inherit it, and hardly any program changes it.
_NUMBER_LIMIT = 10
_NUMBER_LINE = b"Max file locks"
#: The bits of a number: the process id at the start of the owner's name, the rest of that name, and the tree.
_OWNER_BITS = _OWN_BITS = 20
#: Seconds between two scans of /proc, and how many consecutive scans must find nothing: an engine may have died while a
#: child was between fork and exec, and such a child carries the id only a moment later.
PAUSE_SECONDS = 0.05
CLEAN_SCANS = 3
#: How long to keep killing processes that do not die, after the grace period.
STUBBORN_SECONDS = 10.0
#: How long a warden may take to exit when told to.
LEAVE_SECONDS = 2.0


class Warden:
    """The engine's handle of its warden.

    Args:
        engine_id: The id in the environment of the engine's children.
        grace_seconds: Time between SIGTERM and SIGKILL once the engine has exited; 0 sends SIGKILL at once, so that no
            process is still running when its work is repeated.
    """

    def __init__(self, engine_id: str, grace_seconds: float = 0.0) -> None:
        self._engine_id = engine_id
        self._grace_seconds = grace_seconds
        self._pipe = -1
        self.pid: int | None = None

    def start(self) -> None:
        """Start the warden; call it before the first child is started.

        Raises:
            OSError: The system has no room for another process.
        """
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        numbers = [self._engine_id, str(os.getpid()), str(self._grace_seconds)]
        moves = [
            (os.POSIX_SPAWN_DUP2, reader, 0),
            (os.POSIX_SPAWN_DUP2, null, 1),
            (os.POSIX_SPAWN_DUP2, null, 2),
        ]
        environ = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", *_program(), *numbers],
                environ,
                file_actions=moves,
                setsid=True,
                # Blocked from its first instruction: signals for the engine's group or terminal are not meant for the
                # warden.
                setsigmask=(signal.SIGHUP, signal.SIGINT, signal.SIGTERM),
                setsigdef=(signal.SIGPIPE,),
            )
        finally:
            os.close(reader)
            os.close(null)
            if self.pid is None:
                os.close(self._pipe)
                self._pipe = -1

    def reaped(self) -> bool:
        """Return whether the warden has exited, or was never started; `start` starts another one."""
        if self.pid is not None:
            try:
                if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                    return False
            except ChildProcessError:
                pass  # other code in this process reaped it
            os.close(self._pipe)
            self.pid, self._pipe = None, -1
        return True

    def disown(self) -> None:
        """Close this end of the pipe in a forked process, which the warden does not watch."""
        if self._pipe >= 0:
            os.close(self._pipe)
        self.pid, self._pipe = None, -1

    def close(self) -> None:
        """Let the warden end the remaining processes of finished tasks and exit; reap it."""
        if self.pid is None:
            return
        try:  # noqa: SIM105  # see above: no contextlib
            os.write(self._pipe, b"q")
        except BrokenPipeError:
            pass  # it was killed; only its exit status is left
        os.close(self._pipe)
        deadline = time.monotonic() + LEAVE_SECONDS
        try:
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.002)
        except ChildProcessError:
            pass  # other code in this process reaped it
        self.pid, self._pipe = None, -1


def _program() -> list[str]:
    if os.path.isfile(__file__):  # noqa: PTH113
        return [__file__]
    # Inside a zip archive, as Spark ships code to a cluster, there is no file to run, only its text.
    loader = globals()["__loader__"]
    return ["-c", loader.get_data(__file__).decode()]


def number_owner(owner: str) -> range:
    """Return the numbers of all trees of an owner, which is PID or PID-NAME, as in an id after `tree-`."""
    pid, _, name = owner.partition("-")
    first = int(pid) << _OWNER_BITS + _OWN_BITS
    if not name:
        return range(first, first + (1 << _OWNER_BITS + _OWN_BITS))
    first |= _hash(name, _OWNER_BITS) << _OWN_BITS
    return range(first, first + (1 << _OWN_BITS))


def number_tree(tree_id: str) -> int:
    """Return the number of a tree with the id `tree-OWNER-NAME`; 0 for an engine's id, which has none."""
    kind, _, rest = tree_id.partition("-")
    owner, _, own = rest.rpartition("-")
    return number_owner(owner).start | _hash(own, _OWN_BITS) if kind == "tree" else 0


def _hash(text: str, bits: int) -> int:
    return zlib.crc32(text.encode()) & ((1 << bits) - 1)


def carry_number(number: int) -> None:
    """Make this process and its descendants carry a number, whatever they do to their environments; 0 for none."""
    hard = resource.getrlimit(_NUMBER_LIMIT)[1]
    try:  # noqa: SIM105  # see above: no contextlib
        resource.setrlimit(_NUMBER_LIMIT, (number or hard, hard))
    except (OSError, ValueError):
        pass  # the limit was lowered for good; environments and parents remain as marks


def read_number(pid: int) -> int:
    """Return the number that a process carries; 0 for none."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as stream:
            limits = stream.read()
    except OSError:
        return 0  # it has exited
    fields = limits[limits.find(_NUMBER_LINE) :].split(maxsplit=4)
    return int(fields[3]) if len(fields) > 3 and fields[3].isdigit() else 0


def marked(engine_id: str) -> list[int]:
    """Return the processes that carry this engine's id."""
    mark, number = b"%s=%s\0" % (ENGINE_ID_VARIABLE.encode(), engine_id.encode()), number_tree(engine_id)
    return find_carriers(mark, range(number, number + 1) if number else range(0))


def find_carriers(mark: bytes, numbers: range) -> list[int]:
    """Return the processes that carry a mark in the environment they were started with, or one of these numbers."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            # A zombie shows its limits until it is reaped, which may be never.
            if numbers and read_number(int(name)) in numbers and _read_parent(int(name)) is not None:
                found.append(int(name))
                continue
            try:
                with open(f"/proc/{name}/environ", "rb") as stream:
                    if mark in stream.read():
                        found.append(int(name))
            except OSError:
                continue  # it has exited, or belongs to another user and so is not ours
    return found


def find_below(roots: list[int]) -> dict[int, bytes]:
    """Return the descendants of some processes, with their start times; never this process."""
    children: dict[int, list[int]] = {}
    started = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := _read_parent(int(name))) is not None:
            parent, started[int(name)] = found
            children.setdefault(parent, []).append(int(name))
    below = {}
    unvisited = roots.copy()
    while unvisited:
        for pid in children.get(unvisited.pop(), ()):
            if pid not in below and pid != os.getpid():
                below[pid] = started[pid]
                unvisited.append(pid)
    return below


def _read_parent(pid: int) -> tuple[int, bytes] | None:
    """Return the parent of a running process, and its start time in the system's unit."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), fields[19])


def end_all(engine_id: str, grace_seconds: float, spared: frozenset[int]) -> None:
    """End the processes that carry the id, and their descendants with or without the id.

    Sends SIGTERM for the grace period, then SIGKILL, until several consecutive scans find nothing.

    Args:
        engine_id: The id that the processes carry.
        grace_seconds: Time between SIGTERM and SIGKILL.
        spared: Groups in which only the processes themselves are signalled.
    """
    started = time.monotonic()
    asked: set[int] = set()
    groups: set[int] = set()
    # Once its parent has exited, only the start time proves that a process without the id descends from one with it.
    below: dict[int, bytes] = {}
    clean = 0
    while clean < CLEAN_SCANS and time.monotonic() < started + grace_seconds + STUBBORN_SECONDS:
        late = time.monotonic() >= started + grace_seconds
        found = marked(engine_id)
        below = {pid: start for pid, start in below.items() if (_read_parent(pid) or (0, b""))[1] == start}
        if found:
            below |= find_below(found)
        found += [pid for pid in below if pid not in found]
        clean = 0 if found else clean + 1
        told: set[int] = set()
        for pid in found:
            if late or pid not in asked:
                _signal(pid, signal.SIGKILL if late else signal.SIGTERM, groups, told, spared)
                asked.add(pid)
        groups |= told
        time.sleep(PAUSE_SECONDS)


def _signal(pid: int, number: int, groups: set[int], told: set[int], spared: frozenset[int]) -> None:
    """Signal a process with its group, once, so that no handler of a program runs twice.

    Args:
        pid: A process that carries the id, or a descendant of one.
        number: The signal.
        groups: Groups signalled in an earlier scan; in these only the process itself is signalled.
        told: Groups signalled in this scan.
        spared: Groups that are never signalled.
    """
    try:
        group = os.getpgid(pid)
        if group in told:
            return
        if group in spared or (group in groups and number == signal.SIGTERM):
            os.kill(pid, number)
        else:  # every other group with a marked process was created for a task, or by one
            told.add(group)
            os.killpg(group, number)
    except OSError:
        pass  # it exited meanwhile, or is not ours to end


def _find_group(engine_pid: int) -> int:
    """Return the group of the engine; it may contain other engines, and the process that started them."""
    try:
        return os.getpgid(engine_pid) if os.getppid() == engine_pid else os.getpgrp()
    except OSError:  # it has just exited
        return os.getpgrp()


def _close_inherited() -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                continue  # the listing itself


def main(engine_id: str, engine_pid: int, grace_seconds: float) -> None:
    """Wait for the engine to exit, and clean up after it."""
    os.chdir("/")
    carry_number(0)
    _close_inherited()
    spared = frozenset((os.getpgrp(), _find_group(engine_pid)))
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    try:  # noqa: SIM105
        waiting.register(os.pidfd_open(engine_pid), select.POLLIN)
    except OSError:
        pass  # no pidfd here, or the engine has exited already; the pipe shows it
    # With another parent the engine has exited, and its id may belong to another process by now.
    ended = dict(waiting.poll() if os.getppid() == engine_pid else waiting.poll(0))
    if ended.get(0, 0) & select.POLLIN and os.read(0, 1) and not marked(engine_id):
        return
    end_all(engine_id, grace_seconds, spared)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
