"""An open message is looked for at the engine that owns its partition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.core.errors import RemoteError, UserActionError
from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.runtime.link.probe_report import ProbeReport, ProbeStatus
from tidemill.runtime.link.progress import EngineProgress
from tidemill.spark.live.linked_engines import LinkedEngines
from tidemill.spark.live.message_finder import find_message, probe_message
from tidemill.spark.live.recording import answer_open


class Server:
    """Answers for one engine."""

    def __init__(self, answer: MessageStage | RemoteError | None) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    async def ask(self, *question: Any) -> MessageStage | None:
        self.asked.append(question)
        if isinstance(self.answer, RemoteError):
            raise self.answer
        return self.answer


def slot(number: int, progress: EngineProgress | None, link: int | None) -> Any:
    return SimpleNamespace(number=number, progress=progress, link=link)


SLOTS = [
    slot(0, EngineProgress(partitions=["t/0"], committed={"t/0": 10}), 7),
    slot(1, EngineProgress(partitions=["t/1"]), None),
    slot(2, None, None),
]


async def find(server: Server, partition: int, offset: int) -> OpenMessage | None:
    return await find_message(server, SLOTS, "t", partition, offset)  # type: ignore[arg-type]


async def test_the_owner_is_asked_and_secrets_are_masked() -> None:
    server = Server(MessageStage(stage=OpenStage.SINK, sink="sinks.http.out", why="refused: password=hunter2"))
    found = await find(server, 0, 10)
    assert server.asked == [(7, "t", 0, 10)]
    assert found is not None
    assert (found.engine, found.stage.stage) == (0, OpenStage.SINK)
    assert "hunter2" not in str(found)


async def test_what_is_committed_is_not_open_and_nobody_is_asked() -> None:
    server = Server(MessageStage(stage=OpenStage.COMMIT))
    assert await find(server, 0, 9) is None
    assert server.asked == []


async def test_a_partition_without_an_owner_is_said() -> None:
    found = await find(Server(None), 5, 10)
    assert found is not None
    assert (found.engine, found.text) == (None, "no engine owns its partition")


async def test_an_owner_that_does_not_answer_is_named() -> None:
    assert await find(Server(None), 0, 10) is None, "it is not open there"
    with pytest.raises(RemoteError, match="engine 0: it is silent"):
        await find(Server(RemoteError("it is silent")), 0, 10)
    with pytest.raises(RemoteError, match="the link to engine 1 is lost"):
        await find(Server(None), 1, 10)


def test_only_a_question_about_one_message_is_answered() -> None:
    stage = MessageStage(stage=OpenStage.TASK, task_id="a", seconds=1.0, pid=7)
    message = OpenMessage("t", 0, 10, 0, stage, stage.describe())
    answer = answer_open(
        lambda topic, partition, offset: message, {"query": {"topic": "t", "partition": 0, "offset": 10}}
    )
    assert (answer["open"]["text"], answer["open"]["stage"]["pid"]) == (message.text, 7)
    for request in (
        {},
        {"query": {"key": "x"}},
        {"query": {"topic": "t", "partition": "0", "offset": 1}},
        {"query": 3},
    ):
        assert answer_open(lambda topic, partition, offset: message, request) == {}
    place = {"query": {"topic": "t", "partition": 0, "offset": 11}}
    assert answer_open(lambda topic, partition, offset: None, place) == {"open": None}

    def fail(topic: str, partition: int, offset: int) -> None:
        raise RemoteError("engine 0 is silent")

    assert answer_open(fail, place) == {"open": None, "problem": "engine 0 is silent"}


async def test_a_message_beyond_the_end_of_its_partition_is_not_open() -> None:
    unread = MessageStage(stage=OpenStage.NOT_READ)
    known = [slot(0, EngineProgress(partitions=["t/0"], committed={"t/0": 10}, lag={"t/0": 5}), 7)]

    async def look(offset: int, slots: list[Any]) -> OpenMessage | None:
        return await find_message(Server(unread), slots, "t", 0, offset)  # type: ignore[arg-type]

    assert await look(14, known) is not None
    assert await look(15, known) is None
    assert await look(15, SLOTS) is not None, "the lag is not known yet"


class ProbeServer:
    """Answers probes for one engine."""

    def __init__(self, answer: ProbeReport | Exception) -> None:
        self.answer = answer
        self.probed: list[tuple[Any, ...]] = []

    async def probe(self, *question: Any) -> ProbeReport:
        self.probed.append(question)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_a_message_is_probed_by_the_engine_of_slot_0() -> None:
    report, message = ProbeReport(ProbeStatus.DONE, "well", 0.5), SourceMessage("t", 1, 3)
    server: Any = ProbeServer(report)
    assert await probe_message(server, SLOTS, message, 3.0) is report
    assert server.probed == [(7, message, 3.0)]
    for error in (RemoteError("it is silent"), UserActionError("it is draining")):
        failing: Any = ProbeServer(error)
        with pytest.raises(type(error), match=f"engine 0: {error}"):
            await probe_message(failing, SLOTS, message, 3.0)
    with pytest.raises(UserActionError, match="engine 0 is not connected"):
        await probe_message(server, SLOTS[1:], message, 3.0)
    with pytest.raises(UserActionError, match="no engine is running"):
        LinkedEngines(lambda: "t").probe(message, 3.0)
