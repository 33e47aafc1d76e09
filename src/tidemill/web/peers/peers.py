"""All peers: asked at once, each for a limited time, on daemon threads.

Invariants: an answer waits for a peer 2 s at most; of one that hangs, only a few threads wait; what a peer says is
checked against the model that is expected, and what it is not is a problem with the peer's name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from tidemill.config.web_settings import PeerSettings
from tidemill.web.peers.client import PeerClient, PeerError

PEER_SECONDS = 2.0
#: How many threads may wait for one peer.
MAX_WAITING = 4
AnswerT = TypeVar("AnswerT")
Query = Sequence[tuple[str, str]]


@dataclass(slots=True)
class Answer(Generic[AnswerT]):
    """What a peer answered.

    Attributes:
        name: The peer's name: host and port.
        address: Where people open it.
        value: What it said; None: nothing.
        problem: Why it said nothing, or why this is not the newest; ''.
        at: When it said it, in seconds since the epoch.
    """

    name: str
    address: str
    value: AnswerT | None = None
    problem: str = ""
    at: float = 0.0


class Peers:
    """Asks peers.

    Args:
        settings: Where they are.
        identify: Returns what servers of the recordings that are shown here have in common: they are not asked twice.
        seconds: How long each may take.
    """

    def __init__(
        self, settings: Sequence[PeerSettings], identify: Callable[[], str], seconds: float = PEER_SECONDS
    ) -> None:
        """Ask nothing yet."""
        self._identify = identify
        self._clients = {client.name: client for client in map(PeerClient, settings)}
        self._waiting = dict.fromkeys(self._clients, 0)
        self._lock = threading.Lock()
        self._seconds = seconds
        self._last: dict[tuple[str, str], Answer[Any]] = {}

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each peer, by name."""
        return {name: client.address for name, client in self._clients.items()}

    def begin(
        self, path: str, queries: Mapping[str, Query], kind: type[AnswerT], *, keep: bool = False
    ) -> Callable[[], list[Answer[AnswerT]]]:
        """Ask some peers; what is returned waits for the answers, in their order.

        Args:
            path: Behind `/api/v1`.
            queries: By the name of the peer.
            kind: What is expected.
            keep: Whether the last answer of a peer is returned, beside the problem, when it does not answer.
        """
        ends_at = time.monotonic() + self._seconds
        adapter = TypeAdapter(kind)
        asked = [self._start(name, path, queries[name], adapter) for name in self._clients if name in queries]

        def wait() -> list[Answer[AnswerT]]:
            answers = []
            for answer, done in asked:
                if done.wait(max(0.0, ends_at - time.monotonic())):
                    answers.append(answer)
                else:
                    problem = f"no answer within {self._seconds:g} s"
                    answers.append(Answer(answer.name, answer.address, problem=problem))
            if keep:
                for each in answers:
                    self._keep(path, each)
            return answers

        return wait

    def _keep(self, path: str, answer: Answer[AnswerT]) -> None:
        """Put what a peer said last in the place of what it does not say now."""
        place = (answer.name, path)
        if answer.value is not None:
            self._last[place] = answer
        elif (last := self._last.get(place)) is not None:
            answer.value, answer.at = last.value, last.at

    def _start(
        self, name: str, path: str, query: Query, adapter: TypeAdapter[AnswerT]
    ) -> tuple[Answer[AnswerT], threading.Event]:
        client, done = self._clients[name], threading.Event()
        answer: Answer[AnswerT] = Answer(name, client.address)
        with self._lock:
            is_free = self._waiting[name] < MAX_WAITING
            self._waiting[name] += is_free
        if not is_free:
            answer.problem = "it has not answered earlier requests yet"
            done.set()
            return answer, done

        def work() -> None:
            try:
                body = client.ask(path, query, self._seconds, self._identify())
                answer.value, answer.at = adapter.validate_json(body), time.time()
            except PeerError as error:
                answer.problem = str(error)
            except ValidationError as error:
                answer.problem = f"its answer has {error.error_count()} errors; is it of another version?"
            except Exception as error:
                answer.problem = f"its answer is not understood ({type(error).__name__})"
            finally:
                with self._lock:
                    self._waiting[name] -= 1
                done.set()

        thread = threading.Thread(target=work, name="tidemill-peer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            with self._lock:
                self._waiting[name] -= 1
            answer.problem = "no thread can be started for it"
            done.set()
        return answer, done
