"""The messages between a worker and one of its task processes, over a socket of their own.

Each message is preceded by its length in four bytes. A task process sends the calls to the store themselves, which the
worker passes on.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.core.store_clock import ClockReading
from tidemill.core.tasks.endings import AttemptEnding
from tidemill.runtime.framing import add_length
from tidemill.store.calls.call import Call, find_answer_type
from tidemill.store.calls.iteration_calls import GetParts, KeepParts
from tidemill.store.calls.run_calls import GetRun
from tidemill.store.calls.stream_calls import KeepBatch, TakeEvents
from tidemill.store.calls.task_calls import (
    ClearTaskState,
    DeleteTaskState,
    DeleteVariable,
    EmitItems,
    GetChunkItems,
    GetConnection,
    GetEarlierRun,
    GetTaskState,
    GetValuePage,
    GetVariable,
    GetXCom,
    PushXCom,
    SetTaskState,
    SetVariable,
    StoreListPart,
)
from tidemill.store.calls.worker_calls import ClaimedAttempt, decode_ending

#: The entry point of a task process.
TASK_TARGET = "tidemill.services.worker.task.process:main"
#: Maximum size of a message; an XCom is at most 1 MiB.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class ForkedTask(msgspec.Struct, frozen=True):
    """The request with which a task process is forked.

    Attributes:
        folder: The folder of DAGs (`dags.folder`), absolute.
        file: The file to import, relative to the folder.
        level: The lowest level of `logging` that is kept.
    """

    folder: str
    file: str
    level: str = "INFO"


class AttemptOrder(msgspec.Struct, frozen=True, tag=True):
    """Run an attempt.

    Attributes:
        attempt: The attempt.
        reuses: Whether the process may run others afterwards, and checks what this one leaves behind.
        clock: The worker's reading of the store's clock; None: it has none.
    """

    attempt: ClaimedAttempt
    reuses: bool = False
    clock: ClockReading | None = None


class StoreAnswered(msgspec.Struct, frozen=True, tag=True):
    """The store's answer to the call with this number: the encoded value."""

    number: int
    value: bytes


class StoreNotAnswered(msgspec.Struct, frozen=True, tag=True):
    """The store did not answer the call.

    Attributes:
        number: The number of the call.
        error: Why, for people.
        refused: Whether the store refused the call, so that it would refuse it again; if not, tidemill has a fault.
    """

    number: int
    error: str
    refused: bool = True


class PlaceGiven(msgspec.Struct, frozen=True, tag=True):
    """The attempt goes on after the wait with this number."""

    number: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """There are no more attempts to run."""


class FileLoaded(msgspec.Struct, frozen=True, tag=True):
    """The file has been imported.

    Attributes:
        files: The signatures of the files that were read, by paths below the DAG folder or absolute ones.
        at: When the import began, by the monotonic clock.
        cpu_seconds: The CPU time of the import.
        broken: Whether the import raised an error; a later attempt may not get the same error.
    """

    files: dict[str, tuple[int, ...]]
    at: float
    cpu_seconds: float = 0.0
    broken: bool = False


class AskStore(msgspec.Struct, frozen=True, tag=True):
    """A call of the attempt to the store; `number` identifies the answer."""

    number: int
    call: (
        GetXCom
        | GetEarlierRun
        | GetRun
        | PushXCom
        | EmitItems
        | GetChunkItems
        | GetParts
        | KeepParts
        | StoreListPart
        | GetValuePage
        | TakeEvents
        | KeepBatch
        | GetVariable
        | SetVariable
        | DeleteVariable
        | GetConnection
        | GetTaskState
        | SetTaskState
        | DeleteTaskState
        | ClearTaskState
    )


class PlaceAwaited(msgspec.Struct, frozen=True, tag=True):
    """The attempt waits at its `yield`, and needs no place until its worker lets it go on (`PlaceGiven`)."""

    number: int


class AttemptFinished(msgspec.Struct, frozen=True, tag=True):
    """The attempt has ended.

    Attributes:
        result: The result; None: the attempt was interrupted because its task has moved on, or the worker is stopping.
        xcoms: The returned and pushed values.
        skip: The directly downstream tasks to skip.
        skip_all_downstream: Whether to skip all downstream tasks.
        label: The rendered `map_index_template` of an element; None: it has none.
        changed: How the attempt changed the process, for the log; if not empty, the process is not reused.
        differs: Whether the file that the process has imported differs from the stored one.
    """

    result: AttemptEnding | None
    xcoms: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()
    skip_all_downstream: bool = False
    label: str | None = None
    changed: tuple[str, ...] = ()
    differs: bool = False


Order = AttemptOrder | StoreAnswered | StoreNotAnswered | PlaceGiven | Leave
Word = FileLoaded | AskStore | PlaceAwaited | AttemptFinished

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_words = msgspec.msgpack.Decoder(Word, dec_hook=decode_ending)


def frame(message: Order | Word) -> bytes:
    """Return a message, preceded by its length."""
    return add_length(_encoder.encode(message))


def decode_order(data: bytes | bytearray | memoryview) -> Order:
    """Decode a message from the worker."""
    order: Order = _orders.decode(data)
    return order


def decode_word(data: bytes | bytearray | memoryview) -> Word:
    """Decode a message from the task process."""
    word: Word = _words.decode(data)
    return word


def encode_answer(value: object) -> bytes:
    """Encode the answer to a call."""
    return _encoder.encode(value)


def decode_answer(call: Call[Any], data: bytes) -> Any:
    """Decode the answer to a call."""
    return msgspec.msgpack.decode(data, type=find_answer_type(type(call)))
