"""Questions of a driver to one of its engines over the link, and their answers: where a message is, and probes.

Invariants: a question or an answer is sent only while little else waits, so that no heartbeat is late. A question
without an answer ends with its time limit, or with its connection. Few questions are open at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable

import structlog

from tidemill.core.errors import RemoteError, UserActionError, describe_error, escape_surrogates
from tidemill.core.pipeline.message_stage import MessageStage
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.frames import AnswerFrame, AskFrame, BadFrameError, ProbedFrame, ProbeFrame, send_frame
from tidemill.runtime.link.probe_report import ProbeReport, ProbeSource
from tidemill.runtime.link.records import MAX_WAITING_BYTES
from tidemill.runtime.log.setup import throttle

log = structlog.get_logger(__name__)

#: How many questions may be open at an engine; more are refused.
MAX_OPEN = 32
#: How long an engine may take to answer; its event loop may be blocked.
ASK_SECONDS = 2.0
#: How much longer than the probe its answer may take, because the engine ends the processes that the probe left.
PROBE_END_SECONDS = 8.0
#: Returns where a message is, given topic, partition and offset; None if it is not open.
FindMessage = Callable[[str, int, int], MessageStage | None]


def is_free(writer: asyncio.StreamWriter) -> bool:
    """Return whether a connection has so little to send that a frame other than a heartbeat may be sent."""
    return not writer.is_closing() and writer.transport.get_write_buffer_size() < MAX_WAITING_BYTES


class EngineAnswers:
    """The engine's side: answers the driver's questions.

    Attributes:
        find: Finds messages; None while there is no engine.
        prober: Probes messages; None if probes are off.
    """

    def __init__(self) -> None:
        self.find: FindMessage | None = None
        self.prober: ProbeSource | None = None
        self._waiting: deque[AnswerFrame | ProbedFrame] = deque(maxlen=MAX_OPEN)

    def answer(self, ask: AskFrame, writer: asyncio.StreamWriter | None) -> None:
        """Find the answer now, and send it as soon as little else waits."""
        stage, problem = None, ""
        try:
            stage = self.find(ask.topic, ask.partition, ask.offset) if self.find is not None else None
        except Exception as error:  # a question must not end the link
            problem = escape_surrogates(describe_error(error))
            throttle(log, 60.0).error("the lookup of a message failed", error=problem, exc_info=error)
        self._waiting.append(AnswerFrame(ask.number, stage, problem))
        self.send(writer)

    async def probe(self, probe: ProbeFrame) -> None:
        """Probe a message; the answer is sent with the next beat."""
        report, problem = None, ""
        try:
            if self.prober is not None:
                report = await self.prober.probe(probe.message, probe.seconds)
            else:
                problem = "the engine does not probe messages: debug.probe_enabled is false, or it is starting"
        except UserActionError as error:
            problem = str(error)
        except Exception as error:  # a question must not end the link
            problem = escape_surrogates(describe_error(error))
            log.error("the probe of a message failed", error=problem, exc_info=error)  # noqa: TRY400
        self._waiting.append(ProbedFrame(probe.number, report, problem))

    def send(self, writer: asyncio.StreamWriter | None) -> None:
        """Send the answers that may be sent now."""
        while self._waiting and writer is not None and is_free(writer):
            answer = self._waiting.popleft()
            try:
                send_frame(writer, answer)
            except Exception as error:  # a text that cannot be encoded must not end the link
                send_frame(writer, type(answer)(answer.number, None, type(error).__name__))


class Questions:
    """The driver's side, on the link's loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[int, asyncio.Future[AnswerFrame | ProbedFrame]]] = {}

    async def ask(
        self, link: int, writer: asyncio.StreamWriter | None, topic: str, partition: int, offset: int
    ) -> MessageStage | None:
        """Ask an engine where a message is; None if it is not open there.

        Args:
            link: The engine's link.
            writer: The engine's connection.
            topic: The message's topic.
            partition: The message's partition.
            offset: The message's offset.

        Raises:
            RemoteError: There is no answer.
        """
        question = AskFrame(next(self._numbers), topic, partition, offset)
        answer = await self._exchange(link, writer, question, ASK_SECONDS)
        if answer.problem:
            raise RemoteError(f"the engine failed to look up the message: {answer.problem}")
        return answer.stage if isinstance(answer, AnswerFrame) else None

    async def probe(
        self, link: int, writer: asyncio.StreamWriter | None, message: SourceMessage, seconds: float
    ) -> ProbeReport:
        """Make an engine probe a message.

        Args:
            link: The engine's link.
            writer: The engine's connection.
            message: The message.
            seconds: How long the probe may take.

        Raises:
            RemoteError: There is no answer.
            UserActionError: The engine does not probe the message; the text gives the reason.
        """
        question = ProbeFrame(next(self._numbers), message, seconds)
        answer = await self._exchange(link, writer, question, seconds + PROBE_END_SECONDS)
        if not isinstance(answer, ProbedFrame) or answer.report is None:
            raise UserActionError(answer.problem or "the engine did not answer the probe; try again")
        return answer.report

    async def _exchange(
        self, link: int, writer: asyncio.StreamWriter | None, question: AskFrame | ProbeFrame, seconds: float
    ) -> AnswerFrame | ProbedFrame:
        if writer is None or not is_free(writer) or sum(each == link for each, _ in self._open.values()) >= MAX_OPEN:
            raise RemoteError("the link to the engine is busy, or closed; try again")
        future: asyncio.Future[AnswerFrame | ProbedFrame] = asyncio.get_running_loop().create_future()
        self._open[question.number] = link, future
        try:
            send_frame(writer, question)
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise RemoteError(
                f"the engine does not answer within {seconds:g} s: its event loop may be blocked"
            ) from None
        except (UnicodeEncodeError, BadFrameError) as error:
            raise RemoteError(f"the question cannot be sent to an engine: {error}", retryable=False) from error
        finally:
            del self._open[question.number]

    def note_answer(self, link: int, answer: AnswerFrame | ProbedFrame) -> None:
        """Process an answer; one without an open question changes nothing."""
        asked, future = self._open.get(answer.number, (0, None))
        if future is not None and asked == link and not future.done():
            future.set_result(answer)

    def note_closed(self, link: int) -> None:
        """End the questions to an engine whose connection is closed."""
        for asked, future in self._open.values():
            if asked == link and not future.done():
                future.set_exception(RemoteError("the link to the engine was closed; try again"))
