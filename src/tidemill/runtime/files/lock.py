"""File locks that the kernel releases, and the worker lock: one process per consumer group and worker name on a host.

Two processes of the same name would keep replacing each other in the consumer group, and two pipelines in one group
would be assigned each other's partitions. A group belongs to one Kafka cluster; the same name on other brokers is
another group. The lock ends with the process, however that ends. It is never stale, and a leftover file means nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tidemill.core.errors import ConfigError

#: The parent of the runtime folders of logins, and the location for processes without one (services, cron jobs).
_LOGINS = Path("/run/user")
_SHARED = Path("/tmp")  # noqa: S108 - owner and mode are checked before it is used
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class WorkerNameInUseError(ConfigError):
    """Another process of this host runs under the same group and worker name."""


class GroupInUseError(ConfigError):
    """Another pipeline uses the consumer group for another topic."""

    def __init__(self, group: str, topic: str, who: str) -> None:
        """Create the message, which names the other pipeline and suggests a group."""
        super().__init__(
            f"consumer group {group!r} is used for another topic, by {who}; pipelines that share a group are assigned "
            f"each other's partitions. Give this pipeline a group of its own, in the section kafka:\n"
            f"  consumer_group: tidemill-{topic}"
        )


class HeldError(Exception):
    """Another process holds the lock of a file.

    Attributes:
        holder: The id of that process, as it wrote it.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def lock_file(path: Path) -> int:
    """Lock a file, created if it is missing, until the returned descriptor is closed.

    Never remove the file: two later processes would lock two different files of one name.

    Raises:
        HeldError: Another process holds the lock.
        OSError: The file cannot be used.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode("ascii", "replace").partition("\n")[0].strip() or "unknown"
            raise HeldError(holder) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:  # such as a full disk: a later attempt must not find it locked
        os.close(fd)
        raise
    return fd


class _Use(msgspec.Struct, frozen=True):
    """The use of a locked name; the second line of the lock's file."""

    brokers: str
    group: str
    topic: str


class WorkerLock:
    """The right to run as `worker` of `group` on this host.

    Args:
        group: The consumer group.
        worker: The worker's name.
        brokers: The group's cluster, `host:port` with commas.
        topic: The topic that is read; '' is not compared.
        name_env: The variable that gives a process another name (`settings.worker_name_env`).
        directory: The folder of the lock's file; by default one that only this user can write to.

    Example:
        >>> with WorkerLock("reports", "host-1"):  # doctest: +SKIP
        ...     run()
    """

    def __init__(
        self,
        group: str,
        worker: str,
        *,
        brokers: str = "",
        topic: str = "",
        name_env: str = "WORKER_ID",
        directory: Path | None = None,
    ) -> None:
        """Name the lock; `acquire` acquires it."""
        addresses = sorted({address.strip().lower() for address in brokers.split(",")})
        self._use = _Use(",".join(addresses), group, topic)
        self._group = group
        self._worker = worker
        self._name_env = name_env
        self._directory = directory
        self._fd: int | None = None

    @property
    def path(self) -> Path:
        """The file that is locked."""
        directory = self._directory or private_directory()
        # The readable part can be the same for two pairs of names; the digest differs.
        names = f"{self._use.brokers}\0{self._group}\0{self._worker}"
        digest = hashlib.blake2b(names.encode(), digest_size=6).hexdigest()
        readable = _UNSAFE.sub("_", f"{self._group}.{self._worker}")[:100]
        return directory / f"{readable}.{digest}.lock"

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            WorkerNameInUseError: Another process holds it.
            GroupInUseError: A process of this host uses the group for another topic, under this or another name.
            ConfigError: The folder for the lock cannot be used.
        """
        if self._fd is not None:
            return
        path = self.path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_foreign(path.parent)
            self._fd = lock_file(path)
            os.lseek(self._fd, 0, os.SEEK_END)
            os.write(self._fd, msgspec.json.encode(self._use))
        except HeldError as error:
            self._refuse_other_topic(path, error.holder)
            raise WorkerNameInUseError(
                f"the worker name {self._worker!r} of consumer group {self._group!r} is in use on this host "
                f"by process {error.holder}; stop that process, or give this one another name: {self._name_env}=..."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot use {path} to lock the worker name: {error.strerror}; "
                "set XDG_RUNTIME_DIR to a folder that this user can write to"
            ) from error
        try:
            self._refuse_other_pipelines(path)
        except GroupInUseError:
            self.release()
            raise

    def _refuse_other_pipelines(self, own: Path) -> None:
        """Refuse a group that a process of another name uses for another topic."""
        held = _held_files()
        for path in own.parent.glob("*.lock"):
            with contextlib.suppress(OSError):
                holder = held.get(path.stat().st_ino)
                if path != own and holder is not None and path.read_text().startswith(f"{holder}\n"):
                    self._refuse_other_topic(path, holder)

    def _refuse_other_topic(self, path: Path, holder: str) -> None:
        try:
            use = msgspec.json.decode(path.read_bytes().partition(b"\n")[2], type=_Use)
        except (OSError, msgspec.DecodeError):
            return  # it was written a moment ago, or by an older version
        same_group = (use.brokers, use.group) == (self._use.brokers, self._use.group)
        if same_group and self._use.topic and use.topic and use.topic != self._use.topic:
            raise GroupInUseError(
                self._group, self._use.topic, f"process {holder} on this host, which reads topic {use.topic!r}"
            )

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _held_files() -> dict[int, str]:
    """Return the holders of file locks on this host: process ids by the files' inodes; empty without a /proc.

    This reads the kernel's list instead of trying the locks: a trial, however brief, would make the owner's own attempt
    fail.
    """
    held = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK":
                held[int(words[5].rpartition(":")[2])] = words[4]
    return held


def private_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for locks and sockets of this user, which may not exist yet; see `refuse_foreign`."""
    base = environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "tidemill"
    return _SHARED / f"tidemill-{os.getuid()}"


def list_private_directories(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders in which processes of this user may have their sockets, this process's own folder first.

    A login has XDG_RUNTIME_DIR; a service or a cron job of the same user does not. A folder at any other location was
    chosen explicitly, and is the only one.
    """
    own = private_directory(environ)
    usual = (_LOGINS / str(os.getuid()) / "tidemill", private_directory({}))
    if own not in usual and own.parent.parent != _LOGINS:
        return [own]
    return list(dict.fromkeys((own, *usual)))


def refuse_foreign(directory: Path) -> None:
    """Check that a folder at a location for all users belongs to this user.

    Raises:
        PermissionError: The folder belongs to another user.
    """
    owner = directory.lstat().st_uid
    if owner != os.getuid():
        raise PermissionError(1, f"{directory} belongs to another user ({owner})")
