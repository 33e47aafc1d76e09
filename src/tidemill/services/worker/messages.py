"""What a worker and one of its task processes say to each other, over a socket of their own.

A message is its length in four bytes, then itself. What a task process asks the store is the call itself, which the
worker passes on.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.runtime.framing import add_length
from tidemill.store.calls.call import Call, find_answer_type
from tidemill.store.calls.people_calls import GetRun
from tidemill.store.calls.task_calls import (
    ClearTaskState,
    DeleteTaskState,
    DeleteVariable,
    GetConnection,
    GetEarlierRun,
    GetTaskState,
    GetVariable,
    GetXCom,
    PushXCom,
    SetTaskState,
    SetVariable,
)
from tidemill.store.calls.worker_calls import ClaimedAttempt, Result

#: What a task process calls.
TASK_TARGET = "tidemill.services.worker.task_process:main"
#: The largest message; an XCom has at most 1 MiB.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class ForkedTask(msgspec.Struct, frozen=True):
    """What a task process is forked with.

    Attributes:
        folder: The folder of DAGs (`dags.folder`), absolute.
        file: The file that it imports, relative to the folder.
        level: The lowest level of `logging` that is kept.
    """

    folder: str
    file: str
    level: str = "INFO"


class AttemptOrder(msgspec.Struct, frozen=True, tag=True):
    """Run an attempt. `reuses`: the process may run others afterwards, and compares what the attempt leaves in it."""

    attempt: ClaimedAttempt
    reuses: bool = False


class StoreAnswered(msgspec.Struct, frozen=True, tag=True):
    """The answer of the store to a question, by its number: the encoded value."""

    number: int
    value: bytes


class StoreNotAnswered(msgspec.Struct, frozen=True, tag=True):
    """The store refuses; repeating it does not help."""

    number: int
    error: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """There is nothing more to run."""


class FileLoaded(msgspec.Struct, frozen=True, tag=True):
    """The file is imported.

    Attributes:
        files: What was read, by its path below the folder of DAGs or absolute, with how it looked.
        at: When the import began, by the monotonic clock.
        cpu_seconds: What it cost.
        broken: Whether it raised an error, which the next attempt may not find.
    """

    files: dict[str, tuple[int, ...]]
    at: float
    cpu_seconds: float = 0.0
    broken: bool = False


class AskStore(msgspec.Struct, frozen=True, tag=True):
    """The attempt asks the store. `number`: identifies the answer."""

    number: int
    call: (
        GetXCom
        | GetEarlierRun
        | GetRun
        | PushXCom
        | GetVariable
        | SetVariable
        | DeleteVariable
        | GetConnection
        | GetTaskState
        | SetTaskState
        | DeleteTaskState
        | ClearTaskState
    )


class AttemptFinished(msgspec.Struct, frozen=True, tag=True):
    """The attempt has ended.

    Attributes:
        result: How; None: it was interrupted because its task has moved on, or the worker ends.
        xcoms: What was returned and pushed.
        skip: The tasks directly downstream that are skipped.
        skip_all_downstream: Whether all downstream are.
        changed: What of the process is not as it was before the attempt, for people; the process is not used again.
    """

    result: Result | None
    xcoms: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()
    skip_all_downstream: bool = False
    changed: tuple[str, ...] = ()


Order = AttemptOrder | StoreAnswered | StoreNotAnswered | Leave
Word = FileLoaded | AskStore | AttemptFinished

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_words = msgspec.msgpack.Decoder(Word)


def frame(message: Order | Word) -> bytes:
    """Return a message with its length in front."""
    return add_length(_encoder.encode(message))


def decode_order(data: bytes | bytearray | memoryview) -> Order:
    """Return what the worker said."""
    order: Order = _orders.decode(data)
    return order


def decode_word(data: bytes | bytearray | memoryview) -> Word:
    """Return what the task process said."""
    word: Word = _words.decode(data)
    return word


def encode_answer(value: object) -> bytes:
    """Return the answer to a call as it travels."""
    return _encoder.encode(value)


def decode_answer(call: Call[Any], data: bytes) -> Any:
    """Return the answer to a call."""
    return msgspec.msgpack.decode(data, type=find_answer_type(type(call)))
