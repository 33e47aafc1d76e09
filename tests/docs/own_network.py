"""Runs what a page of the documentation shows where port 9092 is free, as it is for a reader who has just installed it.

Whoever may (root, with the rights of an ordinary Linux) gets a network namespace per page: only the loopback interface,
every port free, whatever else runs on this machine. A namespace belongs to a thread, and what that thread starts
inherits it. Others share the machine's port, one page at a time, under a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

from tests.until import wait_until

ResultT = TypeVar("ResultT")

PORT = 9092
_CLONE_NEWNET = 0x40000000
_SIOCSIFADDR, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8916, 0x8913, 0x8914, 1


def with_free_port(work: Callable[[], ResultT]) -> ResultT:
    """Call a function, and return its result, where port 9092 is free until it returns."""
    # Its threads end with it, and the namespace with the last thread and process in it.
    with ThreadPoolExecutor(1) as pool:
        if may_have_networks():
            return pool.submit(_in_own_network, work).result()
        with _only_user_of_the_port():
            return pool.submit(work).result()


@cache
def may_have_networks() -> bool:
    """Tell whether this process may create network namespaces."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_enter_new_network).result()


def _in_own_network(work: Callable[[], ResultT]) -> ResultT:
    own = "127.0.0.1"
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
    assert _enter_new_network()
    _switch_on("lo")
    if not own.startswith("127."):
        _set_address("lo:1", own)  # Spark binds to the address of the host's name
    return work()


def _enter_new_network() -> bool:
    """Give this thread a network of its own; tell whether it was allowed to."""
    return ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) == 0


def _switch_on(interface: str) -> None:
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", interface.encode(), 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", interface.encode(), flags | _IFF_UP))


def _set_address(interface: str, address: str) -> None:
    with socket.socket() as any_socket:
        place = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
        fcntl.ioctl(any_socket, _SIOCSIFADDR, struct.pack("16s16s", interface.encode(), place))


@contextlib.contextmanager
def _only_user_of_the_port() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"tidemill-docs-{PORT}.lock"
    with open(path, "a") as lock:
        with contextlib.suppress(PermissionError):
            os.chmod(path, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait_until(_is_free, what=f"port {PORT} is free: another program uses it, so the documentation cannot be run")
        yield


def _is_free() -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT), timeout=1):
        return False
    return True
